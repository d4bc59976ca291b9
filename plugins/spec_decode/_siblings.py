"""The tokens of a tree of fixed shape: of each node's children the most likely ones, or drawn ones that differ."""

import numpy as np
import torch

from lab.api import Draft, ProposeView

from ._tree import StaticTree, parents_in


class Siblings:
    """The drafts of one `propose`, node by node. Rows that sample draw from the draft model at the request's temperature,
    siblings without replacement: each from what its earlier siblings left of the distribution.

    Args:
        draws: whether rows that sample draw their drafts; else all rows take the most likely ones, one-hot.
        draft_ids: the target's ids of the draft model's own, None where they are the same.
    """

    def __init__(
        self,
        tree: StaticTree,
        view: ProposeView,
        vocab_size: int,
        device: torch.device,
        draws: bool,
        draft_ids: torch.Tensor | None,
    ) -> None:
        self._tree, self._view, self._draft_ids = tree, view, draft_ids
        rows = len(view.rows_R)
        self._ids_RS = torch.zeros(rows, len(tree.nodes), dtype=torch.int64, device=device)
        temperatures_R = view.temperatures_R if draws else None
        self._drawn = np.flatnonzero(temperatures_R) if temperatures_R is not None else np.empty(0, np.int64)
        self._probs_RSV = None
        if len(self._drawn):
            self._probs_RSV = torch.zeros(rows, len(tree.nodes), vocab_size, device=device)
            self._drawn_X = torch.from_numpy(self._drawn).to(device)
            self._temperatures_X1 = torch.from_numpy(temperatures_R[self._drawn]).to(device).float().unsqueeze(1)

    def choose(self, places: list[int], logits_RV: torch.Tensor) -> None:
        """Choose the tokens of these siblings by the logits after their parent."""
        if not places:
            return
        ranks = [self._tree.nodes[place].rank for place in places]
        ids_RK = logits_RV.topk(min(max(ranks) + 1, logits_RV.shape[1]), -1).indices
        chosen_RS = ids_RK[:, torch.tensor(ranks, device=ids_RK.device)]
        if len(self._drawn):
            chosen_RS[self._drawn_X], probs_XSV = self._draw(places, logits_RV[self._drawn_X])
        self._ids_RS[:, places] = chosen_RS if self._draft_ids is None else self._draft_ids[chosen_RS]
        if len(self._drawn):
            of_places_RSV = torch.zeros_like(self._probs_RSV[:, places]).scatter_(2, self._ids_RS[:, places, None], 1.0)
            of_places_RSV[self._drawn_X] = 0.0
            ids_V = slice(0, probs_XSV.shape[2]) if self._draft_ids is None else self._draft_ids
            of_drawn_XSV = of_places_RSV[self._drawn_X]
            of_drawn_XSV[:, :, ids_V] = probs_XSV
            of_places_RSV[self._drawn_X] = of_drawn_XSV
            self._probs_RSV[:, places] = of_places_RSV

    def ids(self, places: list[int]) -> torch.Tensor:
        """The target's ids of these nodes: RF."""
        return self._ids_RS[:, places]

    def draft(self) -> Draft:
        """All of it, each row cut at its limits."""
        rows = self._tree.rows(self._view.limits_R.tolist(), self._view.depths_R.tolist())
        ids = self._ids_RS.tolist()
        probs_RSV = self._probs_RSV
        if probs_RSV is not None:  # where a row's nodes are not the first ones, for being too deep
            for row, places in enumerate(rows):
                if places != list(range(len(places))):
                    probs_RSV[row, : len(places)] = probs_RSV[row, places]
        return Draft(
            [[ids[row][place] for place in places] for row, places in enumerate(rows)],
            probs_RSV,
            [parents_in(places, self._tree.parents) for places in rows],
        )

    def _draw(self, places: list[int], logits_XV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw siblings for the rows that do, in the draft model's ids: XS, and the distribution of each, XSV.

        Where the earlier siblings leave nothing, as at a low temperature, any other token may come.
        """
        left_XV = (logits_XV / self._temperatures_X1).double().softmax(-1)
        taken_XV = torch.zeros_like(left_XV, dtype=torch.bool)
        drawn, probs = [], []
        for place in places:
            node = self._tree.nodes[place]
            total_X1 = left_XV.sum(-1, keepdim=True)
            left_XV = torch.where(total_X1 > 0, left_XV / total_X1, (~taken_XV).double() / (~taken_XV).sum(-1, keepdim=True))
            uniforms_X = torch.from_numpy(self._view.uniforms_RDS[self._drawn, node.depth - 1, node.place])
            ids_X = drawn_ids(left_XV, uniforms_X.to(left_XV.device))
            drawn.append(ids_X)
            probs.append(left_XV.float())
            taken_XV.scatter_(1, ids_X[:, None], True)
            left_XV = left_XV.masked_fill(taken_XV, 0.0)
        return torch.stack(drawn, 1), torch.stack(probs, 1)


def drawn_ids(probs_XV: torch.Tensor, uniforms_X: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulated probability passes the uniform; one of probability zero is never drawn."""
    cumulated_XV = probs_XV.double().cumsum(-1)
    wanted_X1 = (uniforms_X * cumulated_XV[:, -1]).unsqueeze(1)
    ids_X = torch.searchsorted(cumulated_XV, wanted_X1, right=True).squeeze(1)
    last_X = cumulated_XV.shape[1] - 1 - (probs_XV > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.minimum(ids_X, last_X)
