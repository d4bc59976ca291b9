"""The decoder against transformers in float32: every architecture, and every option of its config that changes the numbers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import rigs
from tests.model import dense

IDS = [(7 * i * i + 3 * i + 1) % 256 for i in range(57)]
HALF = 8  # rotated pairs of a head of 16
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(HALF)],
    "long_factor": [2.0 + 0.7 * i for i in range(HALF)],
}
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-own-kv-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3}),
    "llama-yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}),
    "llama-new-spelling": ("llama", {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 20000.0}}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 9}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-short": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 128}),
    "phi3-long": ("phi3", {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 64}),
}


CASES |= {
    "gemma2": ("gemma2", {}),
    "gemma2-window": ("gemma2", {"sliding_window": 9}),
    "gemma2-uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-scale": ("gemma2", {"query_pre_attn_scalar": 100}),
    "gemma2-biases": ("gemma2", {"attention_bias": True}),
    "gemma2-layers": ("gemma2", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-window": ("gemma3_text", {"sliding_window": 9}),
    "gemma3-pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 2}),
    "gemma3-capped": ("gemma3_text", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}),
    "gemma3-old-ropes": ("gemma3_text", {"rope_parameters": None, "rope_theta": 5e4, "rope_local_base_freq": 500.0}),
    "gemma3-old-scaling": ("gemma3_text", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
}


def reference(folder, token_ids=IDS) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")  # others cap nothing
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, tmp_path):
    architecture, overrides = CASES[case]
    folder = rigs.mix(tmp_path, architecture, **overrides)
    model = dense.load(folder, max_model_len=64)
    expected = reference(folder)
    found = dense.logits_of(model, IDS)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    if "window" in case:
        assert model.attention_layers[-1].sliding_window == 9


def test_options_change_the_numbers(tmp_path):
    """Else the comparison above would hold for a decoder that ignores them."""
    plain = {a: reference(rigs.mix(tmp_path / a, a)) for a in (*rigs.ARCHITECTURES, *rigs.GEMMAS)}
    for case, (architecture, overrides) in CASES.items():
        if overrides and "dynamic" not in case and not {"num_key_value_heads", "head_dim"} & overrides.keys():
            assert (reference(rigs.mix(tmp_path / case, architecture, **overrides)) - plain[architecture]).abs().max() > 0.01


@pytest.mark.parametrize("architecture", (*rigs.ARCHITECTURES, *rigs.GEMMAS))
def test_chunks_and_single_tokens_give_the_same(architecture, tmp_path):
    model = dense.load(rigs.mix(tmp_path, architecture))
    whole = dense.logits_of(model, IDS)
    session = dense.Session(model)
    pieces = torch.cat([session.feed(IDS[:20]), session.feed(IDS[20:27]), *(session.feed([i]) for i in IDS[27:])])
    assert (whole - pieces).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(dtype, tmp_path):
    folder = rigs.mix(tmp_path)
    expected = dense.logits_of(dense.load(folder), IDS).log_softmax(-1)
    logits = dense.logits_of(dense.load(folder, dtype=dtype), IDS)
    assert logits.dtype == torch.float32  # over a tiny temperature they would overflow in half precision
    found = logits.log_softmax(-1)
    assert (found - expected).abs().mean() < (0.1 if dtype is torch.bfloat16 else 0.02)


def test_count_and_echo(tmp_path):
    for make, shift in ((rigs.count, 1), (rigs.echo, 0)):
        logits = dense.logits_of(dense.load(make(tmp_path / str(shift))), [3, 4, 63, 9])
        assert logits.argmax(-1).tolist() == [(t + shift) % 64 for t in (3, 4, 63, 9)]
        logprobs = logits.log_softmax(-1)
        assert torch.allclose(logprobs.max(-1).values, torch.tensor(rigs.COUNT_LOGPROB_NEXT), atol=1e-5)
        assert torch.allclose(logprobs.min(-1).values, torch.tensor(rigs.COUNT_LOGPROB_OTHER), atol=1e-5)


def test_attention_layers_carry_their_facts(tmp_path):
    model = dense.load(rigs.mix(tmp_path, "qwen3"))
    facts = [(a.layer, a.num_heads, a.num_kv_heads, a.head_dim, a.scale, a.softcap) for a in model.attention_layers]
    assert facts == [(layer, 4, 2, 32, 32**-0.5, None) for layer in (0, 1)]


def test_no_tokens(tmp_path):
    assert dense.logits_of(dense.load(rigs.mix(tmp_path)), torch.empty(0, dtype=torch.long)).shape == (0, 256)


def test_compiles_into_one_graph_for_any_number_of_tokens(tmp_path):
    """Attention and the packed products are opaque to the compiler, not breaks in the graph."""
    folder = rigs.mix(tmp_path, "qwen3")
    model = dense.load(folder)
    expected = dense.logits_of(model, IDS)
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model.forward = torch.compile(model.forward, backend=count, fullgraph=True, dynamic=True)
    for length in (len(IDS), 9, 30):
        assert (dense.logits_of(model, IDS[:length]) - expected[:length]).abs().max() < 1e-4
    assert len(graphs) == 1
    assert sum("lab.attention" in str(node.target) for node in graphs[0].graph.nodes) == 2


def test_config_json_of_the_oracle_is_the_one_we_read(tmp_path):
    """The rigs write the old spelling of config.json; the new one, as transformers saves it, means the same."""
    folder = rigs.mix(tmp_path / "old", rope_scaling=LLAMA3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "new")
    assert "rope_parameters" in json.loads((tmp_path / "new/config.json").read_text())
    assert torch.equal(dense.logits_of(dense.load(tmp_path / "new"), IDS), dense.logits_of(dense.load(folder), IDS))
