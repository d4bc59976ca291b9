"""The plain paged layout and the block copies shared by the reference backends.

One layer's cache is kv[2, P + 1, B, K, H], keys then values. The last block belongs to nobody: a padding token's slot -1
is the last slot of it, so writing padding needs no test and touches nothing that is ever read.

A quantized cache has rows of bytes. With scales of each token and head a row ends in its scale, two more bytes; fixed scales
stand, as float32, at the beginning of one more block before the last. Sinks, too, are float32, in blocks of their own before
those.
"""

import math

import torch

from lab.api import Attention

from ._quantized import dequantize, quantize, scales_of


class PlainPaged(Attention):
    """Layout, writes and block copies; subclasses attend, and read the cache with `values`."""

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        kind = self.spec.kv_scales
        size = self.spec.head_dim if kind == "none" else self._dim + 2 * (kind == "token_head")
        shape = block_size, self.spec.num_kv_heads, size
        return (2, num_blocks + 1 + (kind == "head") + self._sink_blocks(shape), *shape)

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        keys, values = kv.flatten(1, 2)
        if self.spec.kv_scales == "none":
            keys[slots_T] = k_TKH.to(kv.dtype)
            values[slots_T] = v_TKH.to(kv.dtype)
            return
        keys[slots_T], values[slots_T] = self._stored(kv, torch.stack((k_TKH, v_TKH)))

    def move(self, kv: torch.Tensor, from_X: torch.Tensor, to_X: torch.Tensor) -> None:
        for half in kv.flatten(1, 2):
            half[to_X] = half[from_X]

    def values(self, kv: torch.Tensor, half: int, rows_XKS: torch.Tensor) -> torch.Tensor:
        """Rows taken from the keys (half 0) or values (1) as what they stand for: float32 if quantized, else as they are."""
        if self.spec.kv_scales == "none":
            return rows_XKS
        if self.spec.kv_scales == "head":
            scales = self._fixed(kv)[half]
        else:
            scales = rows_XKS[..., self._dim :].contiguous().view(torch.bfloat16)[..., 0]
        return dequantize(rows_XKS[..., : self.spec.head_dim], scales)

    def export_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        x_XB2KH = torch.stack([self.values(kv, half, kv[half, block_ids]) for half in (0, 1)], 2)
        return x_XB2KH.to(kv.dtype if self.spec.kv_scales == "none" else self.spec.dtype)

    def load_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor, x_XB2KH: torch.Tensor) -> None:
        x_2XBKH = x_XB2KH.permute(2, 0, 1, 3, 4)
        if self.spec.kv_scales == "none":
            kv[:, block_ids] = x_2XBKH.to(kv.dtype)
        else:
            kv[:, block_ids] = self._stored(kv, x_2XBKH.flatten(1, 2)).unflatten(1, x_2XBKH.shape[1:3])

    def set_scales(self, kv: torch.Tensor, scales_2K: torch.Tensor) -> None:
        self._fixed(kv).copy_(scales_2K)

    def set_sinks(self, kv: torch.Tensor, sinks_N: torch.Tensor) -> None:
        place = self._sink_place(kv)
        stored = kv[0, place].reshape(-1).view(torch.uint8)
        stored[: sinks_N.nbytes] = sinks_N.to(kv.device).view(torch.uint8)
        kv[0, place] = stored.view(kv.dtype).view(kv[0, place].shape)

    def sinks(self, kv: torch.Tensor) -> torch.Tensor:
        """The layer's sinks_N, float32."""
        return kv[0, self._sink_place(kv)].reshape(-1).view(torch.uint8)[: 4 * self.spec.num_heads].clone().view(torch.float32)

    def _sink_blocks(self, shape: tuple[int, ...]) -> int:
        """So many blocks of that shape hold a float32 for each query head."""
        return -(-4 * self.spec.num_heads // (math.prod(shape) * self.spec.kv_dtype.itemsize)) if self.spec.has_sinks else 0

    def _sink_place(self, kv: torch.Tensor) -> slice:
        end = kv.shape[1] - 1 - (self.spec.kv_scales == "head")
        return slice(end - self._sink_blocks(kv.shape[2:]), end)

    @property
    def _dim(self) -> int:
        """Bytes of a quantized row before its scale: a multiple of 4, so that scales lie where their dtype may."""
        return -(-self.spec.head_dim // 4) * 4

    def _fixed(self, kv: torch.Tensor) -> torch.Tensor:
        """The layer's scales_2K, a view into its cache."""
        return kv[:, -2].view(2, -1)[:, : 4 * self.spec.num_kv_heads].view(torch.float32)

    def _stored(self, kv: torch.Tensor, x_2XKH: torch.Tensor) -> torch.Tensor:
        """Values as rows of the quantized cache."""
        rows = torch.zeros(*x_2XKH.shape[:-1], kv.shape[-1], dtype=kv.dtype, device=kv.device)
        is_fixed = self.spec.kv_scales == "head"
        scales = self._fixed(kv)[:, None] if is_fixed else scales_of(x_2XKH, kv.dtype)
        rows[..., : self.spec.head_dim] = quantize(x_2XKH, scales, kv.dtype)
        if not is_fixed:
            rows[..., self._dim :].view(torch.bfloat16)[..., 0] = scales
        return rows
