"""Which models lab can run: one table from the names in config.json to what sets them apart. Torch-free.

All of them are pre-norm decoders with rotary positions, grouped query attention and a SwiGLU feed-forward layer; what
differs between them is data, so that one implementation (`lab.model.decoder`) serves them all.
"""

from dataclasses import dataclass, field
from typing import Any

from lab.errors import UserError, unknown


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of checkpoints. `defaults` are the values transformers assumes for what config.json leaves out."""

    name: str
    defaults: dict[str, Any] = field(default_factory=dict)
    qkv_bias: bool = False  # always; otherwise config.json's attention_bias decides, for the output projection too
    qk_norm: bool = False  # queries and keys are normalised per head
    fused_checkpoint: bool = False  # the checkpoint holds qkv_proj and gate_up_proj rather than their parts
    window_from_layer: bool = False  # only with use_sliding_window, and only layers from max_window_layers on
    rope_kinds: frozenset[str] = frozenset({"default", "linear", "dynamic", "llama3", "yarn", "longrope"})
    rope_aliases: dict[str, str] = field(default_factory=dict)
    partial_rotary: bool = False  # partial_rotary_factor applies to the default rope as well


_LLAMA = Architecture("llama", defaults={"max_position_embeddings": 2048, "eos_token_id": 2})
_MISTRAL = Architecture("mistral", defaults={"max_position_embeddings": 131072, "eos_token_id": 2, "sliding_window": 4096})
_QWEN2 = Architecture(
    "qwen2",
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    qkv_bias=True,
    window_from_layer=True,
)
_QWEN3 = Architecture(
    "qwen3",
    defaults={"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    qk_norm=True,
    window_from_layer=True,
)
_PHI3 = Architecture(
    "phi3",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32000,
    },
    fused_checkpoint=True,
    rope_kinds=frozenset({"default", "longrope"}),
    rope_aliases={"su": "longrope", "yarn": "longrope"},
    partial_rotary=True,
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Phi3ForCausalLM": _PHI3,
}
OF_MODEL_TYPE = {architecture.name: hf_name for hf_name, architecture in ARCHITECTURES.items()}


def find_architecture(hf_config: dict[str, Any], where: str) -> tuple[str, Architecture]:
    """The architecture of a config.json, with its name in transformers.

    Raises:
        UserError: none is named, or lab has no implementation; `where` is the file that the message names.
    """
    listed = hf_config.get("architectures") or [OF_MODEL_TYPE.get(hf_config.get("model_type", ""))]
    if not isinstance(listed, list) or not isinstance(listed[0], str):
        model_type = hf_config.get("model_type")
        if isinstance(model_type, str):
            raise UserError(f"{where}: {unknown('model type', model_type, OF_MODEL_TYPE)}")
        raise UserError(f"{where}: it names no architecture ('architectures' and 'model_type' are missing).")
    for hf_name in listed:
        if hf_name in ARCHITECTURES:
            return hf_name, ARCHITECTURES[hf_name]
    raise UserError(f"{where}: {unknown('architecture', listed[0], ARCHITECTURES)}")
