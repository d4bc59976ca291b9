"""Attention of rows with many tokens."""

import triton
import triton.language as tl

from .walk import LN_2, attend_keys, fill_padding, load_sinks, move_to_head


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def prefill_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    tiles_ptr,
    q_start_ptr,
    ctx_len_ptr,
    blocks_ptr,
    key_first_ptr,
    tree_start_ptr,
    ancestors_ptr,
    num_rows,
    num_tokens,
    num_tiles,
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
    INVARIANT: tl.constexpr,
    WITH_LSE: tl.constexpr,
    SHARED: tl.constexpr,
    TREES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Causal attention of rows with many tokens. Grid: (KV heads, tiles).

    INVARIANT: a token gets the same bits whichever tile it is in: one loop, the masked one, walks over all of its keys.
    WITH_LSE: the logsumexp of each query's scores goes to lse. SINKS: each has one score more, that of its head in sinks.
    SHARED: each row's keys begin at key_first; those before it are for `shared_kernel`. TREES: rows may have trees of drafts,
    whose first slot is in tree_start (ctx_len where there is none); the ancestors of each token say which of their nodes it
    sees.
    tiles_ptr holds (row, first token) of each tile of BLOCK_M // GROUP tokens; row -1 is no tile. Padding tokens get zeros.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    out_ptr += head * GROUP * HEAD_DIM
    end = tl.load(q_start_ptr + num_rows)
    fill_padding(out_ptr, end + tile, num_tokens, num_tiles, out_stride_t, GROUP, HEAD_DIM, BLOCK_D)
    if row >= 0:
        q_first = tl.load(q_start_ptr + row)
        num_q = tl.load(q_start_ptr + row + 1) - q_first
        num_ctx = tl.load(ctx_len_ptr + row)
        lanes = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = first_token + lanes // GROUP
        is_real = (lanes < BLOCK_M // GROUP * GROUP) & (tokens < num_q)
        mask = is_real[:, None] & (dims < HEAD_DIM)[None, :]
        places = (q_first + tokens).to(tl.int64)
        heads = head * GROUP + lanes % GROUP
        q_ptrs = q_ptr + places * q_stride_t + heads * q_stride_h
        sinks = load_sinks(sinks_ptr, heads, heads >= 0, SINKS)
        q = tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
        before = num_ctx - num_q + first_token  # keys that the tile's first token sees, without itself
        positions = num_ctx - num_q + tokens
        last = tl.minimum(num_ctx, before + BLOCK_M // GROUP)
        kv_ptr, scales_ptr = move_to_head(kv_ptr, scales_ptr, head, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES)
        blocks_ptr += row * blocks_stride
        first = tl.load(key_first_ptr + row) if SHARED else 0
        tree_first = num_ctx
        paths = tokens
        if TREES:
            tree_first = tl.load(tree_start_ptr + row)
            paths = tl.load(ancestors_ptr + places, mask=is_real, other=0)
        if WINDOW > 0:
            first = tl.maximum(tl.minimum(before, tree_first) - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        acc, total, maximum = attend_keys(
            *(q, sinks, kv_ptr, scales_ptr, blocks_ptr, positions, first, last, before, num_ctx, tree_first, paths, TREES),
            *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, INVARIANT),
        )
        to = out_ptr + places * out_stride_t + lanes % GROUP * HEAD_DIM
        tl.store(to[:, None] + dims[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        if WITH_LSE:
            tl.store(lse_ptr + places * lse_stride_t + heads, (maximum + tl.log2(total)) * LN_2, mask=is_real)
