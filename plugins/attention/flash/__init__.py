"""Our own paged attention kernels: keys and values are read where they lie in the cache, each once, with an online softmax.

One layer's cache is kv[P, K, 2, B, DP]: a block's keys and values of one KV head are one piece of memory. DP is the head dim,
on the CPU rounded up to 32 with the rest of each row zero, so that its kernels need no code for odd dims.

A quantized cache with scales of each token and head is kv[P, K, S]: of a block and KV head the keys, the values, then the
scales of both in bfloat16, as one piece. With fixed scales it is kv[P + 1, K, 2, B, DP], and the last block begins with them.
Sinks are in further blocks before that one.

The kernels of a device are a class of `plan`, `write` and `attend` in a module of its own, imported where it is used.
"""

import math
from typing import Any, Literal

import torch

from lab.api import Attention, AttentionSpec, Capabilities, UserError, dataclass, register

from .._quantized import dequantize, fixed_scales, quantize, scales_of
from ._sinks import sink_blocks, sinks_of
from .cpu import LIBRARY, SOURCES, CpuKernels

SCALE_BYTES = 2  # bfloat16


def _kernels(device: str) -> type:
    if device == "cuda":
        from .cuda import CudaKernels

        return CudaKernels
    return CpuKernels


@register("attention", "flash")
class Flash(Attention):
    """Our own kernels over the paged cache: Triton on CUDA; C++ for AVX-512, AMX, AVX2 or any CPU, compiled once."""

    @dataclass(frozen=True)
    class Options:
        num_splits: int = 0  # pieces that a row's keys are cut into; 0: as the threads or the GPU need
        cascade: int | str = "auto"  # attend once to keys that rows share: auto (where it pays), never, or from so many on
        isa: Literal["auto", "amx", "avx512_mixed", "avx512_bf16", "avx512", "avx2", "portable"] = "auto"  # of the CPU

    libraries = {LIBRARY: SOURCES}
    capabilities = Capabilities(
        devices={"cpu", "cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        kv_dtypes={"float32", "bfloat16", "float16", "fp8", "int8"},
        head_dims=set(range(8, 257, 8)),
        features={"gqa", "sliding_window", "softcap", "spec_verify", "tree_verify", "token_head_scales", "lse"}
        | {"batch_invariant", "sinks"},
        graph="any",
        packages=("cuda:triton",),
        requires={"cxx"},  # on CUDA it is Triton that needs a compiler
        priority=20,
        kv_layout="PK2BH",
    )

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options, spec)
        if spec.batch_invariant and options.cascade not in ("auto", "never"):
            raise UserError(
                f"attention.cascade={options.cascade}: with debug.batch_invariant=true nothing is attended to for several rows "
                "at once. Leave it out."
            )
        self._kernels = _kernels(spec.device.type)(options, spec)

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        kind, heads, dim = self.spec.kv_scales, self.spec.num_kv_heads, self._dim
        shape = (heads, 2 * block_size * (dim + SCALE_BYTES)) if kind == "token_head" else (heads, 2, block_size, dim)
        return (num_blocks + (kind == "head") + sink_blocks(self.spec, shape), *shape)

    def export_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        blocks = kv[block_ids]
        x_XK2BH = self._rows(blocks)[..., : self.spec.head_dim]
        if self.spec.kv_scales != "none":
            x_XK2BH = dequantize(x_XK2BH, self._scales(kv, blocks)).to(self.spec.dtype)
        return x_XK2BH.permute(0, 3, 2, 1, 4).contiguous()

    def load_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor, x_XB2KH: torch.Tensor) -> None:
        x_XK2BH = x_XB2KH.permute(0, 3, 2, 1, 4)
        blocks = torch.zeros(len(block_ids), *kv.shape[1:], dtype=kv.dtype, device=kv.device)
        if self.spec.kv_scales != "none":
            scales = self._scales(kv, blocks)
            if self.spec.kv_scales == "token_head":
                scales.copy_(scales_of(x_XK2BH, kv.dtype))
            x_XK2BH = quantize(x_XK2BH, scales, kv.dtype)
        self._rows(blocks)[..., : self.spec.head_dim] = x_XK2BH.to(kv.dtype)
        kv[block_ids] = blocks

    def set_scales(self, kv: torch.Tensor, scales_2K: torch.Tensor) -> None:
        fixed_scales(kv, self.spec.num_kv_heads).copy_(scales_2K)

    def set_sinks(self, kv: torch.Tensor, sinks_N: torch.Tensor) -> None:
        sinks_of(kv, self.spec).copy_(sinks_N)

    @property
    def _dim(self) -> int:
        multiple = self._kernels.dim_multiple
        return -(-self.spec.head_dim // multiple) * multiple

    def _rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Stored rows, [X, K, 2, B, DP], a view of blocks."""
        if self.spec.kv_scales != "token_head":
            return blocks
        shape = 2, self.spec.block_size, self._dim
        return blocks[..., : math.prod(shape)].unflatten(-1, shape)

    def _scales(self, kv: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """The scales of stored rows, [X, K, 2, B]: a view of the blocks, or those of the layer for all."""
        if self.spec.kv_scales == "head":
            return fixed_scales(kv, self.spec.num_kv_heads).T[None, :, :, None]
        size = self.spec.block_size
        return blocks[..., 2 * size * self._dim :].view(torch.bfloat16).unflatten(-1, (2, size))

    def plan(self, batch: Any, reuse: Any = None) -> Any:
        return self._kernels.plan(batch, reuse)

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        self._kernels.write(k_TKH, v_TKH, kv, slots_T)

    def move(self, kv: torch.Tensor, from_X: torch.Tensor, to_X: torch.Tensor) -> None:
        if isinstance(self._kernels, CpuKernels):
            return self._kernels.move(kv, from_X, to_X)
        size = self.spec.block_size
        parts = [self._rows(kv)] + ([self._scales(kv, kv)] if self.spec.kv_scales == "token_head" else [])
        for part in parts:
            part[to_X // size, :, :, to_X % size] = part[from_X // size, :, :, from_X % size]
        return None

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Any, out_TNH: torch.Tensor) -> None:
        self._kernels.attend(q_TNH, kv, plan, out_TNH)

    def operators(self) -> Any:
        return self._kernels.operators() if isinstance(self._kernels, CpuKernels) else None

    def attend_lse(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Any, out_TNH: torch.Tensor, lse_TN: torch.Tensor) -> None:
        self._kernels.attend_lse(q_TNH, kv, plan, out_TNH, lse_TN)
