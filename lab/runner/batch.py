"""The inputs of one forward pass, gathered from the persistent rows."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from lab.runner.buffers import SHARED, HostBatch, HostTable, HostTrees, InputBuffers
from lab.runner.rows import Rows
from lab.sample.tree import Tree


@dataclass(frozen=True, slots=True)
class Share:
    """One row's true share of a step, once it is known what the step before accepted."""

    row: int
    start: int  # position of its first token
    num_tokens: int
    num_drafts: int  # its last so many tokens are drafts
    samples: bool
    tree: Tree | None = None  # that its drafts are; None: a chain

    @property
    def draft_depth(self) -> int:
        """The most drafts that can be accepted."""
        return self.num_drafts if self.tree is None else self.tree.depth


@dataclass(frozen=True, slots=True)
class BatchTrees:
    """Which keys of this step's drafts a token may see, where drafts are trees.

    The nodes of row r lie in its slots start_R .. ctx_len_R - 1, in their order, and bit i of a token's ancestors is the node
    in slot start_R + i: its key is seen where the bit is set, a node's own bit included. Of the slots before start_R all is as
    in other rows: a token sees those up to its own. A row without a tree has start_R = ctx_len_R, and bits that mean nothing.

    A node's position, which rotations and windows go by, is start_R - 1 + its depth, the number of its bits.
    """

    start_R: torch.Tensor  # int32
    ancestors_T: torch.Tensor  # int64
    start_R_cpu: np.ndarray
    ancestors_T_cpu: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model and the attention plugins see of a step: rows one after another, no padding between them.

    Padding tokens stand after the last row: id 0, position 0, slot -1. For a captured graph the row tensors are padded too:
    rows of no tokens and no context. Arrays ending in `_cpu` are host mirrors of the tensors, of the real rows alone.

    Layers that keep different parts of a row (`lab.kv.groups`) have block tables, and so slots, of their own: each sees the
    batch of its group, which differs in `slots_T`, `blocks_RM` and `blocks_RM_cpu` alone. In a group with a sliding window the
    entries of blocks that lie wholly behind it are of any block, with finite contents.
    """

    num_tokens: int  # T, padding included
    num_rows: int  # R, real rows
    max_q: int  # the longest row's tokens in this step
    max_ctx: int  # the longest row's context
    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64; -1 is padding
    q_start_R1: torch.Tensor  # int32: row r has tokens q_start[r] .. q_start[r + 1] - 1
    ctx_len_R: torch.Tensor  # int32: tokens of the row in the cache once this step has written its own
    blocks_RM: torch.Tensor  # int32 block table; entries past the context are 0
    logits_idx_L: torch.Tensor  # int64: the tokens whose logits are sampled from
    q_start_R1_cpu: np.ndarray
    ctx_len_R_cpu: np.ndarray
    blocks_RM_cpu: np.ndarray
    trees: BatchTrees | None = None  # None: no row's drafts are a tree
    others: "tuple[Batch, ...]" = ()  # of the first group's batch: those of the other groups

    def of_group(self, group: int) -> "Batch":
        """The batch as the layers of a KV group see it."""
        return self.others[group - 1] if group else self


class BatchBuilder:
    """Gathers a `Batch` from the rows; all arithmetic is on the host, one copy to the device each.

    With `buffers` the batch's tensors are views of them, at the same addresses in every step. `max_len` is the length of the
    longest row (None: as many tokens as a row has places for). With `has_trees` rows may have trees of drafts, and then a batch
    in buffers always has `trees`, so that a captured graph is of either sort of step.
    """

    def __init__(
        self,
        rows: Rows,
        block_size: int,
        device: torch.device,
        buffers: InputBuffers | None = None,
        max_len: int | None = None,
        has_trees: bool = False,
    ) -> None:
        self._rows = rows
        self._always_trees = has_trees and buffers is not None
        self._max_len = max_len or rows.tokens_RC.shape[1]
        self._block_size = block_size
        self._device = device
        self._buffers = buffers

    @property
    def is_persistent(self) -> bool:
        return self._buffers is not None

    def build(self, shares: list[Share], padded_tokens: int = 0, padded_rows: int = 0) -> Batch:
        """The batch of these shares, its tensors padded up to so many tokens and rows (0: none)."""
        rows, block_size = self._rows, self._block_size
        num_rows = len(shares)
        row_R = np.fromiter((s.row for s in shares), np.int64, num_rows)
        start_R = np.fromiter((s.start for s in shares), np.int64, num_rows)
        count_R = np.fromiter((s.num_tokens for s in shares), np.int64, num_rows)
        q_start_R1 = np.fromiter(accumulate((s.num_tokens for s in shares), initial=0), np.int32, num_rows + 1)
        num_tokens = int(q_start_R1[-1])
        if num_tokens == num_rows:  # one token a row: the usual decode step
            row_T, positions_T = row_R, start_R
        else:
            row_T = np.repeat(row_R, count_R)
            positions_T = np.arange(num_tokens) + np.repeat(start_R - q_start_R1[:-1], count_R)
        places_T = positions_T  # of the tokens in their rows: that of a node of a tree is not its position
        ctx_len_R = (start_R + count_R).astype(np.int32)
        max_ctx = int(ctx_len_R.max())
        width, number_T, offset_T = -(-max_ctx // block_size), places_T // block_size, places_T % block_size
        trees = None
        if self._always_trees or any(share.tree is not None for share in shares):
            trees, positions_T = _trees(shares, q_start_R1, ctx_len_R, places_T)
        host = HostBatch(
            input_ids_T=rows.tokens_RC[row_T, places_T],
            positions_T=positions_T,
            q_start_R1=q_start_R1,
            ctx_len_R=ctx_len_R,
            logits_idx_L=_logits_index(shares, q_start_R1),
            tables=[
                HostTable(table[row_T, number_T].astype(np.int64) * block_size + offset_T, table[row_R, :width])
                for table in rows.tables
            ],
            trees=trees,
        )
        return self._on_device(host, int(count_R.max()), max_ctx, padded_tokens, padded_rows)

    def build_sample(self, num_tokens: int, num_rows: int, *, is_uniform: bool) -> Batch:
        """A batch to try a shape with, which writes to no slot.

        Uniform: `num_rows` rows of equal length. Otherwise long rows and one of a single token, padded to `num_rows` rows;
        `max_q` is that of the longest row that a batch of the shape may have.
        """
        count_R = np.full(num_rows, num_tokens // num_rows) if is_uniform else self._mixed_counts(num_tokens, num_rows)
        q_start_R1 = np.concatenate([[0], np.cumsum(count_R)]).astype(np.int32)
        ctx_len_R = np.minimum(count_R, self._max_len).astype(np.int32)
        width = -(-int(ctx_len_R.max()) // self._block_size)
        positions_T = np.arange(num_tokens) - np.repeat(q_start_R1[:-1], count_R)
        table = HostTable(np.full(num_tokens, -1, np.int64), np.zeros((len(count_R), width), np.int32))
        host = HostBatch(
            input_ids_T=np.zeros(num_tokens, np.int32),
            positions_T=np.minimum(positions_T, self._max_len - 1),
            q_start_R1=q_start_R1,
            ctx_len_R=ctx_len_R,
            logits_idx_L=q_start_R1[1:].astype(np.int64) - 1,
            tables=[table] * len(self._rows.tables),
            trees=HostTrees(ctx_len_R, np.zeros(num_tokens, np.int64)) if self._always_trees else None,
        )
        max_q = int(count_R.max()) if is_uniform else min(num_tokens, self._max_len)
        return self._on_device(host, max_q, int(ctx_len_R.max()), 0, num_rows)

    def _mixed_counts(self, num_tokens: int, num_rows: int) -> np.ndarray:
        """Tokens of each row: one, and the others in rows as long as they may be."""
        whole, rest = divmod(num_tokens - 1, self._max_len)
        counts = [self._max_len] * whole + [rest] * (rest > 0) + [1]
        most = num_rows or self._rows.tokens_RC.shape[0]
        return np.array(counts if len(counts) <= most else [num_tokens])

    def _on_device(self, host: HostBatch, max_q: int, max_ctx: int, padded_tokens: int, padded_rows: int) -> Batch:
        padded = host.padded(max(padded_tokens, len(host.input_ids_T)), max(padded_rows, len(host.ctx_len_R)))
        if self._buffers is not None:
            tensors = self._buffers.fill(padded)
        else:
            tensors = {name: self._to_device(array) for name, array in padded.arrays().items()}
        own = [
            {"slots_T": tensors[f"slots_T {g}"], "blocks_RM": tensors[f"blocks_RM {g}"], "blocks_RM_cpu": table.blocks_RM}
            for g, table in enumerate(host.tables)
        ]
        trees = None
        if host.trees is not None:
            of_device = tensors["tree_start_R"], tensors["ancestors_T"]
            trees = BatchTrees(*of_device, host.trees.start_R, host.trees.ancestors_T)
        batch = Batch(
            num_tokens=len(padded.input_ids_T),
            num_rows=len(host.ctx_len_R),
            max_q=max_q,
            max_ctx=max_ctx,
            **{name: tensors[name] for name in SHARED},
            q_start_R1_cpu=host.q_start_R1,
            ctx_len_R_cpu=host.ctx_len_R,
            trees=trees,
            **own[0],
        )
        return replace(batch, others=tuple(replace(batch, **of_group) for of_group in own[1:])) if len(own) > 1 else batch

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _trees(
    shares: list[Share], q_start_R1: np.ndarray, ctx_len_R: np.ndarray, places_T: np.ndarray
) -> tuple[HostTrees, np.ndarray]:
    """The trees of a step, and the positions of its tokens."""
    positions_T = places_T.copy()
    start_R, ancestors_T = ctx_len_R.copy(), np.zeros(len(places_T), np.int64)
    for index, share in enumerate(shares):
        if share.tree is None:
            continue
        end = int(q_start_R1[index + 1])
        nodes = slice(end - share.num_drafts, end)
        start_R[index] -= share.num_drafts
        positions_T[nodes] = start_R[index] - 1 + np.array(share.tree.depths)
        ancestors_T[nodes] = share.tree.ancestors
    return HostTrees(start_R, ancestors_T), positions_T


def _logits_index(shares: list[Share], q_start_R1: np.ndarray) -> np.ndarray:
    ends = q_start_R1[1:]
    if all(s.samples and s.num_drafts == 0 for s in shares):
        return ends.astype(np.int64) - 1
    index: list[int] = []
    for share, end in zip(shares, ends.tolist(), strict=True):
        if share.samples:
            index.extend(range(end - 1 - share.num_drafts, end))
    return np.array(index, np.int64)
