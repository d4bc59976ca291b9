"""The KV tensors, one per attention layer, in the layout that the layer's attention plugin asks for."""

import logging
import math
import mmap

import torch

from lab.contracts.attention import Attention, AttentionSpec

log = logging.getLogger("lab")


class KVStore:
    """Owns the cache of every attention layer. Which block belongs to whom is the block manager's business.

    The tensors are zero-filled: memory nobody wrote is read (and masked away) by some backends, so it must be finite.
    """

    def __init__(self, backends: list[Attention], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.layers = [_zeros(b.kv_shape(num_blocks, b.spec.block_size), b.spec) for b in backends]


def _zeros(shape: tuple[int, ...], spec: AttentionSpec) -> torch.Tensor:
    if spec.device.type != "cpu":
        return torch.zeros(shape, dtype=spec.kv_dtype, device=spec.device)
    memory = _untouched_memory(math.prod(shape) * spec.kv_dtype.itemsize)
    return torch.frombuffer(memory, dtype=spec.kv_dtype).view(shape)


def _untouched_memory(num_bytes: int) -> mmap.mmap:
    """Zeros from the system that cost memory only where they are touched; torch.zeros writes every page at once.

    On Linux in huge pages: a token's keys and values of one layer lie in as many pages as there are KV heads, and with
    small ones a decode step misses the address cache at each, a prefill waits for the system at each.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel that was built without them
            log.debug("no huge pages for the KV cache: %s", error)
    return memory


def bytes_per_block(backends: list[Attention]) -> int:
    """Bytes that one more block takes over all layers, with what the backends' layouts add to keys and values."""
    return sum(_bytes(b, 2) - _bytes(b, 1) for b in backends)


def _bytes(backend: Attention, num_blocks: int) -> int:
    return math.prod(backend.kv_shape(num_blocks, backend.spec.block_size)) * backend.spec.kv_dtype.itemsize
