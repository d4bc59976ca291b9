"""GGUF files as checkpoints: their tensors by transformers' names, dequantized on load.

The llama family's query and key rows are stored for the other rotary layout, in which a rotated pair lies side by side;
they are put back in transformers' order, where a pair is half a head apart. Gemma's norms are stored with the one added that
its checkpoints leave out (llama.cpp, convert_hf_to_gguf.py); it is taken off again.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from lab.model.checkpoint import Checkpoint, check_fit
from lab.model.config import ModelConfig
from lab.model.gguf_file import GgufFile

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAMES_WITH_OUTPUT_NORMS = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Rotary factors are tensors in GGUF; they belong to the config, which reads them itself.
CONFIG_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufCheckpoint(Checkpoint):
    """The tensors of one GGUF file."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        super().__init__()
        self.file = GgufFile(path)
        self.config = config
        self._name_of = {hf_name(name, config): name for name in self.file.tensors}
        for name in CONFIG_TENSORS:
            self._name_of.pop(name, None)
        # the file says itself whether its rows are permuted: by the family it was converted as
        self._permuted = self.file.metadata.get("general.architecture") == "llama"

    def _read(self, name: str, out: torch.Tensor) -> None:
        if name not in self._name_of:
            raise self.missing(name, self.file.path)
        tensor = self.file.tensors[self._name_of[name]]
        check_fit(self.file.path, name, tensor.shape, torch.float32, out)
        num_heads = self._permuted_heads(name)
        order = None if num_heads is None else torch.from_numpy(unpermuted(out.shape[0], num_heads)).to(out.device)
        if out.dim() == 1:
            values = np.concatenate([chunk[0] for _, chunk in self.file.dequantized(tensor.name)])
            if self.config.norm_offset and name.endswith("norm.weight"):
                values = values - 1
            exact = torch.from_numpy(values).to(out.device, out.dtype)
            out.copy_(exact) if order is None else out.index_copy_(0, order, exact)
            return
        for first, chunk in self.file.dequantized(tensor.name):
            exact = torch.from_numpy(chunk if chunk.flags.writeable else chunk.copy())
            if order is None:
                out[first : first + len(chunk)].copy_(exact)
            else:
                out.index_copy_(0, order[first : first + len(chunk)], exact.to(out.device, out.dtype))

    def _permuted_heads(self, name: str) -> int | None:
        if self._permuted and ".self_attn.q_proj." in name:
            return self.config.num_heads
        if self._permuted and ".self_attn.k_proj." in name:
            return self.config.num_kv_heads
        return None

    def names(self) -> Iterable[str]:
        return self._name_of.keys()

    def shapes(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Every tensor with its shape."""
        return [(name, self.file.tensors[source].shape) for name, source in self._name_of.items()]

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name not in self._name_of:
            raise self.missing(name, self.file.path)
        return self.file.tensors[self._name_of[name]].shape

    def file_of(self, name: str) -> str:
        return str(self.file.path)

    def close(self) -> None:
        self.file.close()


def unpermuted(num_rows: int, num_heads: int) -> np.ndarray:
    """Where each row of the file belongs: within a head of 2h rows, file row 2i + s is row s * h + i."""
    pairs = num_rows // num_heads // 2
    place = np.arange(num_rows).reshape(num_heads, 2, pairs)
    return place.swapaxes(1, 2).reshape(num_rows)


def hf_name(name: str, config: ModelConfig) -> str:
    """The name transformers gives a tensor; a name that is not of the family's is returned as it is."""
    if match := _LAYER.fullmatch(name):
        layer, part, suffix = match.groups()
        names = _LAYER_NAMES_WITH_OUTPUT_NORMS if config.output_norms else _LAYER_NAMES
        if part in names:
            target = "mlp.gate_up_proj" if config.fused_checkpoint and part == "ffn_up" else names[part]
            return f"model.layers.{layer}.{target}.{suffix}"
    base, _, suffix = name.rpartition(".")
    return f"{_GLOBAL_NAMES[base]}.{suffix}" if base in _GLOBAL_NAMES else name
