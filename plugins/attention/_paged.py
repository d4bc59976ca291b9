"""The plain paged layout and the block copies shared by the reference backends.

One layer's cache is kv[2, P + 1, B, K, H], keys then values. The last block belongs to nobody: a padding token's slot -1
is the last slot of it, so writing padding needs no test and touches nothing that is ever read.
"""

import torch

from lab.api import Attention


class PlainPaged(Attention):
    """Layout, writes and block copies; subclasses attend."""

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (2, num_blocks + 1, block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        keys, values = kv.flatten(1, 2)
        keys[slots_T] = k_TKH.to(kv.dtype)
        values[slots_T] = v_TKH.to(kv.dtype)

    def export_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv[:, block_ids].permute(1, 2, 0, 3, 4).contiguous()

    def load_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor, x_XB2KH: torch.Tensor) -> None:
        kv[:, block_ids] = x_XB2KH.permute(2, 0, 1, 3, 4).to(kv.dtype)
