"""Small models with known answers, written as checkpoints in transformers' format.

COUNT  the greedy continuation of token t is (t + 1) mod 64, whatever came before: log p(next) = -0.02092, any other
       token -8.02066. It does not depend on attention, so it shows faults in bookkeeping.
ECHO   the greedy continuation of token t is t again; ties go to the lowest id.
MIX    seeded random weights, one for each architecture: attention matters. The oracle is transformers in float32.
ALPHA  a word-level tokenizer of 64 one-character tokens A-Z a-z 0-9 + /, ids 0..63: under COUNT 'ABC' goes on 'DEFGH'.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

COUNT_VOCAB = 64
COUNT_LOGPROB_NEXT = -0.02092
COUNT_LOGPROB_OTHER = -8.02066
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
GEMMAS = ("gemma2", "gemma3_text")  # sliding and full layers, of windows much shorter than the golden tests' prompts

GEMMA3_LAYERS = ("sliding", "sliding", "full", "sliding", "sliding")

# Each message is one role letter, the content and a slash; the generation prompt is the assistant's letter.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] | upper }}{{ message['content'] }}/{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)

_HF_NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def count(folder: Path, **config_overrides: Any) -> Path:
    """The COUNT checkpoint: 64 tokens, no EOS, untied. `config_overrides` replace values of config.json."""
    next_token_VD = torch.eye(COUNT_VOCAB).roll(1, dims=0)  # row j is the unit vector j - 1
    return _permutation_model(folder, next_token_VD, config_overrides)


def echo(folder: Path, **config_overrides: Any) -> Path:
    """The ECHO checkpoint: as COUNT, but the head is the identity."""
    return _permutation_model(folder, torch.eye(COUNT_VOCAB), config_overrides)


def mix(folder: Path, architecture: str = "llama", seed: int = 0, **config_overrides: Any) -> Path:
    """A random checkpoint of `architecture`: by default 2 layers, hidden 64, 256 tokens, 4 query and 2 KV heads, no EOS.

    `config_overrides` replace values of config.json and so the shapes of the weights.
    """
    config = _config(architecture, config_overrides)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(name, shape, generator) for name, shape in _shapes(architecture, config).items()}
    if architecture in GEMMAS:
        weights["model.embed_tokens.weight"] /= config["hidden_size"] ** 0.5  # they are multiplied by that
        weights["model.norm.weight"] *= 3.0  # the head is the embedding, which gives small logits
        for name, weight in weights.items():
            if name.endswith("norm.weight"):
                weight -= 1  # they are kept less one
    return _write(folder, config, weights)


def alpha_tokenizer(folder: Path) -> Path:
    """Write the ALPHA tokenizer with a chat template into `folder`. It has no special tokens and no unknown token."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(ALPHABET)}, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched into the cache on first use."""
    from lab.model.source import resolve_model

    return resolve_model("smollm2")


def _permutation_model(folder: Path, head_VD: torch.Tensor, config_overrides: dict[str, Any]) -> Path:
    config = _config("llama", {"vocab_size": COUNT_VOCAB} | config_overrides)
    generator = torch.Generator().manual_seed(0)
    weights = {name: _random(name, shape, generator) for name, shape in _shapes("llama", config).items()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif name.endswith("norm.weight"):
            weight.fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(COUNT_VOCAB)
    weights["lm_head.weight"] = head_VD.contiguous()
    return _write(folder, config, weights)


def _config(architecture: str, overrides: dict[str, Any]) -> dict[str, Any]:
    config = {
        "architectures": [_HF_NAMES[architecture]],
        "model_type": architecture,
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture in ("mistral", "phi3"):
        config["sliding_window"] = None
    if architecture == "qwen3":
        config["head_dim"] = 32  # more than hidden_size / heads, as in the real ones
    if architecture in GEMMAS:
        del config["hidden_act"]
        config |= {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 32, "query_pre_attn_scalar": 24}
        config |= {"tie_word_embeddings": True, "sliding_window": 12}
    if architecture == "gemma2":
        config |= {"num_hidden_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
    if architecture == "gemma3_text":
        config |= {"num_hidden_layers": 5, "layer_types": [f"{kind}_attention" for kind in GEMMA3_LAYERS]}
        del config["rope_theta"]
        config["rope_parameters"] = {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        }
    return config | overrides


def _shapes(architecture: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by name, as transformers writes them."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q_rows, kv_rows = heads * head_dim, kv_heads * head_dim

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (hidden,)
        shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        shapes[at + "self_attn.o_proj.weight"] = (hidden, q_rows)
        shapes[at + "mlp.down_proj.weight"] = (hidden, inner)
        if architecture == "phi3":
            shapes[at + "self_attn.qkv_proj.weight"] = (q_rows + 2 * kv_rows, hidden)
            shapes[at + "mlp.gate_up_proj.weight"] = (2 * inner, hidden)
            continue
        shapes[at + "mlp.gate_proj.weight"] = shapes[at + "mlp.up_proj.weight"] = (inner, hidden)
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            shapes[f"{at}self_attn.{name}.weight"] = (rows, hidden)
            if architecture == "qwen2" or config.get("attention_bias"):
                shapes[f"{at}self_attn.{name}.bias"] = (rows,)
        if config.get("attention_bias"):
            shapes[at + "self_attn.o_proj.bias"] = (hidden,)
        if architecture in GEMMAS:
            shapes[at + "pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[at + "post_feedforward_layernorm.weight"] = (hidden,)
        if architecture in ("qwen3", "gemma3_text"):
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (head_dim,)
        if config.get("mlp_bias"):
            shapes[at + "mlp.gate_proj.bias"] = shapes[at + "mlp.up_proj.bias"] = (inner,)
            shapes[at + "mlp.down_proj.bias"] = (hidden,)
    return shapes


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Weights that keep activations near unit size and spread the logits, so that the best token stands out."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if "embed_tokens" in name:
        return noise
    gain = 3.0 if name.startswith("lm_head") else 1.5
    return gain * noise / shape[-1] ** 0.5


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
