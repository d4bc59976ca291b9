"""The KV tensors, one per attention layer, in the layout that the layer's attention plugin asks for."""

import torch

from lab.contracts.attention import Attention, AttentionSpec


class KVStore:
    """Owns the cache of every attention layer. Which block belongs to whom is the block manager's business.

    The tensors are zero-filled: memory nobody wrote is read (and masked away) by some backends, so it must be finite.
    """

    def __init__(self, backends: list[Attention], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.layers = [
            torch.zeros(b.kv_shape(num_blocks, b.spec.block_size), dtype=b.spec.kv_dtype, device=b.spec.device)
            for b in backends
        ]


def bytes_per_block(specs: list[AttentionSpec]) -> int:
    """Bytes that one block takes over all layers."""
    return sum(spec.kv_bytes_per_token * spec.block_size for spec in specs)
