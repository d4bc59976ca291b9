"""What the target has run and a draft head has not: while no drafts are wanted the head need not keep up step by step."""

import numpy as np
import torch

from lab.api import StepView

from ._chain import next_ids

MOST_TOKENS = 64  # that wait; more take as long in one pass as in two


class Waiting:
    """Tokens of steps in their order; taken all at once, each row's side by side."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._hidden: list[torch.Tensor] = []
        self._aux: list[torch.Tensor] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_tokens

    def __contains__(self, row: int) -> bool:
        return any(row in rows for rows in self._rows)

    def has_room(self, step: StepView) -> bool:
        return self._num_tokens + int(step.num_kept_R.sum()) <= MOST_TOKENS

    def add(self, step: StepView) -> None:
        """Keep copies: a step's tensors may be written anew by the next one."""
        kept_R = step.num_kept_R
        num_tokens = int(kept_R.sum())
        within_T = np.arange(num_tokens) - np.repeat(np.cumsum(kept_R) - kept_R, kept_R)
        places_T = np.repeat(step.batch.q_start_R1_cpu[:-1], kept_R) + within_T
        index_T = torch.from_numpy(places_T).to(step.hidden_TD.device)
        self._rows.append(np.repeat(step.rows_R, kept_R))
        self._positions.append(np.repeat(step.start_R, kept_R) + within_T)
        self._ids.append(next_ids(step)[places_T])
        self._hidden.append(step.hidden_TD[index_T])
        if step.aux_ATD is not None:
            self._aux.append(step.aux_ATD[:, index_T])
        self._num_tokens += num_tokens

    def take(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], torch.Tensor, torch.Tensor | None]:
        """All of it: the rows, the position of each one's first token, the tokens behind the positions, and the target's
        hidden states, row by row; nothing waits any more.
        """
        rows_T, positions_T, ids_T = (np.concatenate(parts) for parts in (self._rows, self._positions, self._ids))
        order_T = np.lexsort((positions_T, rows_T))
        rows_R, first_R = np.unique(rows_T[order_T], return_index=True)
        hidden_TD = torch.cat(self._hidden)
        index_T = torch.from_numpy(order_T).to(hidden_TD.device)
        aux_ATD = torch.cat(self._aux, 1)[:, index_T] if self._aux else None
        self.__init__()
        return rows_R, positions_T[order_T][first_R], np.split(ids_T[order_T], first_R[1:]), hidden_TD[index_T], aux_ATD
