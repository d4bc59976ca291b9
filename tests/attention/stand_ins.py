"""The two packages that lab has adapters for, as their documentation describes the functions used, computed plainly on the CPU.

They hold the arguments against the documentation as well: types, devices and shapes that the real ones refuse.
"""

import torch


def _attend(q_QNH, k_SKH, v_SKH, scale, window_left, softcap):
    """Causal attention whose last query sees the last key."""
    group = q_QNH.shape[1] // k_SKH.shape[1]
    k_SNH, v_SNH = (x.float().repeat_interleave(group, 1) for x in (k_SKH, v_SKH))
    scores = torch.einsum("qnh,snh->nqs", q_QNH.float(), k_SNH) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    num_q, num_ctx = scores.shape[1:]
    distance = torch.arange(num_ctx - num_q, num_ctx)[:, None] - torch.arange(num_ctx)
    seen = (distance >= 0) & ((distance <= window_left) | (window_left < 0))
    return torch.einsum("nqs,snh->qnh", scores.masked_fill(~seen, -torch.inf).softmax(-1), v_SNH).to(q_QNH.dtype)


def _paged(q, k_cache, v_cache, q_start, blocks_and_lengths, scale, window_left, softcap):
    assert k_cache.shape == v_cache.shape and k_cache.stride(-1) == v_cache.stride(-1) == 1
    assert len(q) == int(q_start[-1]), "every query belongs to a row"
    out = torch.empty_like(q)
    for row, (blocks, length) in enumerate(blocks_and_lengths):
        tokens = slice(int(q_start[row]), int(q_start[row + 1]))
        k_SKH, v_SKH = (cache[blocks.long()].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[tokens] = _attend(q[tokens], k_SKH, v_SKH, scale, window_left, softcap)
    return out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """flash-attn 2 with a block table: k and v are paged, [blocks, 256 * n, KV heads, dim]."""
    assert causal and block_table is not None and k.shape[1] % 256 == 0
    assert {t.dtype for t in (cu_seqlens_q, cu_seqlens_k, block_table)} == {torch.int32}
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    assert q.dtype in (torch.float16, torch.bfloat16) and window_size[1] in (-1, 0)
    lengths = cu_seqlens_k.diff().tolist()
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and max_seqlen_k >= max(lengths)
    rows = [(table[: -(-n // k.shape[1])], n) for table, n in zip(block_table, lengths, strict=True)]
    return _paged(q, k, v, cu_seqlens_q, rows, softmax_scale, window_size[0], softcap)


class BatchPrefillWithPagedKVCacheWrapper:
    """FlashInfer's, with the cache as a pair [pages, page size, KV heads, dim] (NHD)."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        assert causal and q_data_type in (torch.float16, torch.bfloat16) and kv_data_type == q_data_type
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(t.dtype == torch.int32 and t.device.type == "cpu" for t in indices)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1])
        self.q_start, self.heads, self.page_size = qo_indptr, (num_qo_heads, num_kv_heads, head_dim_qk), page_size
        self.scale, self.window_left, self.softcap = sm_scale, window_left, logits_soft_cap
        pages = paged_kv_indices.split(paged_kv_indptr.diff().tolist())
        lengths = [(len(p) - 1) * page_size + int(n) for p, n in zip(pages, paged_kv_last_page_len, strict=True)]
        self.rows = list(zip(pages, lengths, strict=True))

    def run(self, q, paged_kv_cache, out=None):
        k_cache, v_cache = paged_kv_cache
        assert k_cache.shape[1] == self.page_size and (q.shape[1], k_cache.shape[2], q.shape[2]) == self.heads
        out.copy_(_paged(q, k_cache, v_cache, self.q_start, self.rows, self.scale, self.window_left, self.softcap))
        return out
