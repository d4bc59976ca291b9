"""The cache of a proposer's own attention layers: blocks of the target's tables, and scratch blocks for what is drafted.

Drafts are made before the scheduler has given their positions blocks. What a head stores for them is made anew, from the
target's hidden states, once they are verified: so until then it may lie in scratch blocks, a few for each row, behind the
blocks of the pool.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from lab.context import ForwardContext, forward_context
from lab.contracts.attention import Attention
from lab.contracts.spec import Proposer
from lab.runner.batch import Batch, BatchTrees
from lab.runner.rows import Rows


def scratch_positions(proposer: Proposer) -> int:
    """Positions that a proposer's own layers need beyond a row's known tokens."""
    return proposer.num_drafts if proposer.num_scratch is None else proposer.num_scratch


def scratch_blocks(num_positions: int, block_size: int) -> int:
    """Blocks that so many positions take beyond those that a row has, wherever they begin."""
    return -(-num_positions // block_size)


class RowsDraftCache:
    """See lab.contracts.spec.DraftCache."""

    def __init__(
        self,
        rows: Rows,
        backends: list[Attention],
        kv: list[torch.Tensor],
        *,
        block_size: int,
        num_blocks: int,
        num_scratch: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`kv` holds num_blocks blocks of the pool, and after them `scratch_blocks` of num_scratch positions for each row."""
        self._rows = rows
        self._backends = backends
        self._distinct = list(dict.fromkeys(backends))
        self._kv = kv
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._num_scratch = scratch_blocks(num_scratch, block_size)
        self._last_position = max_model_len - 1
        self._device = device

    def running(self, batch: Batch) -> AbstractContextManager[None]:
        plan_of: dict[int, Any] = {id(backend): backend.plan(batch) for backend in self._distinct}
        plans = [plan_of[id(backend)] for backend in self._backends]
        return forward_context(ForwardContext([batch] * len(plans), self._backends, plans, self._kv))

    def batch(self, rows_R: np.ndarray, start_R: np.ndarray, ids: Sequence[np.ndarray]) -> Batch:
        count_R = np.fromiter(map(len, ids), np.int64, len(ids))
        row_T = np.repeat(np.arange(len(ids)), count_R)
        q_start_R1 = np.concatenate([[0], np.cumsum(count_R)]).astype(np.int32)
        slot_position_T = np.arange(len(row_T)) + (start_R - q_start_R1[:-1])[row_T]
        tables_RM = self._tables(rows_R, int((start_R + count_R).max()))
        return self._made(tables_RM, row_T, slot_position_T, start_R + count_R, q_start_R1, np.concatenate(ids))

    def chain(self, rows_R: np.ndarray, start_R: np.ndarray, num: int) -> list[Batch]:
        if not num:
            return []
        tables_RM = self._tables(rows_R, int(start_R.max()) + num)
        row_T, q_start_R1 = np.arange(len(rows_R)), np.arange(len(rows_R) + 1, dtype=np.int32)
        ids_T = np.zeros(len(rows_R), np.int32)
        return [self._made(tables_RM, row_T, start_R + index, start_R + index + 1, q_start_R1, ids_T) for index in range(num)]

    def level(self, rows_R: np.ndarray, start_R: np.ndarray, depth: int, first: int, ancestors_RF: np.ndarray) -> Batch:
        num_rows, width = ancestors_RF.shape
        end = first + width
        tables_RM = self._tables(rows_R, int(start_R.max()) + end)
        row_T, q_start_R1 = np.arange(num_rows).repeat(width), np.arange(0, num_rows * width + 1, width, np.int32)
        slot_position_T = (start_R[:, None] + np.arange(first, end)).reshape(-1)
        tree_start_R, ancestors_T = start_R.astype(np.int32), ancestors_RF.reshape(-1)
        trees = BatchTrees(self._to_device(tree_start_R), self._to_device(ancestors_T), tree_start_R, ancestors_T)
        ids_T, positions_T = np.zeros(len(row_T), np.int32), (start_R + (depth - 1)).repeat(width)
        return self._made(tables_RM, row_T, slot_position_T, start_R + end, q_start_R1, ids_T, positions_T, trees)

    def _tables(self, rows_R: np.ndarray, max_ctx: int) -> np.ndarray:
        """The rows' block tables up to max_ctx tokens, scratch blocks in the places of those that they do not have."""
        rows = self._rows
        tables_RM = rows.blocks_RM[rows_R, : -(-max_ctx // self._block_size)].copy()
        for index, row in enumerate(rows_R.tolist()):
            have = rows.num_blocks(row)
            missing = min(tables_RM.shape[1] - have, self._num_scratch)
            if missing > 0:
                first = self._num_blocks + row * self._num_scratch
                tables_RM[index, have : have + missing] = np.arange(first, first + missing)
        return tables_RM

    def _made(
        self,
        tables_RM: np.ndarray,
        row_T: np.ndarray,
        slot_position_T: np.ndarray,
        ctx_len_R: np.ndarray,
        q_start_R1: np.ndarray,
        ids_T: np.ndarray,
        positions_T: np.ndarray | None = None,
        trees: BatchTrees | None = None,
    ) -> Batch:
        """`positions_T`: where tokens do not stand at the positions of their slots."""
        blocks_T = tables_RM[row_T, slot_position_T // self._block_size].astype(np.int64)
        ctx_len_R = ctx_len_R.astype(np.int32)
        positions_T = slot_position_T if positions_T is None else positions_T
        return Batch(
            num_tokens=len(row_T),
            num_rows=len(ctx_len_R),
            max_q=int((q_start_R1[1:] - q_start_R1[:-1]).max()),
            max_ctx=int(ctx_len_R.max()),
            input_ids_T=self._to_device(ids_T.astype(np.int32, copy=False)),
            positions_T=self._to_device(np.minimum(positions_T, self._last_position)),
            slots_T=self._to_device(blocks_T * self._block_size + slot_position_T % self._block_size),
            q_start_R1=self._to_device(q_start_R1),
            ctx_len_R=self._to_device(ctx_len_R),
            blocks_RM=self._to_device(tables_RM),
            logits_idx_L=self._to_device(q_start_R1[1:].astype(np.int64) - 1),
            q_start_R1_cpu=q_start_R1,
            ctx_len_R_cpu=ctx_len_R,
            blocks_RM_cpu=tables_RM,
            trees=trees,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
