"""What proposers with a model of their own share: the tokens it is shown, the hidden states that drafts go on from, and
choosing each next draft, greedily or by lot.
"""

from typing import Any

import numpy as np
import torch

from lab.api import Draft, ProposeView, StepView

from ._siblings import drawn_ids


class Choice:
    """The drafts of one `propose`, place by place. Rows that sample draw from the draft model at the request's temperature.

    Args:
        draws: whether rows that sample draw their drafts; else all rows take the most likely ones, one-hot.
        draft_ids: the target's ids of the draft model's own, None where they are the same.
    """

    def __init__(
        self, view: ProposeView, num: int, vocab_size: int, device: torch.device, draws: bool, draft_ids: torch.Tensor | None
    ) -> None:
        self.num = num
        self._view = view
        self._draft_ids = draft_ids
        temperatures_R = view.temperatures_R if draws else None
        self._drawn = np.flatnonzero(temperatures_R) if temperatures_R is not None else np.empty(0, np.int64)
        self._ids: list[torch.Tensor] = []
        self._probs_RSV = None
        if len(self._drawn):
            rows = len(view.rows_R)
            self._probs_RSV = torch.zeros(rows, num, vocab_size, device=device)
            self._drawn_X = torch.from_numpy(self._drawn).to(device)
            temperatures = torch.from_numpy(temperatures_R[self._drawn]).to(device)
            self._temperatures_X1 = temperatures.float().unsqueeze(1)

    def choose(self, model: Any, *inputs: Any) -> torch.Tensor:
        """The next draft of each row, by the `greedy` or `logits` that a draft model gives of `inputs`: the target's ids_R."""
        ids_R = self._draw(model.logits(*inputs)) if len(self._drawn) else model.greedy(*inputs)
        if ids_R is None:  # a model that caps its logits has to compute them
            ids_R = model.logits(*inputs).argmax(-1)
        self._ids.append(ids_R)
        return ids_R

    def _draw(self, logits_RV: torch.Tensor) -> torch.Tensor:
        place = len(self._ids)
        ids_R = logits_RV.argmax(-1)
        probs_XV = (logits_RV[self._drawn_X] / self._temperatures_X1).softmax(-1)
        uniforms_X = torch.from_numpy(self._view.uniforms_RS[self._drawn, place]).to(probs_XV.device)
        ids_R[self._drawn_X] = drawn_ids(probs_XV, uniforms_X)
        target_R = ids_R if self._draft_ids is None else self._draft_ids[ids_R]
        self._probs_RSV[torch.arange(len(ids_R)), place, target_R] = 1.0
        of_drawn_XV = torch.zeros(len(probs_XV), self._probs_RSV.shape[2], device=probs_XV.device)
        if self._draft_ids is None:
            of_drawn_XV[:, : probs_XV.shape[1]] = probs_XV
        else:
            of_drawn_XV[:, self._draft_ids] = probs_XV
        self._probs_RSV[self._drawn_X, place] = of_drawn_XV
        return target_R

    def draft(self) -> Draft:
        """All of it, each row cut at its limit."""
        limits = self._view.limits_R.tolist()
        if not self._ids:
            return Draft([[] for _ in limits])
        ids_RS = torch.stack(self._ids, 1).tolist()
        token_ids = [ids[: min(limit, self.num)] for ids, limit in zip(ids_RS, limits, strict=True)]
        return Draft(token_ids, self._probs_RSV)


class LastStates:
    """Of each row of the last step the hidden state that its drafts go on from: that of its last known token."""

    def keep(self, rows_R: np.ndarray, states_TD: torch.Tensor, last_R: np.ndarray) -> None:
        """Of row r the state at last_R of states_TD."""
        self._states_RD = states_TD.index_select(0, torch.from_numpy(last_R.astype(np.int64)).to(states_TD.device))
        self._place_of = {row: place for place, row in enumerate(rows_R.tolist())}

    def keep_kept(self, step: StepView, states_TD: torch.Tensor) -> None:
        """Of each row of the step the state of the last position that stands."""
        self.keep(step.rows_R, states_TD, step.batch.q_start_R1_cpu[:-1] + step.num_kept_R - 1)

    def of(self, rows_R: np.ndarray) -> torch.Tensor:
        """States of these rows, in their order (R, D)."""
        places = [self._place_of[row] for row in rows_R.tolist()]
        return self._states_RD if places == list(range(len(self._states_RD))) else self._states_RD[places]


def next_ids(step: StepView) -> np.ndarray:
    """The token after each position of the step: int32, as long as the batch, whose padding gets zeros."""
    q_start_R1 = step.batch.q_start_R1_cpu
    count_R = q_start_R1[1:] - q_start_R1[:-1]
    num_tokens = int(q_start_R1[-1])
    position_T = np.arange(num_tokens) + np.repeat(step.start_R - q_start_R1[:-1], count_R)
    next_ids_T = np.zeros(step.batch.num_tokens, np.int32)
    next_ids_T[:num_tokens] = step.tokens_RC[np.repeat(step.rows_R, count_R), position_T + 1]
    return next_ids_T
