"""How often drafts are accepted, request by request."""

from typing import NamedTuple

import numpy as np

from lab.api import Verified


class Prior(NamedTuple):
    """What is believed before anything was seen, in drafts that a belief counts for."""

    guess: float  # of a run's first requests: high, so that drafts are tried
    guess_weight: float
    others_weight: float  # of what is known of all requests, in each of them


class AcceptanceRates:
    """The probability that a draft is accepted when those before it were, of each row's request.

    What was seen last counts most: a text may go over from prose to quotation. So few drafts say little, and are weighed
    against what is known of all requests, as in an empirical Bayes estimate: without that, bad luck alone soon says that drafts
    do not pay, and dry runs take many steps to find out that they do.

    Args:
        decay: what an observation keeps of its weight when the next comes.
    """

    def __init__(self, max_rows: int, decay: float, prior: Prior) -> None:
        self._decay = decay
        self._others_weight = prior.others_weight
        self._accepted_R = np.zeros(max_rows)
        self._refused_R = np.zeros(max_rows)
        self._all_accepted = prior.guess * prior.guess_weight
        self._all_refused = (1 - prior.guess) * prior.guess_weight

    def start(self, row: int) -> None:
        self._accepted_R[row] = self._refused_R[row] = 0.0

    def observe(self, step: Verified) -> None:
        seen_R = step.offered_R > 0
        rows_R, accepted_R = step.rows_R[seen_R], step.accepted_R[seen_R]
        refused_R = accepted_R < step.offered_R[seen_R]  # the drafts after a refused one say nothing
        self._accepted_R[rows_R] = self._accepted_R[rows_R] * self._decay + accepted_R
        self._refused_R[rows_R] = self._refused_R[rows_R] * self._decay + refused_R
        keep = 1 - (1 - self._decay) / len(self._accepted_R)
        self._all_accepted = self._all_accepted * keep ** len(rows_R) + float(accepted_R.sum())
        self._all_refused = self._all_refused * keep ** len(rows_R) + float(refused_R.sum())

    def __getitem__(self, rows_R: np.ndarray) -> np.ndarray:
        """Of each row, above 0 and below 1."""
        guess = self._all_accepted / (self._all_accepted + self._all_refused)
        accepted_R = self._accepted_R[rows_R] + self._others_weight * guess
        return (accepted_R + 0.01) / (self._accepted_R[rows_R] + self._refused_R[rows_R] + self._others_weight + 0.02)


def depth_of_drafts(num_drafts: int, tree_depth: int) -> np.ndarray:
    """How deep each draft stands, from 1: a chain's one after another; a tree's, whose shape is not known before it is made, as
    if each depth had as many nodes: S.
    """
    places_S = np.arange(num_drafts)
    return 1 + (places_S * tree_depth // num_drafts if tree_depth else places_S)


class Turns:
    """Whose turn it is to be tried dry: each row every so many steps, not all of them in one."""

    def __init__(self) -> None:
        self._num_steps = 0

    def next(self, rows_R: np.ndarray, every: int) -> np.ndarray:
        self._num_steps += 1
        return (rows_R + self._num_steps) % every == 0
