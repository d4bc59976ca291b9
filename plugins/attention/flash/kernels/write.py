"""Writing keys and values into the paged cache."""

import triton
import triton.language as tl

from .walk import NONE, TOKEN_HEAD

WHOLE: tl.constexpr = tl.constexpr(12582912.0)  # beside it a float32 has no fraction


@triton.jit
def _fp8_bits(x):
    """e4m3 of float32 within its range, to the nearest, ties to even: on any GPU, and right in the interpreter too."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # beside 2^14 a float32 has steps of 2^-9
    return tl.where(magnitude < 0x3C800000, small, rounded) | ((bits >> 24) & 0x80)  # below 2^-6


@triton.jit
def _store_quantized(x, to, scale_ptrs, mask, in_range, FP8: tl.constexpr, KV_SCALES: tl.constexpr):
    """Rows x over their scales to a quantized cache of bytes; with TOKEN_HEAD the scales are made here and stored."""
    LARGEST: tl.constexpr = 448.0 if FP8 else 127.0
    if KV_SCALES == TOKEN_HEAD:
        wanted = tl.max(tl.abs(x), 1) / LARGEST
        bits = tl.maximum((wanted.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, 0x80)  # bf16, rounded up
        scales = (bits << 16).to(tl.float32, bitcast=True)
        tl.store(scale_ptrs, scales.to(tl.bfloat16), mask=in_range)
    else:
        scales = tl.load(scale_ptrs, mask=in_range, other=1.0)
    over = tl.minimum(tl.maximum(x / scales[:, None], -LARGEST), LARGEST)
    code = _fp8_bits(over) if FP8 else (over + WHOLE) - WHOLE
    tl.store(to, code.to(tl.int8), mask=mask)


@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    kv_ptr,
    scales_ptr,
    slots_ptr,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_SCALES: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store one token's keys and values of BLOCK_H heads at its slot; nothing for slot -1. Grid: (tokens, head groups)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + token)
    mask = (heads < NUM_KV) & (dims < tl.where(slot >= 0, HEAD_DIM, 0))
    keys = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + dims, mask=mask, other=0.0)
    values = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + dims, mask=mask, other=0.0)
    offset = slot % BLOCK_SIZE
    place = (slot // BLOCK_SIZE) * NUM_KV + heads
    to = kv_ptr + place * HEAD_SIZE + offset * HEAD_DIM + dims
    if KV_SCALES == NONE:
        tl.store(to, keys.to(kv_ptr.dtype.element_ty), mask=mask)
        tl.store(to + BLOCK_SIZE * HEAD_DIM, values.to(kv_ptr.dtype.element_ty), mask=mask)
    else:
        head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        in_range = head < tl.where(slot >= 0, NUM_KV, 0)
        if KV_SCALES == TOKEN_HEAD:
            of_keys = scales_ptr + ((slot // BLOCK_SIZE) * NUM_KV + head) * (HEAD_SIZE // 2) + BLOCK_SIZE * HEAD_DIM + offset
            of_values = of_keys + BLOCK_SIZE
        else:
            of_keys = scales_ptr + head
            of_values = of_keys + NUM_KV
        _store_quantized(keys.to(tl.float32), to, of_keys, mask, in_range, FP8, KV_SCALES)
        to += BLOCK_SIZE * HEAD_DIM
        _store_quantized(values.to(tl.float32), to, of_values, mask, in_range, FP8, KV_SCALES)
