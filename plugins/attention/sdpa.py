"""torch's scaled_dot_product_attention over gathered keys and values.

Rows with few tokens (decodes, draft verification) are batched by their number of tokens, the query heads of one KV head
standing as query rows, so that keys and values are never repeated. Longer rows go one by one: causal without a mask when
nothing precedes them, else with a mask over the cached part.

Attention sinks are one more key of zeros, whose score is what the mask adds, with a value of zeros.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from lab.api import Capabilities, register

from ._paged import PlainPaged
from ._trees import RowTree, hide_nodes, row_tree

BATCHED_UP_TO = 16  # tokens a row; longer rows fill the machine alone
PAD_LIMIT = 1.25  # rows batched together may be padded by a quarter over their own contexts


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that attend together: each has Q tokens, and reads S slots (its own first slot stands in for padding)."""

    q_index: torch.Tensor | slice  # their R * Q tokens
    num_rows: int
    slots_RS: torch.Tensor
    mask: torch.Tensor | None  # added to the scores; None: plain causal


@register("attention", "sdpa")
class Sdpa(PlainPaged):
    """torch's scaled_dot_product_attention after a gather: runs wherever torch does."""

    capabilities = Capabilities(
        devices={"cpu", "cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        kv_dtypes={"float32", "bfloat16", "float16", "fp8", "int8"},
        features={"gqa", "sliding_window", "spec_verify", "tree_verify", "token_head_scales", "sinks"},
        priority=10,
        kv_layout="2PBKH",
    )

    def plan(self, batch: Any, reuse: Any = None) -> list[Group]:
        q_start, ctx_len = batch.q_start_R1_cpu, batch.ctx_len_R_cpu
        count_R = np.diff(q_start)
        groups = []
        for rows in _batches(count_R, ctx_len):
            num_q, contexts = int(count_R[rows[0]]), ctx_len[rows]
            slots_RS = self._slots(batch.blocks_RM_cpu[rows], contexts)
            if len(rows) == batch.num_rows and batch.num_tokens == num_q * len(rows):
                q_index = slice(0, batch.num_tokens)
            elif len(rows) == 1:
                q_index = slice(int(q_start[rows[0]]), int(q_start[rows[0]]) + num_q)
            else:
                tokens = (q_start[rows][:, None] + np.arange(num_q)).ravel()
                q_index = torch.from_numpy(tokens.astype(np.int64)).to(self.spec.device)
            trees = [row_tree(batch, row) for row in rows.tolist()] if batch.trees is not None else []
            groups.append(Group(q_index, len(rows), self._to_device(slots_RS), self._mask(num_q, contexts, trees)))
        return groups

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: list[Group], out_TNH: torch.Tensor) -> None:
        num_heads, num_kv, dim = self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim
        done = 0
        for group in plan:
            num_rows = group.num_rows
            k_RKSH, v_RKSH = self._gathered(kv, group, q_TNH.dtype)
            q_XNH = q_TNH[group.q_index]
            num_q = len(q_XNH) // num_rows
            done += len(q_XNH)
            mask = group.mask
            if self.spec.has_sinks:
                k_RKSH, v_RKSH = (F.pad(x_RKSH, (0, 0, 0, 1)) for x_RKSH in (k_RKSH, v_RKSH))
                mask = self._mask_with_sinks(group.mask, kv, num_q)
            if mask is None or num_q > BATCHED_UP_TO:
                q_RNQH = q_XNH.view(num_rows, num_q, num_heads, dim).transpose(1, 2)
                out_RNQH = F.scaled_dot_product_attention(
                    q_RNQH, k_RKSH, v_RKSH, mask, is_causal=mask is None, scale=self.spec.scale, enable_gqa=True
                )
                out_TNH[group.q_index] = out_RNQH.transpose(1, 2).reshape(-1, num_heads, dim)
                continue
            q_RKXH = q_XNH.view(num_rows, num_q, num_kv, -1, dim).permute(0, 2, 1, 3, 4).reshape(num_rows, num_kv, -1, dim)
            out_RKXH = F.scaled_dot_product_attention(q_RKXH, k_RKSH, v_RKSH, mask, scale=self.spec.scale)
            out_RQKGH = out_RKXH.view(num_rows, num_kv, num_q, -1, dim).transpose(1, 2)
            out_TNH[group.q_index] = out_RQKGH.reshape(-1, num_heads, dim)
        out_TNH[done:] = 0  # padding tokens stand at the end

    def _gathered(self, kv: torch.Tensor, group: Group, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The group's keys and values, k_RKSH and v_RKSH, in that dtype."""
        num_rows, num_ctx = group.slots_RS.shape
        shape = num_rows, num_ctx, self.spec.num_kv_heads, self.spec.head_dim
        index = group.slots_RS.reshape(-1)
        k_XKH, v_XKH = (self.values(kv, i, half.index_select(0, index)) for i, half in enumerate(kv.flatten(1, 2)))
        return k_XKH.view(shape).transpose(1, 2).to(dtype), v_XKH.view(shape).transpose(1, 2).to(dtype)

    def _mask_with_sinks(self, mask: torch.Tensor, kv: torch.Tensor, num_q: int) -> torch.Tensor:
        """The mask, for each head, with the sinks as its last column."""
        sinks_N = self.sinks(kv).to(mask.dtype)
        if num_q <= BATCHED_UP_TO:
            column = sinks_N.view(1, self.spec.num_kv_heads, 1, -1).expand(len(mask), -1, num_q, -1).flatten(2)[..., None]
        else:
            column = sinks_N.view(1, -1, 1, 1).expand(len(mask), -1, num_q, -1)
        return torch.cat((mask.expand(-1, column.shape[1], -1, -1), column), -1)

    def _slots(self, blocks_RM: np.ndarray, contexts_R: np.ndarray) -> np.ndarray:
        size = self.spec.block_size
        num_ctx = int(contexts_R.max())
        offsets = np.arange(num_ctx)
        slots_RS = blocks_RM[:, offsets // size].astype(np.int64) * size + offsets % size
        if int(contexts_R.min()) < num_ctx:
            slots_RS = np.where(offsets < contexts_R[:, None], slots_RS, slots_RS[:, :1])
        return slots_RS

    def _mask(self, num_q: int, contexts_R: np.ndarray, trees: list[RowTree | None]) -> torch.Tensor | None:
        """The mask to add, [R, 1, Q * G, S] for batched rows and [1, 1, Q, S] for a long one. `trees`: of each row, or none."""
        num_ctx, window = int(contexts_R.max()), self.spec.sliding_window
        has_tree = any(tree is not None for tree in trees)
        is_whole = len(contexts_R) == 1 and num_q == num_ctx and num_q > BATCHED_UP_TO and not has_tree
        if is_whole and (window is None or window >= num_ctx) and not self.spec.has_sinks:
            return None
        q_position = contexts_R[:, None, None] - num_q + np.arange(num_q)[None, :, None]
        k_position = np.arange(num_ctx)
        hidden = k_position > q_position
        if window is not None:
            hidden |= k_position <= q_position - window
        for hidden_QS, tree in zip(hidden, trees, strict=bool(trees)):
            if tree is not None:
                hide_nodes(hidden_QS, tree, window)
        mask = self._to_device(hidden[:, None])
        if num_q <= BATCHED_UP_TO:
            mask = mask.repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, 2)
        return torch.zeros(mask.shape, dtype=self.spec.dtype, device=mask.device).masked_fill_(mask, float("-inf"))

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.spec.device, non_blocking=True)


def _batches(count_R: np.ndarray, ctx_len_R: np.ndarray) -> list[np.ndarray]:
    """Row numbers that attend together: of equal token count, their contexts near enough to share a padded width."""
    batches = [np.array([row]) for row in np.flatnonzero(count_R > BATCHED_UP_TO)]
    for num_q in np.unique(count_R[(count_R > 0) & (count_R <= BATCHED_UP_TO)]):
        rows = np.flatnonzero(count_R == num_q)
        rows = rows[np.argsort(-ctx_len_R[rows], kind="stable")]
        while len(rows):
            widest = ctx_len_R[rows[0]]
            near = int(np.searchsorted(-ctx_len_R[rows], -widest / PAD_LIMIT, side="right"))
            take = max(near, min(len(rows), 1))
            if len(rows) - take < take // 4:
                take = len(rows)
            batches.append(np.sort(rows[:take]))
            rows = rows[take:]
    return batches
