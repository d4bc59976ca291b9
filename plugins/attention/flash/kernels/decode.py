"""Attention of rows with few tokens, whose keys may be cut into splits that are merged afterwards."""

import triton
import triton.language as tl

from .walk import LN_2, attend_keys, fill_padding, load_sinks, move_to_head


@triton.jit
def _share(lowest, before, num_ctx, split, num_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys, first .. last - 1, of a split: from `lowest` on, what the row's first token sees `before` itself, and own."""
    if WINDOW > 0:
        lowest = tl.maximum(before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(num_ctx - lowest, BLOCK_N), num_splits) * BLOCK_N
    first = lowest + split * share
    return first, tl.minimum(first + share, num_ctx)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "small_q", "num_splits"])
def decode_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    lse_ptr,
    q_start_ptr,
    ctx_len_ptr,
    blocks_ptr,
    key_first_ptr,
    tree_start_ptr,
    ancestors_ptr,
    num_rows,
    num_tokens,
    small_q,
    num_splits,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    lse_stride_t,
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
    SPLIT: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SHARED: tl.constexpr,
    TREES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attention of the rows with 1 to small_q tokens, each split of a row's keys by a program. Grid: (KV heads, splits, rows).

    With SPLIT the results go to partial (rows, small_q, heads, splits, HEAD_DIM) and partial_lse (log2), for `reduce_kernel`.
    Without, they are final, and the padding tokens below num_tokens get zeros. WITH_LSE, SINKS, SHARED and TREES: see
    `prefill_kernel`.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    out_ptr += head * GROUP * HEAD_DIM
    q_first = tl.load(q_start_ptr + row)
    num_q = tl.load(q_start_ptr + row + 1) - q_first
    if not SPLIT:
        after = (tl.load(q_start_ptr + num_rows) + row).to(tl.int32)
        fill_padding(out_ptr, after, num_tokens, num_rows, out_stride_t, GROUP, HEAD_DIM, BLOCK_D)
    if (num_q > 0) & (num_q <= small_q):
        num_ctx = tl.load(ctx_len_ptr + row)
        lanes = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = lanes // GROUP
        mask = (tokens < num_q)[:, None] & (dims < HEAD_DIM)[None, :]
        places = (q_first + tokens).to(tl.int64)
        heads = head * GROUP + lanes % GROUP
        q_ptrs = q_ptr + places * q_stride_t + heads * q_stride_h
        q = tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
        sinks = load_sinks(sinks_ptr, heads, lanes + split == lanes, SINKS)  # of the first split alone
        before = num_ctx - num_q
        lowest = tl.load(key_first_ptr + row) if SHARED else 0
        first, last = _share(lowest, before, num_ctx, split, num_splits, WINDOW, BLOCK_N)
        tree_first = num_ctx
        paths = tokens
        if TREES:
            tree_first = tl.load(tree_start_ptr + row)
            paths = tl.load(ancestors_ptr + places, mask=tokens < num_q, other=0)
        kv_ptr, scales_ptr = move_to_head(kv_ptr, scales_ptr, head, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES)
        blocks_ptr += row * blocks_stride
        acc, total, maximum = attend_keys(
            *(q, sinks, kv_ptr, scales_ptr, blocks_ptr, before + tokens, first, last, before, num_ctx, tree_first),
            *(paths, TREES),
            *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, False),
        )
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        if SPLIT:
            part = ((row * small_q + tokens) * (NUM_KV * GROUP) + heads) * num_splits + split
            tl.store(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
            tl.store(partial_lse_ptr + part, maximum + tl.log2(total), mask=tokens < num_q)
        else:
            to = out_ptr + places * out_stride_t + lanes % GROUP * HEAD_DIM
            tl.store(to[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
            if WITH_LSE:
                tl.store(lse_ptr + places * lse_stride_t + heads, (maximum + tl.log2(total)) * LN_2, mask=tokens < num_q)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "small_q", "num_splits"])
def reduce_kernel(
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    lse_ptr,
    q_start_ptr,
    num_rows,
    num_tokens,
    small_q,
    num_splits,
    out_stride_t,
    lse_stride_t,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge the splits of one token and head; padding tokens below num_tokens get zeros. Grid: (heads, small_q, rows)."""
    head = tl.program_id(0)
    token = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    out_ptr += head * HEAD_DIM
    q_first = tl.load(q_start_ptr + row)
    num_q = tl.load(q_start_ptr + row + 1) - q_first
    if token == 0:
        end = tl.load(q_start_ptr + num_rows)
        fill_padding(out_ptr, (end + row).to(tl.int32), num_tokens, num_rows, out_stride_t, 1, HEAD_DIM, BLOCK_D)
    if (token < num_q) & (num_q <= small_q):
        splits = tl.arange(0, MAX_SPLITS)
        dims = tl.arange(0, BLOCK_D)
        used = splits < num_splits
        part = ((row * small_q + token) * NUM_HEADS + head) * num_splits + splits
        lse = tl.load(partial_lse_ptr + part, mask=used, other=float("-inf"))
        highest = tl.max(lse, 0)
        weights = tl.exp2(lse - highest)
        mask = used[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        to = out_ptr + (q_first + token).to(tl.int64) * out_stride_t + dims
        tl.store(to, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
        if WITH_LSE:
            to = lse_ptr + (q_first + token).to(tl.int64) * lse_stride_t + head
            tl.store(to, (highest + tl.log2(tl.sum(weights, 0))) * LN_2)
