"""An EAGLE head drafts a tree, level by level, on its own cache.

An entry is a node that the head was run on, to guess what follows it. Entries lie in the slots behind those of the text, in the
order in which they were made, and see the text and the entries of their own path.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from lab.api import Draft, DraftCache, ProposeView, UserError

from ._siblings import Siblings
from ._tree import (
    MOST_NODES,
    ROOT,
    StaticTree,
    checked_number,
    depth_of,
    no_shape_asked,
    parents_in,
    refuse_shape,
    static_tree,
)

Run = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]  # (batch, states_TD, ids_T) -> states one token further on
Logits = Callable[[torch.Tensor], torch.Tensor]  # hidden_LD -> float32 over what the head can propose
Top = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]  # (hidden_LD, k) -> log-probabilities, target's ids

DEFAULT_NODES, DEFAULT_DEPTH, DEFAULT_TOP_K = 12, 2, 8  # of a dynamic tree, by the clock: experiments/spec_methods


class Levels:
    """Runs the head on one level of nodes after another; at first on none, behind each row's last token."""

    def __init__(self, cache: DraftCache, view: ProposeView, run: Run, hidden_RD: torch.Tensor) -> None:
        self._cache, self._view, self._run = cache, view, run
        self._num_entries = 0
        self._depth = 0
        self._rows_R1 = np.arange(len(hidden_RD))[:, None]
        self._ancestors_RF = np.zeros((len(hidden_RD), 1), np.int64)
        self.hidden_LD = hidden_RD  # after each entry of the last level, row by row

    def descend(self, parents_RF: np.ndarray, ids_RF: torch.Tensor) -> None:
        """A level more: each entry's token, and the place of its parent in the level before."""
        width_before, width = self._ancestors_RF.shape[1], parents_RF.shape[1]
        own_F = 1 << np.arange(self._num_entries, self._num_entries + width)
        self._ancestors_RF = self._ancestors_RF[self._rows_R1, parents_RF] | own_F
        self._depth += 1
        view = self._view
        batch = self._cache.level(view.rows_R, view.lengths_R - 1, self._depth, self._num_entries, self._ancestors_RF)
        places_L = (self._rows_R1 * width_before + parents_RF).reshape(-1)
        states_LD = self.hidden_LD.index_select(0, torch.from_numpy(places_L).to(self.hidden_LD.device))
        self.hidden_LD = self._run(batch, states_LD, ids_RF.reshape(-1))
        self._num_entries += width


class DynamicTree:
    """EAGLE-2's tree (Li et al., https://arxiv.org/abs/2406.16858), by the head's own confidence in each path.

    At each depth the `top_k` likeliest paths are gone on with, by the `top_k` likeliest tokens each; of all nodes that were
    looked at the likeliest are proposed, in that order: a parent is never less likely than its child.
    """

    def __init__(self, depth: int, top_k: int) -> None:
        self.depth, self.top_k = depth, top_k
        self.num_entries = (depth - 1) * top_k

    def propose(self, view: ProposeView, levels: Levels, top: Top) -> Draft:
        """What the head says is looked at on the host: a tree has few nodes, and each call of a device's takes its time."""
        num_rows = len(view.rows_R)
        depth = min(self.depth, max(view.depths_R.tolist(), default=0), max(view.limits_R.tolist(), default=0))
        if not depth:
            return Draft([[] for _ in range(num_rows)], parents=[[] for _ in range(num_rows)])
        rows_R1 = np.arange(num_rows)[:, None]
        found = []
        scores_RF, nodes_RF, num_nodes = np.zeros((num_rows, 1), np.float32), np.full((num_rows, 1), ROOT), 0  # of the paths
        for level in range(1, depth + 1):
            log_probs_LK, ids_LK = top(levels.hidden_LD, self.top_k)
            width = ids_LK.shape[1]
            scores_RC = (log_probs_LK.cpu().numpy().reshape(num_rows, -1, width) + scores_RF[:, :, None]).reshape(num_rows, -1)
            ids_RC = ids_LK.cpu().numpy().reshape(num_rows, -1)
            found.append(_Level(ids_RC, scores_RC, nodes_RF.repeat(width, 1)))
            if level == depth:
                break
            best_RF = _descending(scores_RC)[:, : self.top_k]
            scores_RF, nodes_RF, num_nodes = scores_RC[rows_R1, best_RF], num_nodes + best_RF, num_nodes + ids_RC.shape[1]
            levels.descend(best_RF // width, torch.from_numpy(ids_RC[rows_R1, best_RF]).to(ids_LK.device))
        return _ranked(view, found)


class _Level(NamedTuple):
    """The nodes of one depth that were looked at. Parents are places among the nodes of all depths."""

    ids_RC: np.ndarray
    scores_RC: np.ndarray
    parents_RC: np.ndarray


def _descending(scores_RC: np.ndarray) -> np.ndarray:
    """The places of each row's scores, the largest first; earlier ones stand first among equals."""
    return (-scores_RC).argsort(axis=1, kind="stable")


def _ranked(view: ProposeView, levels: list[_Level]) -> Draft:
    """The likeliest nodes of each row, as many and as deep as it may have."""
    ids_RC, scores_RC, parents_RC = (np.concatenate(parts, 1) for parts in zip(*levels, strict=True))
    ends = list(accumulate(level.ids_RC.shape[1] for level in levels))
    order_RC = _descending(scores_RC)
    token_ids, parents = [], []
    for row, (limit, depth) in enumerate(zip(view.limits_R.tolist(), view.depths_R.tolist(), strict=True)):
        order_C = order_RC[row]
        if depth < len(levels):
            order_C = order_C[order_C < (ends[depth - 1] if depth else 0)]
        places = order_C[:limit]
        token_ids.append(ids_RC[row, places].tolist())
        parents.append(parents_in(places.tolist(), parents_RC[row].tolist()))
    return Draft(token_ids, parents=parents)


def propose_static(tree: StaticTree, view: ProposeView, levels: Levels, logits: Logits, siblings: Siblings) -> Draft:
    """Drafts of a fixed shape, whose tokens `siblings` chooses."""
    depth = min(tree.depth, int(view.depths_R.max(initial=0)), int(view.limits_R.max(initial=0)))
    level = [-1]  # the nodes that the head was run on, the root at first
    for below in range(1, depth + 1):
        logits_RFV = logits(levels.hidden_LD).unflatten(0, (len(view.rows_R), -1))
        for place, node in enumerate(level):
            siblings.choose(tree.children(node), logits_RFV[:, place])
        entered = [node for node in tree.at(below) if tree.children(node)]
        if below == depth or not entered:
            break
        parents_F = np.array([level.index(tree.parents[node]) for node in entered])
        levels.descend(np.tile(parents_F, (len(view.rows_R), 1)), siblings.ids(entered))
        level = entered
    return siblings.draft()


def tree_of(options: Any) -> DynamicTree | StaticTree | None:
    """The tree that eagle's options ask for, None for a chain. Raises UserError, with the numbers, for what is none."""
    if options.tree == "auto" and options.num_drafts is None:
        refuse_shape(options)
        return DynamicTree(DEFAULT_DEPTH, DEFAULT_TOP_K)
    if options.tree != "dynamic":
        return static_tree(options)
    if options.choices is not None:
        raise no_shape_asked(options)
    top_k = checked_number("top_k", DEFAULT_TOP_K if options.top_k is None else options.top_k, 1, MOST_NODES)
    tree = DynamicTree(depth_of(options, DEFAULT_DEPTH), top_k)
    if tree.num_entries > MOST_NODES:
        raise UserError(
            f"spec.depth={tree.depth} and spec.top_k={tree.top_k}: the head would be run on {tree.num_entries} nodes, "
            f"(depth - 1) * top_k, and at most {MOST_NODES} can be attended to as one tree."
        )
    return tree


def num_nodes(options: Any, tree: DynamicTree | StaticTree) -> int:
    """How many nodes are proposed at most. Raises UserError when that is not what spec.num_drafts says."""
    if isinstance(tree, StaticTree):
        return len(tree.nodes)
    asked = DEFAULT_NODES if options.num_drafts is None else checked_number("num_drafts", options.num_drafts, 1, MOST_NODES)
    most = tree.top_k + (tree.depth - 1) * tree.top_k**2
    if options.num_drafts is not None and asked > most:
        raise UserError(
            f"spec.num_drafts={asked}: a tree of spec.depth={tree.depth} and spec.top_k={tree.top_k} looks at {most} nodes."
        )
    return min(asked, most)
