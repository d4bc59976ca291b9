"""Draft heads for the rigs, in the published formats: hand-made ones with known drafts, and random ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

KINDS = ("eagle1", "eagle3")


def hand_made(folder: Path, target: Path, keeps: str) -> Path:
    """An EAGLE-1 head whose decoder layer does nothing; fc keeps only the `embedding` or only the `hidden` state.

    Over COUNT the first is always right, and the second proposes the token that is there already.
    """
    config = json.loads((target / "config.json").read_text())
    weights = _weights("eagle1", config, torch.Generator().manual_seed(0))
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    size = config["hidden_size"]
    kept = torch.eye(size)
    nothing = torch.zeros(size, size)
    weights["fc.weight"] = torch.cat([kept, nothing] if keeps == "embedding" else [nothing, kept], 1)
    return write(folder, config, weights)


def random(folder: Path, target: Path, kind: str, draft_vocab: int | None = None, seed: int = 1) -> Path:
    """A head of random weights, so that each of its inputs matters."""
    config = json.loads((target / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    weights = _weights(kind, config, generator)
    vocab = config["vocab_size"]
    if draft_vocab is not None:
        ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values
        weights["d2t"] = ids - torch.arange(draft_vocab)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        weights["lm_head.weight"] = 3 * torch.randn(draft_vocab, config["hidden_size"], generator=generator) / 8
    return write(folder, config | ({} if draft_vocab is None else {"draft_vocab_size": draft_vocab}), weights)


def mtp(folder: Path, target: Path, kind: str, hidden_size: int | None = None, seed: int = 1) -> Path:
    """The checkpoint `target` with a multi-token-prediction module of random weights, named as `mimo` or `deepseek` has it.

    A mimo checkpoint calls itself MiMo, and is otherwise the Qwen2 that it was.
    """
    config = json.loads((target / "config.json").read_text())
    size = hidden_size or config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    layer = _weights("eagle1", {**config, "hidden_size": size}, generator)
    at = "model.mtp_layers.0" if kind == "mimo" else f"model.layers.{config['num_hidden_layers']}"
    module = {f"{at}{name.removeprefix('layers.0')}": x for name, x in layer.items() if name.startswith("layers.0")}
    names = (
        ("token_layernorm", "hidden_layernorm", "final_layernorm") if kind == "mimo" else ("enorm", "hnorm", "shared_head.norm")
    )
    for name in (*names, "input_layernorm"):
        module[f"{at}.{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    module[f"{at}.{'input_proj' if kind == 'mimo' else 'eh_proj'}.weight"] = layer["fc.weight"]
    if "model.layers.0.self_attn.q_proj.bias" in (weights := load_file(target / "model.safetensors")):
        for part in "qkv":
            rows = len(module[f"{at}.self_attn.{part}_proj.weight"])
            module[f"{at}.self_attn.{part}_proj.bias"] = 0.3 * torch.randn(rows, generator=generator)
    shutil.copytree(target, folder)
    config |= {"num_nextn_predict_layers": 1}
    if kind == "mimo":
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights | module, folder / "model.safetensors")
    return folder


def medusa(folder: Path, hidden_size: int, num_heads: int) -> Path:
    """Medusa heads that do nothing and bring no projection: each guesses what the target's own head says."""
    folder.mkdir(parents=True)
    at = "medusa_heads.blocks.{}.layers.0.{}"
    tensors = {at.format(head, "weight"): torch.zeros(hidden_size, hidden_size) for head in range(num_heads)}
    tensors |= {at.format(head, "bias"): torch.zeros(hidden_size) for head in range(num_heads)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


def _weights(kind: str, config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or size // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    at, wide, states = ("midlayer", 2 * size, 3 * size) if kind == "eagle3" else ("layers.0", size, 2 * size)
    shapes = {
        "fc.weight": (size, states),
        f"{at}.self_attn.q_proj.weight": (q, wide),
        f"{at}.self_attn.k_proj.weight": (kv, wide),
        f"{at}.self_attn.v_proj.weight": (kv, wide),
        f"{at}.self_attn.o_proj.weight": (size, q),
        f"{at}.mlp.gate_proj.weight": (inner, size),
        f"{at}.mlp.up_proj.weight": (inner, size),
        f"{at}.mlp.down_proj.weight": (size, inner),
    }
    weights = {name: 1.5 * torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = ["post_attention_layernorm"] + (["input_layernorm", "hidden_norm"] if kind == "eagle3" else [])
    weights |= {f"{at}.{name}.weight": 1 + 0.2 * torch.randn(size, generator=generator) for name in norms}
    if kind == "eagle3":
        weights["norm.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
    return weights
