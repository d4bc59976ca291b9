"""Attention to keys that several rows share, once for the queries of all of them, and merging it with the rows' own parts."""

import triton
import triton.language as tl

from .walk import LN_2, attend_keys, load_sinks, move_to_head


@triton.jit
def shared_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    part_ptr,
    part_lse_ptr,
    tiles_ptr,
    tokens_ptr,
    blocks_ptr,
    q_stride_t,
    q_stride_h,
    blocks_stride,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attention of tokens of several rows to some keys, which all of them see. Grid: (KV heads, tiles).

    tiles_ptr holds (row, first key, last key + 1, first token, tokens, slot) of each tile: the row is the one whose block table
    is read, tokens are places in tokens_ptr. Results go to part (slots, heads, HEAD_DIM) and part_lse (slots, heads), to a slot
    for each token of a tile.
    """
    head = tl.program_id(0)
    tile_ptr = tiles_ptr + 6 * tl.program_id(1)
    row = tl.load(tile_ptr).to(tl.int64)
    key_first = tl.load(tile_ptr + 1)
    key_last = tl.load(tile_ptr + 2)
    token_first = tl.load(tile_ptr + 3)
    num_tokens = tl.load(tile_ptr + 4)
    slot = tl.load(tile_ptr + 5).to(tl.int64)
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    at = lanes // GROUP
    is_real = (lanes < BLOCK_M // GROUP * GROUP) & (at < num_tokens)
    places = tl.load(tokens_ptr + token_first + at, mask=is_real, other=0).to(tl.int64)
    mask = is_real[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * GROUP + lanes % GROUP
    q_ptrs = q_ptr + places * q_stride_t + heads * q_stride_h
    q = tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
    sinks = load_sinks(part_ptr, heads, heads >= 0, False)  # the rows' own parts count them
    positions = tl.zeros([BLOCK_M], tl.int32) + (key_last - 1)  # all see all
    kv_ptr, scales_ptr = move_to_head(kv_ptr, scales_ptr, head, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES)
    blocks_ptr += row * blocks_stride
    acc, total, maximum = attend_keys(
        *(q, sinks, kv_ptr, scales_ptr, blocks_ptr, positions, key_first, key_last, key_last - 1, key_last, key_last),
        *(positions, False),
        *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, False),
    )
    part = (slot + at) * (NUM_KV * GROUP) + heads
    tl.store(part_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=mask)
    tl.store(part_lse_ptr + part, (maximum + tl.log2(total)) * LN_2, mask=is_real)


@triton.jit
def merge_kernel(
    out_ptr,
    lse_ptr,
    own_ptr,
    own_lse_ptr,
    part_ptr,
    part_lse_ptr,
    slots_ptr,
    out_stride_t,
    lse_stride_t,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge what a token's row has by itself, own (tokens, heads, HEAD_DIM), with its parts. Grid: (heads, tokens).

    slots_ptr holds NUM_PARTS slots for each token, -1 where it has fewer parts.
    """
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    parts = tl.arange(0, MAX_PARTS)
    slots = tl.load(slots_ptr + token * NUM_PARTS + parts, mask=parts < NUM_PARTS, other=-1).to(tl.int64)
    used = slots >= 0
    mine = token * NUM_HEADS + head
    own = tl.load(own_ptr + mine * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
    own_lse = tl.load(own_lse_ptr + mine)
    lse = tl.load(part_lse_ptr + slots * NUM_HEADS + head, mask=used, other=float("-inf"))
    highest = tl.maximum(own_lse, tl.max(lse, 0))
    weights = tl.exp(lse - highest)
    own_weight = tl.exp(own_lse - highest)
    at = (slots * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    values = tl.load(part_ptr + at, mask=used[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    total = own_weight + tl.sum(weights, 0)
    merged = (own * own_weight + tl.sum(values * weights[:, None], 0)) / total
    tl.store(out_ptr + token * out_stride_t + head * HEAD_DIM + dims, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
    if WITH_LSE:
        tl.store(lse_ptr + token * lse_stride_t + head, highest + tl.log(total))
