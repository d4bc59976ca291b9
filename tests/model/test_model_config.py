"""config.json as it comes: defaults, spellings, and what is refused."""

import json
import subprocess
import sys

import pytest

from lab.errors import UserError
from lab.model.config import read_config
from tests import rigs


def config(tmp_path, architecture="llama", drop=(), generation=None, **values):
    rigs.mix(tmp_path, architecture)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in drop}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_config(tmp_path)


def test_defaults_are_those_of_the_architecture(tmp_path):
    drop = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings", "eos_token_id", "torch_dtype")
    llama = config(tmp_path / "llama", drop=drop)
    assert (llama.num_kv_heads, llama.rms_norm_eps, llama.rope.theta) == (4, 1e-6, 10000.0)
    assert (llama.max_position_embeddings, llama.eos_ids, llama.torch_dtype) == (2048, {2}, "float32")
    phi3 = config(tmp_path / "phi3", "phi3", drop=drop)
    assert (phi3.rms_norm_eps, phi3.max_position_embeddings, phi3.eos_ids) == (1e-5, 4096, {32000})
    assert config(tmp_path / "qwen3", "qwen3", drop=(*drop, "head_dim")).head_dim == 128
    assert config(tmp_path / "mistral", "mistral", drop=("sliding_window",)).sliding_window == 4096


@pytest.mark.parametrize(
    ("ours", "generation", "expected"),
    [(None, None, set()), (7, None, {7}), ([7, 8], None, {7, 8}), (7, {"eos_token_id": [9, 7]}, {7, 9}), (7, {}, {7})],
)
def test_eos_of_both_files(ours, generation, expected, tmp_path):
    assert config(tmp_path, eos_token_id=ours, generation=generation).eos_ids == expected


def test_dtype_in_both_spellings(tmp_path):
    assert config(tmp_path, torch_dtype="bfloat16").torch_dtype == "bfloat16"
    assert config(tmp_path, dtype="float16").torch_dtype == "float16"


def test_windows(tmp_path):
    assert config(tmp_path / "a", "mistral", sliding_window=5).layer_windows == (5, 5)
    assert config(tmp_path / "b", "qwen2", sliding_window=5).layer_windows == (None, None)
    on = {"use_sliding_window": True, "sliding_window": 5}
    assert config(tmp_path / "c", "qwen2", max_window_layers=1, **on).layer_windows == (None, 5)
    types = ["sliding_attention", "full_attention"]
    chosen = config(tmp_path / "d", "qwen3", layer_types=types, **on)
    assert (chosen.layer_windows, chosen.sliding_window) == ((5, None), 5)
    assert config(tmp_path / "e", sliding_window=5).sliding_window is None


GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}


def of_json(tmp_path, **values):
    tmp_path.mkdir(parents=True, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def test_gemma2_as_published(tmp_path):
    """The config.json of Gemma-2 2B, which leaves open how its head and its layers are."""
    own = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "torch_dtype": "float32",
    }
    found = of_json(tmp_path, **own, rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, query_pre_attn_scalar=256)
    assert (found.hidden_size, found.num_layers, found.num_kv_heads, found.head_dim) == (2304, 26, 4, 256)
    assert found.layer_windows == (4096, None) * 13 and found.tie_word_embeddings
    assert (found.attention_softcap, found.logits_softcap, found.attention_scale) == (50.0, 30.0, 1 / 16)
    assert found.output_norms and found.norm_offset and found.scaled_embedding and found.local_rope is None
    assert (found.activation, found.qk_norm, found.eos_ids) == ("gelu_pytorch_tanh", False, {1})


def test_gemma3_as_published(tmp_path):
    found = of_json(tmp_path, **GEMMA3_1B)
    assert [layer for layer, window in enumerate(found.layer_windows) if window is None] == [5, 11, 17, 23]
    assert set(found.layer_windows) == {512, None}
    assert (found.rope.theta, found.local_rope.theta, found.rope.kind) == (1e6, 1e4, "default")
    assert (found.attention_softcap, found.logits_softcap, found.qk_norm, found.eos_ids) == (None, None, True, {1, 106})


def test_ropes_of_gemma3_in_both_spellings(tmp_path):
    new = {name: value for name, value in GEMMA3_1B.items() if not name.startswith("rope")}
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    ours, theirs = of_json(tmp_path / "new", **new), of_json(tmp_path / "old", **old)
    assert (ours.rope, ours.local_rope) == (theirs.rope, theirs.local_rope)
    assert (ours.rope.kind, ours.rope.factor, ours.local_rope.kind) == ("linear", 8.0, "default")


def test_model_type_is_enough(tmp_path):
    assert config(tmp_path, "qwen2", drop=("architectures",)).architecture == "qwen2"


REFUSED = {
    "architecture": (
        {"architectures": ["LlamaForCasualLM"]},
        ("'LlamaForCasualLM'", "mean 'LlamaForCausalLM'", "Phi3ForCausalLM"),
    ),
    "unknown architecture": ({"architectures": ["MambaForCausalLM"]}, ("no architecture named 'MambaForCausalLM'",)),
    "no architecture": ({"architectures": None, "model_type": None}, ("names no architecture",)),
    "model type": ({"architectures": None, "model_type": "lama"}, ("model type named 'lama'", "mean 'llama'")),
    "heads": ({"num_key_value_heads": 3}, ("'num_key_value_heads' 3 does not divide num_attention_heads 4",)),
    "head dim": ({"num_attention_heads": 6, "num_key_value_heads": 6}, ("6 does not divide hidden_size 64",)),
    "layers": ({"num_hidden_layers": 0}, ("'num_hidden_layers' must be a positive integer, not 0",)),
    "vocabulary": ({"vocab_size": "many"}, ("'vocab_size' must be a positive integer, not 'many'",)),
    "boolean": ({"tie_word_embeddings": "yes"}, ("'tie_word_embeddings' must be true or false",)),
    "eps": ({"rms_norm_eps": 0}, ("'rms_norm_eps' must be a positive number",)),
    "missing": ({"hidden_size": None}, ("'hidden_size' is missing",)),
    "both directions": ({"use_bidirectional_attention": True}, ("'use_bidirectional_attention' is not supported",)),
    "activation": ({"hidden_act": "gelu"}, ("'hidden_act' 'gelu' is not supported",)),
    "dtype": ({"torch_dtype": "int3"}, ("'torch_dtype' 'int3' is not one of float32, bfloat16, float16",)),
    "eos": ({"eos_token_id": "</s>"}, ("'eos_token_id' must be a token id",)),
    "rope type": ({"rope_scaling": {"type": "yarm", "factor": 2}}, ("no rope type named 'yarm'", "mean 'yarn'")),
    "rope factor": ({"rope_scaling": {"type": "linear"}}, ("'rope_scaling.factor' must be a positive number, not None",)),
    "rope object": ({"rope_scaling": 3}, ("'rope_scaling' must be an object",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_and_field(case, tmp_path):
    values, parts = REFUSED[case]
    with pytest.raises(UserError) as refusal:
        config(tmp_path, **values)
    for part in (str(tmp_path / "config.json"), *parts):
        assert part in str(refusal.value)


def test_longrope_needs_its_factors(tmp_path):
    with pytest.raises(UserError, match="'rope_scaling.short_factor' must be a list of 8 numbers"):
        config(tmp_path, "phi3", rope_scaling={"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 3})


@pytest.mark.parametrize(
    ("text", "problem"),
    [(b'{"vocab_size": 3,,}', "line 1, column 18"), (b"[1]", "must hold a JSON object"), (b"\xff\xfe\x00", "not a text file")],
)
def test_broken_json(text, problem, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=problem):
        read_config(tmp_path)


def test_no_config(tmp_path):
    with pytest.raises(UserError, match=r"has no config\.json: it is not a model folder"):
        read_config(tmp_path)


def test_needs_no_torch():
    code = "import sys, lab.model.config, lab.model.source; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
