"""Which models lab can run: one table from the names in config.json to what sets them apart. Torch-free.

All of them are pre-norm decoders with rotary positions, grouped query attention and a gated feed-forward layer; what
differs between them is data, so that one implementation (`lab.model.decoder`) serves them all.
"""

from dataclasses import dataclass, field, replace
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
    activation: str = "silu"  # of the gate, in the words of config.json
    full_every: int = 0  # every so many layers one sees all tokens and the others a window, unless layer_types says otherwise
    output_norms: bool = False  # what attention and feed-forward give is normalised before it is added
    norm_offset: bool = False  # norms multiply by one more than the checkpoint's weight
    scaled_embedding: bool = False  # embeddings are multiplied by the root of their size
    image_parts: tuple[str, ...] = ()  # parts of the checkpoint that are for images; the decoder is its text part
    local_theta: float | None = None  # layers with a window have a rope of their own, of this base by default


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
_MIMO = replace(_QWEN2, name="mimo")  # Qwen2, with a multi-token-prediction module beside it
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

_GEMMA2 = Architecture(
    "gemma2",
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    activation="gelu_pytorch_tanh",
    full_every=2,
    output_norms=True,
    norm_offset=True,
    scaled_embedding=True,
)
_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    defaults={name: value for name, value in _GEMMA2.defaults.items() if name != "attn_logit_softcapping"}  # which is ignored
    | {"vocab_size": 262208, "max_position_embeddings": 131072, "final_logit_softcapping": None, "rope_theta": 1e6},
    qk_norm=True,
    full_every=6,
    rope_kinds=frozenset({"default", "linear"}),
    local_theta=1e4,
)
_GEMMA3_WITH_IMAGES = replace(_GEMMA3, name="gemma3", image_parts=("vision_tower", "multi_modal_projector"))

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "MiMoForCausalLM": _MIMO,
    "Phi3ForCausalLM": _PHI3,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3_WITH_IMAGES,
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
