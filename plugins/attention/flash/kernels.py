"""The Triton kernels of `flash`: writing the paged cache, and attention over it with an online softmax.

Attention follows FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691): a program owns a tile of queries and walks over
tiles of keys. The query heads of one KV head stand side by side in the tile, so that each key is loaded once for all of them.
Rows with few tokens (decodes, draft verification) may have their keys cut into splits that are reduced afterwards
(flash-decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

Launch grids follow from padded sizes alone: programs that find no work exit. Scores are kept in units of log2, so that exp2
serves. A quantized cache is read as its numbers: the scales of keys go into the scores, those of values into the weights.
KV_SCALES is one of the constants below, HEAD_SIZE the entries of the cache for one block and KV head, scales included.
Names: M query rows of a tile (token m // GROUP, head m % GROUP), N keys of a tile, D head dim padded to a power of two.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NONE: tl.constexpr = tl.constexpr(0)  # not quantized
TOKEN_HEAD: tl.constexpr = tl.constexpr(1)  # bf16 scales behind each block's keys and values: first of the keys
HEAD: tl.constexpr = tl.constexpr(2)  # float32 scales of the layer: first of the keys
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


@triton.jit
def _load_rows(ptrs, here, in_head, MASKED: tl.constexpr, DENSE: tl.constexpr):
    """Keys or values; zeros where there are none. DENSE: the head dim needs no padding."""
    if MASKED:
        x = tl.load(ptrs, mask=here[:, None] & in_head, other=0.0)
    elif DENSE:
        x = tl.load(ptrs)
    else:
        x = tl.load(ptrs, mask=in_head, other=0.0)
    return x


@triton.jit
def _load_scales(ptrs, here, MASKED: tl.constexpr):
    """The scales of as many tokens, in float32."""
    scales = tl.load(ptrs, mask=here, other=0.0) if MASKED else tl.load(ptrs)
    return scales.to(tl.float32)


@triton.jit
def _times_fixed_scale(acc, scales_ptr, NUM_KV: tl.constexpr, KV_SCALES: tl.constexpr):
    """Sums of values, times the scale of the head's values where the layer has it."""
    if KV_SCALES == HEAD:
        acc = acc * tl.load(scales_ptr + NUM_KV)
    return acc


@triton.jit
def _walk(
    acc,
    total,
    maximum,
    q,
    kv_ptr,
    scales_ptr,
    blocks_ptr,
    positions,
    first,
    last,
    num_ctx,
    MASKED: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Take the keys first .. last - 1 into the running softmax of a query tile.

    Args:
        acc, total, maximum: the running sums (M, D), their weights' sum (M,) and the largest score so far (M,).
        kv_ptr, scales_ptr: the cache and its scales, moved to the KV head; blocks_ptr: the row's block table.
        positions: of the queries (M,).
        MASKED: whether some query may not see some key; else `last - first` is a multiple of N.
    """
    dims = tl.arange(0, BLOCK_D)
    in_head = (dims < HEAD_DIM)[None, :]
    if KV_SCALES == HEAD:
        k_scale = tl.load(scales_ptr)
    for start in range(first, last, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        here = places < num_ctx
        if MASKED:
            block = tl.load(blocks_ptr + places // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
        else:
            block = tl.load(blocks_ptr + places // BLOCK_SIZE).to(tl.int64)
        rows = block * (NUM_KV * HEAD_SIZE) + (places % BLOCK_SIZE) * HEAD_DIM
        k_ptrs = kv_ptr + rows[:, None] + dims[None, :]
        k = _load_rows(k_ptrs, here, in_head, MASKED, BLOCK_D == HEAD_DIM)
        v = _load_rows(k_ptrs + BLOCK_SIZE * HEAD_DIM, here, in_head, MASKED, BLOCK_D == HEAD_DIM)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if KV_SCALES == TOKEN_HEAD:
            of_keys = scales_ptr + block * (NUM_KV * HEAD_SIZE // 2) + places % BLOCK_SIZE
            v_scales = _load_scales(of_keys + BLOCK_SIZE, here, MASKED)
            scores = scores * _load_scales(of_keys, here, MASKED)[None, :]
        elif KV_SCALES == HEAD:
            scores = scores * k_scale
        if SOFTCAP > 0:  # tanh x = 1 - 2 / (exp(2 x) + 1), right at both ends too
            scores = SOFTCAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * SCALE / SOFTCAP * LOG2_E)) + 1.0))
        else:
            scores = scores * (SCALE * LOG2_E)
        if MASKED:
            seen = places[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (places[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        base = highest
        if MASKED:  # a query that has seen no key yet
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(maximum - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if KV_SCALES == TOKEN_HEAD:
            if q.dtype == tl.float16:  # whose range is too small for weights times scales
                v = v.to(tl.float32) * v_scales[:, None]
            else:
                weights = weights * v_scales[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        maximum = highest
    return acc, total, maximum


@triton.jit
def _move_to_head(
    kv_ptr,
    scales_ptr,
    head,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_SCALES: tl.constexpr,
):
    """Where a KV head's keys and their scales begin: in block 0, or the scales among those of the layer."""
    if KV_SCALES == TOKEN_HEAD:
        scales_ptr += head * (HEAD_SIZE // 2) + BLOCK_SIZE * HEAD_DIM
    elif KV_SCALES == HEAD:
        scales_ptr += head
    return kv_ptr + head * HEAD_SIZE, scales_ptr


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """acc, total and maximum before the first key."""
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M], tl.float32), maximum


@triton.jit
def _share(before, num_ctx, split, num_splits, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys, first .. last - 1, of a split: of all that the row's first token sees `before` itself, and of its own."""
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(num_ctx - lowest, BLOCK_N), num_splits) * BLOCK_N
    first = lowest + split * share
    return first, tl.minimum(first + share, num_ctx)


@triton.jit
def _fill_padding(
    out_ptr, first, num_tokens, step, stride_t, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Zero the outputs of the tokens first, first + step, ... for the GROUP heads that `out_ptr` was moved to."""
    dims = tl.arange(0, BLOCK_D)
    stride_t = tl.cast(stride_t, tl.int64)
    for token in range(first, num_tokens, step):
        for head in range(GROUP):
            to = out_ptr + token * stride_t + head * HEAD_DIM + dims
            tl.store(to, tl.zeros([BLOCK_D], out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles"])
def prefill_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    out_ptr,
    tiles_ptr,
    q_start_ptr,
    ctx_len_ptr,
    blocks_ptr,
    num_rows,
    num_tokens,
    num_tiles,
    q_stride_t,
    q_stride_h,
    out_stride_t,
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
    INVARIANT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Causal attention of rows with many tokens. Grid: (KV heads, tiles).

    INVARIANT: a token gets the same bits whichever tile it is in: one loop, the masked one, walks over all of its keys.
    tiles_ptr holds (row, first token) of each tile of BLOCK_M // GROUP tokens; row -1 is no tile. Padding tokens get zeros.
    """
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first_token = tl.load(tiles_ptr + 2 * tile + 1)
    out_ptr += head * GROUP * HEAD_DIM
    end = tl.load(q_start_ptr + num_rows)
    _fill_padding(out_ptr, end + tile, num_tokens, num_tiles, out_stride_t, GROUP, HEAD_DIM, BLOCK_D)
    if row >= 0:
        q_first = tl.load(q_start_ptr + row)
        num_q = tl.load(q_start_ptr + row + 1) - q_first
        num_ctx = tl.load(ctx_len_ptr + row)
        lanes = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = first_token + lanes // GROUP
        mask = ((lanes < BLOCK_M // GROUP * GROUP) & (tokens < num_q))[:, None] & (dims < HEAD_DIM)[None, :]
        places = (q_first + tokens).to(tl.int64)
        q_ptrs = q_ptr + places * q_stride_t + (head * GROUP + lanes % GROUP) * q_stride_h
        q = tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
        before = num_ctx - num_q + first_token  # keys that the tile's first token sees, without itself
        positions = num_ctx - num_q + tokens
        last = tl.minimum(num_ctx, before + BLOCK_M // GROUP)
        kv_ptr, scales_ptr = _move_to_head(kv_ptr, scales_ptr, head, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES)
        blocks_ptr += row * blocks_stride
        acc, total, maximum = _nothing(BLOCK_M, BLOCK_D)
        if WINDOW > 0:
            masked_from = tl.maximum(before - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        elif INVARIANT:
            masked_from = 0
        else:
            masked_from = (before + 1) // BLOCK_N * BLOCK_N
            acc, total, maximum = _walk(
                *(acc, total, maximum, q, kv_ptr, scales_ptr, blocks_ptr, positions, 0, masked_from, num_ctx, False),
                *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_N, BLOCK_D),
            )
        acc, total, maximum = _walk(
            *(acc, total, maximum, q, kv_ptr, scales_ptr, blocks_ptr, positions, masked_from, last, num_ctx, True),
            *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_N, BLOCK_D),
        )
        acc = _times_fixed_scale(acc, scales_ptr, NUM_KV, KV_SCALES)
        to = out_ptr + places * out_stride_t + lanes % GROUP * HEAD_DIM
        tl.store(to[:, None] + dims[None, :], (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "small_q", "num_splits"])
def decode_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_start_ptr,
    ctx_len_ptr,
    blocks_ptr,
    num_rows,
    num_tokens,
    small_q,
    num_splits,
    q_stride_t,
    q_stride_h,
    out_stride_t,
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
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attention of the rows with 1 to small_q tokens, each split of a row's keys by a program. Grid: (KV heads, splits, rows).

    With SPLIT the results go to partial (rows, small_q, heads, splits, HEAD_DIM) and lse (rows, small_q, heads, splits), for
    `reduce_kernel`. Without, they are final, and the padding tokens below num_tokens get zeros.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    out_ptr += head * GROUP * HEAD_DIM
    q_first = tl.load(q_start_ptr + row)
    num_q = tl.load(q_start_ptr + row + 1) - q_first
    if not SPLIT:
        end = tl.load(q_start_ptr + num_rows)
        _fill_padding(out_ptr, (end + row).to(tl.int32), num_tokens, num_rows, out_stride_t, GROUP, HEAD_DIM, BLOCK_D)
    if (num_q > 0) & (num_q <= small_q):
        num_ctx = tl.load(ctx_len_ptr + row)
        lanes = tl.arange(0, BLOCK_M)
        dims = tl.arange(0, BLOCK_D)
        tokens = lanes // GROUP
        mask = (tokens < num_q)[:, None] & (dims < HEAD_DIM)[None, :]
        places = (q_first + tokens).to(tl.int64)
        q_ptrs = q_ptr + places * q_stride_t + (head * GROUP + lanes % GROUP) * q_stride_h
        q = tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
        before = num_ctx - num_q
        positions = before + tokens
        first, last = _share(before, num_ctx, split, num_splits, WINDOW, BLOCK_N)
        kv_ptr, scales_ptr = _move_to_head(kv_ptr, scales_ptr, head, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES)
        blocks_ptr += row * blocks_stride
        acc, total, maximum = _nothing(BLOCK_M, BLOCK_D)
        masked_from = first
        if WINDOW == 0:
            masked_from = first + tl.maximum(tl.minimum(last, before + 1) - first, 0) // BLOCK_N * BLOCK_N
            acc, total, maximum = _walk(
                *(acc, total, maximum, q, kv_ptr, scales_ptr, blocks_ptr, positions, first, masked_from, num_ctx, False),
                *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_N, BLOCK_D),
            )
        acc, total, maximum = _walk(
            *(acc, total, maximum, q, kv_ptr, scales_ptr, blocks_ptr, positions, masked_from, last, num_ctx, True),
            *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_N, BLOCK_D),
        )
        result = _times_fixed_scale(acc, scales_ptr, NUM_KV, KV_SCALES) / tl.where(total > 0, total, 1.0)[:, None]
        if SPLIT:
            part = ((row * small_q + tokens) * (NUM_KV * GROUP) + head * GROUP + lanes % GROUP) * num_splits + split
            tl.store(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
            tl.store(lse_ptr + part, maximum + tl.log2(total), mask=tokens < num_q)
        else:
            to = out_ptr + places * out_stride_t + lanes % GROUP * HEAD_DIM
            tl.store(to[:, None] + dims[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "small_q", "num_splits"])
def reduce_kernel(
    out_ptr,
    partial_ptr,
    lse_ptr,
    q_start_ptr,
    num_rows,
    num_tokens,
    small_q,
    num_splits,
    out_stride_t,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
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
        _fill_padding(out_ptr, (end + row).to(tl.int32), num_tokens, num_rows, out_stride_t, 1, HEAD_DIM, BLOCK_D)
    if (token < num_q) & (num_q <= small_q):
        splits = tl.arange(0, MAX_SPLITS)
        dims = tl.arange(0, BLOCK_D)
        used = splits < num_splits
        part = ((row * small_q + token) * NUM_HEADS + head) * num_splits + splits
        lse = tl.load(lse_ptr + part, mask=used, other=float("-inf"))
        weights = tl.exp2(lse - tl.max(lse, 0))
        mask = used[:, None] & (dims < HEAD_DIM)[None, :]
        parts = tl.load(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        to = out_ptr + (q_first + token).to(tl.int64) * out_stride_t + dims
        tl.store(to, merged.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
