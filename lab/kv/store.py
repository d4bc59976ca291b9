"""The KV tensors, one per attention layer, in the layout that the layer's attention plugin asks for.

With several KV groups, layers of different groups lie in one tensor (`lab.kv.groups`).
"""

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
        place_of: Sequence[int] | None = None,
        sinks: Sequence[torch.Tensor | None] = (),
        draft_backends: Sequence[Attention] = (),
        num_scratch: int = 0,
    ) -> None:
        """`scales`: scales_2K of each layer, where the specs ask for fixed ones; `sinks`: sinks_N of each, None for none.
        `place_of`: as in Grouping. `draft_backends`: of a proposer's own layers, whose caches have `num_scratch` more blocks
        than the pool.
        """
        self.num_blocks = num_blocks
        self.draft_backends = list(draft_backends)
        self.draft_layers = [_zeros(b.kv_shape(num_blocks + num_scratch, b.spec.block_size), b.spec) for b in draft_backends]
        places = first_of_places(backends, place_of)
        tensors = {place: _zeros(b.kv_shape(num_blocks, b.spec.block_size), b.spec) for place, b in places.items()}
        self.layers = [tensors[place] for place in (range(len(backends)) if place_of is None else place_of)]
        has_own = bool(scales) or any(sinks_N is not None for sinks_N in sinks)
        assert len(places) == len(backends) or not has_own, "layers that share a tensor cannot have scales or sinks in it"
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


def first_of_places(backends: list[Attention], place_of: Sequence[int] | None) -> dict[int, Attention]:
    """The first layer's backend of each tensor of the pool; None: every layer has its own."""
    if place_of is None:
        return dict(enumerate(backends))
    return {place: backends[place_of.index(place)] for place in sorted(set(place_of))}


def bytes_per_block(backends: list[Attention], place_of: Sequence[int] | None = None) -> int:
    """Bytes that one more block takes over all tensors, with what the backends' layouts add to keys and values."""
    return sum(_bytes(backend, 2) - _bytes(backend, 1) for backend in first_of_places(backends, place_of).values())


def _bytes(backend: Attention, num_blocks: int) -> int:
    return math.prod(backend.kv_shape(num_blocks, backend.spec.block_size)) * backend.spec.kv_dtype.itemsize
