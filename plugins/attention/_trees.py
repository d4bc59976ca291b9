"""Trees of drafts, as backends that make masks on the host see them: see lab.runner.batch.BatchTrees."""

from typing import Any

import numpy as np

from lab.api import dataclass


@dataclass(frozen=True, slots=True)
class RowTree:
    """The tree that a row's last tokens are."""

    start: int  # slot of its first node
    positions_Q: np.ndarray  # of the row's queries: those of nodes go by their depths
    seen_QN: np.ndarray  # bool: which nodes each query sees


def row_tree(batch: Any, row: int) -> RowTree | None:
    """None where the row's drafts are no tree."""
    if batch.trees is None:
        return None
    first, end = batch.q_start_R1_cpu[row : row + 2].tolist()
    start, ctx_len = int(batch.trees.start_R_cpu[row]), int(batch.ctx_len_R_cpu[row])
    if start == ctx_len:
        return None
    places_Q = np.arange(ctx_len - (end - first), ctx_len)
    is_node_Q = places_Q >= start
    bits_Q = np.where(is_node_Q, batch.trees.ancestors_T_cpu[first:end], 0)
    seen_QN = (bits_Q[:, None] >> np.arange(ctx_len - start)) & 1 > 0
    positions_Q = np.where(is_node_Q, start - 1 + seen_QN.sum(1), places_Q)
    return RowTree(start, positions_Q, seen_QN)


def hide_nodes(hidden_QS: np.ndarray, tree: RowTree, window: int | None) -> None:
    """Put a row's tree into its mask, which was made as if its tokens stood one after another. A window is wider than the tree
    is deep: it hides none of a node's own path.
    """
    before = np.arange(tree.start)
    hidden_QS[:, : tree.start] = before > tree.positions_Q[:, None]
    if window is not None:
        hidden_QS[:, : tree.start] |= before <= tree.positions_Q[:, None] - window
    end = tree.start + tree.seen_QN.shape[1]
    hidden_QS[:, tree.start : end] = ~tree.seen_QN
