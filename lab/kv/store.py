"""The KV tensors, one per attention layer, in the layout that the layer's attention plugin asks for."""

import math
from collections.abc import Sequence

import torch

from lab.contracts.attention import Attention, AttentionSpec
from lab.memory import huge_empty


class KVStore:
    """Owns the cache of every attention layer. Which block belongs to whom is the block manager's business.

    The tensors are zero-filled: memory nobody wrote is read (and masked away) by some backends, so it must be finite.
    """

    def __init__(
        self,
        backends: list[Attention],
        num_blocks: int,
        scales: Sequence[torch.Tensor] = (),
        sinks: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """`scales`: scales_2K of each layer, where the specs ask for fixed ones; `sinks`: sinks_N of each, None for none."""
        self.num_blocks = num_blocks
        self.layers = [_zeros(b.kv_shape(num_blocks, b.spec.block_size), b.spec) for b in backends]
        if scales:
            for backend, kv, scales_2K in zip(backends, self.layers, scales, strict=True):
                backend.set_scales(kv, scales_2K)
        for backend, kv, sinks_N in zip(backends, self.layers, sinks, strict=bool(sinks)):
            if sinks_N is not None:
                backend.set_sinks(kv, sinks_N)


def _zeros(shape: tuple[int, ...], spec: AttentionSpec) -> torch.Tensor:
    if spec.device.type != "cpu":
        return torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device)
    # A token's keys and values of one layer lie in as many pages as there are KV heads: with small pages a decode step misses
    # the address cache at each. The memory comes from the system untouched, so a pool costs what is used of it.
    return huge_empty(math.prod(shape) * spec.kv_dtype.itemsize).view(spec.kv_dtype).view(shape)


def bytes_per_block(backends: list[Attention]) -> int:
    """Bytes that one more block takes over all layers, with what the backends' layouts add to keys and values."""
    return sum(_bytes(backend, 2) - _bytes(backend, 1) for backend in backends)


def _bytes(backend: Attention, num_blocks: int) -> int:
    return math.prod(backend.kv_shape(num_blocks, backend.spec.block_size)) * backend.spec.kv_dtype.itemsize
