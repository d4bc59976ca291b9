"""The reference: attention written out in float32, one row at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lab.api import Capabilities, register

from ._paged import PlainPaged
from ._trees import RowTree, hide_nodes, row_tree


@dataclass(frozen=True, slots=True)
class Plan:
    """Row boundaries, on the host."""

    q_start: list[int]
    ctx_len: list[int]
    blocks_RM: torch.Tensor
    trees: dict[int, RowTree] = field(default_factory=dict)  # of the rows that have one


@register("attention", "eager")
class Eager(PlainPaged):
    """The plain definition in float32, row by row: slow, and what every other backend is tested against."""

    capabilities = Capabilities(
        devices={"cpu", "cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        kv_dtypes={"float32", "bfloat16", "float16", "fp8", "int8"},
        features={"gqa", "sliding_window", "softcap", "spec_verify", "tree_verify", "lse", "token_head_scales"}
        | {"batch_invariant", "sinks"},
        priority=0,
        kv_layout="2PBKH",
    )

    def plan(self, batch: Any, reuse: Any = None) -> Plan:
        trees = {row: tree for row in range(batch.num_rows) if (tree := row_tree(batch, row)) is not None}
        return Plan(batch.q_start_R1_cpu.tolist(), batch.ctx_len_R_cpu.tolist(), batch.blocks_RM, trees)

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        out_TNH[plan.q_start[-1] :] = 0
        sinks_N = self.sinks(kv) if self.spec.has_sinks else None
        for row, tokens, k_SKH, v_SKH in self._rows(kv, plan):
            out_TNH[tokens] = self._attend_row(q_TNH[tokens], k_SKH, v_SKH, sinks_N, plan.trees.get(row))

    def attend_lse(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor
    ) -> None:
        self.attend(q_TNH, kv, plan, out_TNH)
        sinks_N = self.sinks(kv) if self.spec.has_sinks else None
        for row, tokens, k_SKH, _ in self._rows(kv, plan):
            scores_NQS = self._scores(q_TNH[tokens], k_SKH, plan.trees.get(row))
            lse_TN[tokens] = _with_sinks(scores_NQS, sinks_N).logsumexp(-1).T

    def _rows(self, kv: torch.Tensor, plan: Plan) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor]]:
        """Each row with its tokens, and its keys and values in float32."""
        for row, ctx_len in enumerate(plan.ctx_len):
            tokens = slice(plan.q_start[row], plan.q_start[row + 1])
            if tokens.stop > tokens.start:
                yield row, tokens, *self._gather(kv, plan.blocks_RM[row], ctx_len)

    def _gather(self, kv: torch.Tensor, blocks_M: torch.Tensor, ctx_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks = -(-ctx_len // self.spec.block_size)
        rows_2SKS = kv[:, blocks_M[:num_blocks].long()].flatten(1, 2)[:, :ctx_len]
        return self.values(kv, 0, rows_2SKS[0]).float(), self.values(kv, 1, rows_2SKS[1]).float()

    def _attend_row(
        self,
        q_QNH: torch.Tensor,
        k_SKH: torch.Tensor,
        v_SKH: torch.Tensor,
        sinks_N: torch.Tensor | None,
        tree: RowTree | None = None,
    ) -> torch.Tensor:
        if self.spec.batch_invariant and len(q_QNH) > 1:  # products of one shape for a token, whatever came with it
            before = len(k_SKH) - len(q_QNH)
            ends = range(before + 1, len(k_SKH) + 1)
            return torch.cat([self._attend_row(q_QNH[i : i + 1], k_SKH[:n], v_SKH[:n], sinks_N) for i, n in enumerate(ends)])
        v_SNH = v_SKH.repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, 1)
        weights_NQS = _with_sinks(self._scores(q_QNH, k_SKH, tree), sinks_N).softmax(-1)[..., : len(k_SKH)]
        return torch.einsum("nqs,snh->qnh", weights_NQS, v_SNH).to(q_QNH.dtype)

    def _scores(self, q_QNH: torch.Tensor, k_SKH: torch.Tensor, tree: RowTree | None = None) -> torch.Tensor:
        num_q, num_ctx = len(q_QNH), len(k_SKH)
        k_SNH = k_SKH.repeat_interleave(self.spec.num_heads // self.spec.num_kv_heads, 1)
        scores_NQS = torch.einsum("qnh,snh->nqs", q_QNH.float(), k_SNH) * self.spec.scale
        if self.spec.softcap is not None:
            scores_NQS = torch.tanh(scores_NQS / self.spec.softcap) * self.spec.softcap
        return scores_NQS.masked_fill(self._hidden(num_q, num_ctx, tree).to(q_QNH.device), float("-inf"))

    def _hidden(self, num_q: int, num_ctx: int, tree: RowTree | None) -> torch.Tensor:
        """Which keys a row's queries, its last tokens, do not see: QS."""
        q_position = torch.arange(num_ctx - num_q, num_ctx)[:, None]
        k_position = torch.arange(num_ctx)[None]
        hidden = k_position > q_position
        if self.spec.sliding_window is not None:
            hidden |= k_position <= q_position - self.spec.sliding_window
        if tree is not None:
            hide_nodes(hidden.numpy(), tree, self.spec.sliding_window)
        return hidden


def _with_sinks(scores_NQS: torch.Tensor, sinks_N: torch.Tensor | None) -> torch.Tensor:
    """The sinks as one more key behind all others, which has no value."""
    if sinks_N is None:
        return scores_NQS
    return torch.cat((scores_NQS, sinks_N[:, None, None].expand(-1, scores_NQS.shape[1], 1)), -1)
