"""Writes a head in the published format of its kind: config.json and model.safetensors.

What the target has is not stored: its embeddings, and its vocabulary projection, of which the draft vocabulary's rows are used.
A head's own `lm_head` would stand beside it, as in published ones.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from lab.model.config import ModelConfig
from lab.model.safetensors_checkpoint import SafetensorsCheckpoint
from lab.train.heads import Eagle1, Eagle3, Medusa

ROPE = ("rope_theta", "rope_scaling", "rope_parameters")  # a head turns its keys and queries as its target does
PREFIX = {"medusa1": "medusa_heads."}
ARCHITECTURES = {"eagle1": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3", "medusa1": "MedusaModel"}


def write_head(
    folder: Path,
    head: Eagle1 | Eagle3 | Medusa,
    config: ModelConfig,
    ids_V: torch.Tensor,
    aux_layers: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Write the head, each file whole or not at all."""
    prefix = PREFIX.get(head.kind, "")
    tensors = {f"{prefix}{name}": tensor.detach().to(dtype).cpu().contiguous() for name, tensor in head.state_dict().items()}
    if len(ids_V) < config.vocab_size:
        tensors |= _maps(head, ids_V.cpu(), config.vocab_size)
    (folder / "model.safetensors.part").write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(_config(head, config, len(ids_V), aux_layers, dtype), indent=2)
    (folder / "config.json.part").write_text(text + "\n", encoding="utf-8")
    for name in ("model.safetensors", "config.json"):
        (folder / f"{name}.part").replace(folder / name)


def read_head(folder: Path, head: nn.Module) -> None:
    """Take over the weights of a head that was written; its draft vocabulary is of no account, since no weight is tied to it.

    Raises UserError for a head of other sizes.
    """
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        for name, parameter in head.named_parameters():
            checkpoint.read(f"{PREFIX.get(head.kind, '')}{name}", parameter.data)
    finally:
        checkpoint.close()


def _maps(head: Eagle1 | Eagle3 | Medusa, ids_V: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """Between draft and target vocabulary: EAGLE stores offsets, Medusa the ids themselves."""
    if isinstance(head, Medusa):
        return {"medusa_heads.token_map": ids_V}
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[ids_V] = True
    return {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": known}


def _config(
    head: Eagle1 | Eagle3 | Medusa, config: ModelConfig, draft_vocab: int, aux_layers: tuple[int, ...], dtype: torch.dtype
) -> dict[str, Any]:
    common = {
        "architectures": [ARCHITECTURES[head.kind]],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if isinstance(head, Medusa):
        return {**common, "medusa_num_heads": len(head.blocks), "medusa_num_layers": 1}
    found = {
        **common,
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": head.layer.mlp.down_proj.in_features,
        "rms_norm_eps": config.rms_norm_eps,
        **{name: config.raw[name] for name in ROPE if config.raw.get(name) is not None},
        "max_position_embeddings": config.max_position_embeddings,
        "draft_vocab_size": draft_vocab,
    }
    if isinstance(head, Eagle3):
        ids = list(aux_layers)
        return {**found, "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}}
    return {**found, "bias": False}
