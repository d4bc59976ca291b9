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
            chosen_RS[self._drawn_X] = self._draw(places, logits_RV[self._drawn_X])
        self._ids_RS[:, places] = chosen_RS if self._draft_ids is None else self._draft_ids[chosen_RS]
        if len(self._drawn):
            self._probs_RSV[:, places] = self._probs_RSV[:, places].scatter(2, self._ids_RS[:, places, None], 1.0)
            self._probs_RSV[self._drawn_X[:, None], torch.tensor(places, device=ids_RK.device)] = self._of_drawn_XSV

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

    def _draw(self, places: list[int], logits_XV: torch.Tensor) -> torch.Tensor:
        """Draw siblings for the rows that do, in the draft model's ids: XS. Keeps the distribution of each."""
        probs_XV = (logits_XV / self._temperatures_X1).softmax(-1).double()
        drawn, kept = [], []
        for place in places:
            node = self._tree.nodes[place]
            probs_XV = probs_XV / probs_XV.sum(-1, keepdim=True)
            uniforms_X = torch.from_numpy(self._view.uniforms_RDS[self._drawn, node.depth - 1, node.place])
            ids_X = drawn_ids(probs_XV, uniforms_X.to(probs_XV.device))
            drawn.append(ids_X)
            kept.append(probs_XV)
            probs_XV = probs_XV.scatter(1, ids_X[:, None], 0.0)
        of_drawn = torch.stack(kept, 1).float()
        self._of_drawn_XSV = of_drawn.new_zeros(*of_drawn.shape[:2], self._probs_RSV.shape[2])
        ids_V = slice(0, of_drawn.shape[2]) if self._draft_ids is None else self._draft_ids
        self._of_drawn_XSV[:, :, ids_V] = of_drawn
        return torch.stack(drawn, 1)


def drawn_ids(probs_XV: torch.Tensor, uniforms_X: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulated probability passes the uniform; one of probability zero is never drawn."""
    cumulated_XV = probs_XV.double().cumsum(-1)
    wanted_X1 = (uniforms_X * cumulated_XV[:, -1]).unsqueeze(1)
    ids_X = torch.searchsorted(cumulated_XV, wanted_X1, right=True).squeeze(1)
    last_X = cumulated_XV.shape[1] - 1 - (probs_XV > 0).flip(-1).to(torch.int8).argmax(-1)
    return torch.minimum(ids_X, last_X)
