"""Drafts for as long as they are likely enough to be accepted."""

from dataclasses import dataclass

import numpy as np

from lab.api import Capabilities, DraftLength, UserError, Verified, register
from lab.runner.draft_lengths._rates import AcceptanceRates, Prior, Turns, depth_of_drafts


@register("draft_length", "acceptance")
class ByAcceptance(DraftLength):
    """Each request gets as many as its own acceptance makes worth verifying; it depends on no clock."""

    capabilities = Capabilities()

    @dataclass(frozen=True)
    class Options:
        min_gain: float = 0.25  # a draft is verified when it is accepted, with those before it, at least so often
        decay: float = 0.9  # what a step's outcome keeps of its weight when the next comes
        try_every: int = 2  # a request that gets none has one compared with what comes every so many steps

    def __init__(self, options: Options, num_drafts: int, max_rows: int) -> None:
        super().__init__(options, num_drafts, max_rows)
        if not 0 < options.decay < 1:
            raise UserError(f"draft_length.decay must be between 0 and 1; got {options.decay:g}.")
        if not 0 < options.min_gain < 1:
            raise UserError(f"draft_length.min_gain must be between 0 and 1; got {options.min_gain:g}.")
        if options.try_every < 1:
            raise UserError(f"draft_length.try_every must be a whole number from 1; got {options.try_every}.")
        self._rates = AcceptanceRates(max_rows, options.decay, Prior(guess=0.8, guess_weight=1.0, others_weight=4.0))
        self._turns = Turns()

    def start(self, row: int) -> None:
        self._rates.start(row)

    def observe(self, step: Verified) -> None:
        self._rates.observe(step)

    def lengths(self, rows_R: np.ndarray) -> np.ndarray:
        # a draft at depth i, from 1, is accepted with probability rate ** i
        most_R = np.floor(np.log(self.options.min_gain) / np.log(self._rates[rows_R]))
        return np.searchsorted(depth_of_drafts(self.num_drafts, self.tree_depth), most_R, side="right").astype(np.int64)

    def dry_runs(self, rows_R: np.ndarray) -> np.ndarray:
        return self._turns.next(rows_R, self.options.try_every)
