"""Our own paged attention kernels: keys and values are read where they lie in the cache, each once, with an online softmax.

One layer's cache is kv[P, K, 2, B, DP]: a block's keys and values of one KV head are one piece of memory. DP is the head dim,
on the CPU rounded up to 32 with the rest of each row zero, so that its kernels need no code for odd dims.

The kernels of a device are a class of `plan`, `write` and `attend` in a module of its own, imported where it is used.
"""

from typing import Any

import torch

from lab.api import Attention, AttentionSpec, Capabilities, dataclass, register

from .cpu import LIBRARY, SOURCES, CpuKernels


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
        isa: str = "auto"  # instruction set on the CPU: amx, avx512_bf16, avx512, avx2 or portable; auto: the fastest

    libraries = {LIBRARY: SOURCES}
    capabilities = Capabilities(
        devices={"cpu", "cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        kv_dtypes={"float32", "bfloat16", "float16"},
        head_dims=set(range(8, 257, 8)),
        features={"gqa", "sliding_window", "softcap", "spec_verify"},
        graph="any",
        packages=("cuda:triton",),
        requires={"cxx"},  # on CUDA it is Triton that needs a compiler
        priority=20,
        kv_layout="PK2BH",
    )

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options, spec)
        self._kernels = _kernels(spec.device.type)(options, spec)

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        multiple = self._kernels.dim_multiple
        padded = -(-self.spec.head_dim // multiple) * multiple
        return (num_blocks, self.spec.num_kv_heads, 2, block_size, padded)

    def export_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv[block_ids, ..., : self.spec.head_dim].permute(0, 3, 2, 1, 4).contiguous()

    def load_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor, x_XB2KH: torch.Tensor) -> None:
        padding = kv.shape[-1] - self.spec.head_dim
        x_XK2BH = x_XB2KH.permute(0, 3, 2, 1, 4).to(kv.dtype)
        kv[block_ids] = torch.nn.functional.pad(x_XK2BH, (0, padding))

    def plan(self, batch: Any, reuse: Any = None) -> Any:
        return self._kernels.plan(batch, reuse)

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        self._kernels.write(k_TKH, v_TKH, kv, slots_T)

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Any, out_TNH: torch.Tensor) -> None:
        self._kernels.attend(q_TNH, kv, plan, out_TNH)
