"""Quantized keys and values: what is stored, times a scale, is the value.

The scale of a token and head is its largest magnitude over the largest number of the dtype, rounded up to bfloat16: two bytes
beside each row, and never a value that does not fit. Rounding is to nearest, ties to even.
"""

import torch

TINY = torch.finfo(torch.bfloat16).tiny


def largest(dtype: torch.dtype) -> float:
    """The largest magnitude of a quantized dtype; -128 of int8 is not used."""
    return 127.0 if dtype == torch.int8 else float(torch.finfo(dtype).max)


def scales_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale of each row of x (..., H), in bfloat16 (...)."""
    wanted = x.float().abs().amax(-1) / largest(dtype)
    nearest = wanted.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.float() < wanted, above, nearest).clamp(min=TINY)


def quantize(x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows x (..., H) over their scales (...), in the quantized dtype; what does not fit is clipped."""
    limit = largest(dtype)
    over = (x.float() / scales.float()[..., None]).clamp(-limit, limit)
    return over.round().to(dtype) if dtype == torch.int8 else over.to(dtype)


def dequantize(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The values (..., H) of stored rows and their scales (...), in float32."""
    return stored.float() * scales.float()[..., None]


def fixed_scales(kv: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """scales_2K of a layer, float32: a view of the beginning of the last block of its cache (P + 1, ...)."""
    return kv[-1].view(-1)[: 8 * num_kv_heads].view(torch.float32).view(2, num_kv_heads)
