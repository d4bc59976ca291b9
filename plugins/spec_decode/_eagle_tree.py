"""An EAGLE head drafts a tree, level by level, on its own cache.

An entry is a node that the head was run on, to guess what follows it. Entries lie in the slots behind those of the text, in the
order in which they were made, and see the text and the entries of their own path.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lab.api import Draft, DraftCache, ProposeView, UserError

from ._siblings import Siblings
from ._tree import (
    DEFAULT_NODES,
    MOST_NODES,
    StaticTree,
    checked_number,
    depth_of,
    no_shape_asked,
    parents_in,
    static_tree,
)

Run = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]  # (batch, states_TD, ids_T) -> states one token further on
Logits = Callable[[torch.Tensor], torch.Tensor]  # hidden_LD -> float32 over what the head can propose
Ids = Callable[[torch.Tensor], torch.Tensor]  # the head's ids -> the target's

DEFAULT_TOP_K = 8


class Levels:
    """Runs the head on one level of nodes after another; at first on none, behind each row's last token."""

    def __init__(self, cache: DraftCache, view: ProposeView, run: Run, hidden_RD: torch.Tensor) -> None:
        self._cache, self._view, self._run = cache, view, run
        self._num_entries = 0
        self._depth = 0
        self._ancestors_RF = np.zeros((len(hidden_RD), 1), np.int64)
        self.hidden_RFD = hidden_RD[:, None]  # after each entry of the last level

    def descend(self, parents_RF: np.ndarray, ids_RF: torch.Tensor) -> None:
        """A level more: each entry's token, and the place of its parent in the level before."""
        num_rows, width = parents_RF.shape
        own_F = 1 << np.arange(self._num_entries, self._num_entries + width)
        self._ancestors_RF = np.take_along_axis(self._ancestors_RF, parents_RF, 1) | own_F
        self._depth += 1
        view, first = self._view, self._num_entries
        batch = self._cache.level(view.rows_R, view.lengths_R - 1, self._depth, first, self._ancestors_RF)
        rows_R1 = torch.arange(num_rows, device=ids_RF.device)[:, None]
        states_RFD = self.hidden_RFD[rows_R1, torch.from_numpy(parents_RF).to(ids_RF.device)]
        out_TD = self._run(batch, states_RFD.flatten(0, 1), ids_RF.flatten())
        self.hidden_RFD = out_TD.unflatten(0, (num_rows, width))
        self._num_entries += width


class DynamicTree:
    """EAGLE-2's tree (Li et al., https://arxiv.org/abs/2406.16858), by the head's own confidence in each path.

    At each depth the `top_k` likeliest paths are gone on with, by the `top_k` likeliest tokens each; of all nodes that were
    looked at the likeliest are proposed, in that order: a parent is never less likely than its child.
    """

    def __init__(self, depth: int, top_k: int) -> None:
        self.depth, self.top_k = depth, top_k
        self.num_entries = (depth - 1) * top_k

    def propose(self, view: ProposeView, levels: Levels, logits: Logits, target_ids: Ids) -> Draft:
        num_rows = len(view.rows_R)
        depth = min(self.depth, int(view.depths_R.max(initial=0)), int(view.limits_R.max(initial=0)))
        ids, scores, parents, depths = [], [], [], []
        chosen_scores_RF1 = torch.zeros(num_rows, 1, 1, device=levels.hidden_RFD.device)
        chosen_RF = np.full((num_rows, 1), -1)  # nodes of the level, among all
        for level in range(1, depth + 1):
            logits_LV = logits(levels.hidden_RFD.flatten(0, 1))
            top_LK, ids_LK = logits_LV.topk(min(self.top_k, logits_LV.shape[1]), -1)
            sure_LK = (top_LK - logits_LV.logsumexp(-1, keepdim=True)).clamp_(
                max=0.0
            )  # rounding puts no child before its parent
            scores_RC = (chosen_scores_RF1 + sure_LK.unflatten(0, (num_rows, -1))).flatten(1)
            ids_RC = target_ids(ids_LK).view(num_rows, -1)
            num_before = sum(part.shape[1] for part in parents)
            ids.append(ids_RC)
            scores.append(scores_RC)
            parents.append(np.repeat(chosen_RF, top_LK.shape[1], 1))
            depths.append(np.full(ids_RC.shape[1], level))
            if level == depth:
                break
            best_RF = scores_RC.topk(min(self.top_k, scores_RC.shape[1]), -1).indices
            chosen_scores_RF1 = scores_RC.gather(1, best_RF).unsqueeze(2)
            best = best_RF.cpu().numpy()
            chosen_RF = num_before + best
            levels.descend(best // top_LK.shape[1], ids_RC.gather(1, best_RF))
        if not ids:
            return Draft([[] for _ in range(num_rows)], parents=[[] for _ in range(num_rows)])
        return _ranked(view, torch.cat(ids, 1), torch.cat(scores, 1), np.concatenate(parents, 1), np.concatenate(depths))


def _ranked(
    view: ProposeView, ids_RC: torch.Tensor, scores_RC: torch.Tensor, parents_RC: np.ndarray, depths_C: np.ndarray
) -> Draft:
    """The likeliest nodes of each row, as many and as deep as it may have; earlier ones stand first among equals."""
    ids_RC, scores_RC = ids_RC.cpu().numpy(), scores_RC.double().cpu().numpy()
    order_RC = np.argsort(-scores_RC, axis=1, kind="stable")
    token_ids, parents = [], []
    for row, (limit, depth) in enumerate(zip(view.limits_R.tolist(), view.depths_R.tolist(), strict=True)):
        order_C = order_RC[row]
        places = order_C[depths_C[order_C] <= depth][:limit]
        token_ids.append(ids_RC[row, places].tolist())
        parents.append(parents_in(places.tolist(), parents_RC[row].tolist()))
    return Draft(token_ids, parents=parents)


def propose_static(tree: StaticTree, view: ProposeView, levels: Levels, logits: Logits, siblings: Siblings) -> Draft:
    """Drafts of a fixed shape, whose tokens `siblings` chooses."""
    depth = min(tree.depth, int(view.depths_R.max(initial=0)), int(view.limits_R.max(initial=0)))
    level = [-1]  # the nodes that the head was run on, the root at first
    for below in range(1, depth + 1):
        logits_RFV = logits(levels.hidden_RFD.flatten(0, 1)).unflatten(0, (len(view.rows_R), -1))
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
    if options.tree != "dynamic":
        return static_tree(options)
    if options.choices is not None:
        raise no_shape_asked(options)
    top_k = checked_number("top_k", DEFAULT_TOP_K if options.top_k is None else options.top_k, 1, MOST_NODES)
    tree = DynamicTree(depth_of(options), top_k)
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
