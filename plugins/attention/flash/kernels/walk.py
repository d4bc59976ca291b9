"""What the kernels that attend have in common: walking over keys with an online softmax, and where keys lie."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NONE: tl.constexpr = tl.constexpr(0)  # not quantized
TOKEN_HEAD: tl.constexpr = tl.constexpr(1)  # bf16 scales behind each block's keys and values: first of the keys
HEAD: tl.constexpr = tl.constexpr(2)  # float32 scales of the layer: first of the keys


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
    begins,
    tree_first,
    paths,
    first,
    last,
    num_ctx,
    MASKED: tl.constexpr,
    TREES: tl.constexpr,
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
        positions: of the queries (M,), in their row's slots.
        begins: the first key that each sees, with a WINDOW (M,).
        tree_first, paths: with TREES, see `attend_keys`.
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
                seen = seen & (places[None, :] >= begins[:, None])
            if TREES:
                nodes = places - tree_first
                on_path = (paths[:, None] >> tl.minimum(tl.maximum(nodes, 0), 62).to(tl.int64)[None, :]) & 1
                seen = seen & ((nodes < 0)[None, :] | (on_path != 0))
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
def load_sinks(sinks_ptr, heads, counted, SINKS: tl.constexpr):
    """Of each query row its head's sink, in log2, where it is `counted` here; minus infinity elsewhere, and without SINKS."""
    sinks = tl.where(heads < 0, 0.0, float("-inf"))
    if SINKS:
        sinks = tl.where(counted, tl.load(sinks_ptr + heads) * LOG2_E, float("-inf"))
    return sinks


@triton.jit
def attend_keys(
    q,
    sinks,
    kv_ptr,
    scales_ptr,
    blocks_ptr,
    positions,
    first,
    last,
    before,
    num_ctx,
    tree_first,
    paths,
    TREES: tl.constexpr,
    NUM_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_SCALES: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK_ALL: tl.constexpr,
):
    """What a query tile gets of the keys first .. last - 1: weighted sums of values (M, D), sums of weights and maxima (M,).

    Every query sees the keys before `before + 1`: whole tiles of them need no mask, unless there is a window, or MASK_ALL. With
    TREES the keys from tree_first on are the nodes of the row's tree of drafts, and bit i of a query's path (M,), int64, says
    whether it sees node i. `sinks` (M,) are scores that no key stands behind, as `load_sinks` gives them: each counts as a
    weight without a value.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.where(sinks > float("-inf"), 1.0, 0.0)
    maximum = sinks
    masked_from = first
    begins = positions - WINDOW + 1
    if TREES:
        before = tl.minimum(before, tree_first - 1)
        if WINDOW > 0:  # a node's position in the text goes by its depth
            depths = tl.zeros([BLOCK_M], tl.int32)
            for node in range(63):
                depths += ((paths >> node) & 1).to(tl.int32)
            begins = tl.where(positions >= tree_first, tree_first - 1 + depths, positions) - WINDOW + 1
    if WINDOW == 0 and not MASK_ALL:
        masked_from = first + tl.maximum(tl.minimum(last, before + 1) - first, 0) // BLOCK_N * BLOCK_N
        acc, total, maximum = _walk(
            *(acc, total, maximum, q, kv_ptr, scales_ptr, blocks_ptr, positions, begins, tree_first, paths),
            *(first, masked_from, num_ctx, False, TREES),
            *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_N, BLOCK_D),
        )
    acc, total, maximum = _walk(
        *(acc, total, maximum, q, kv_ptr, scales_ptr, blocks_ptr, positions, begins, tree_first, paths),
        *(masked_from, last, num_ctx, True, TREES),
        *(NUM_KV, HEAD_DIM, BLOCK_SIZE, HEAD_SIZE, KV_SCALES, SCALE, SOFTCAP, WINDOW, BLOCK_N, BLOCK_D),
    )
    return _times_fixed_scale(acc, scales_ptr, NUM_KV, KV_SCALES), total, maximum


@triton.jit
def move_to_head(
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
def fill_padding(
    out_ptr, first, num_tokens, step, stride_t, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Zero the outputs of the tokens first, first + step, ... for the GROUP heads that `out_ptr` was moved to."""
    dims = tl.arange(0, BLOCK_D)
    stride_t = tl.cast(stride_t, tl.int64)
    for token in range(first, num_tokens, step):
        for head in range(GROUP):
            to = out_ptr + token * stride_t + head * HEAD_DIM + dims
            tl.store(to, tl.zeros([BLOCK_D], out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
