"""As many drafts as make the most tokens per second, from what is measured: acceptance, and the time of steps by their size.

A step's time hardly depends on its tokens while it waits for the weights, and grows with them once it computes: beyond that
batch size drafts that may be refused take time from tokens that are sure. The goodput of a step, expected tokens over its
time, is what Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (2024), maximise;
here by rows: each draft of a row is worth its probability of being accepted with those before it, the best are taken one by
one, and their number is the one with the greatest goodput.
"""

import math
from dataclasses import dataclass

import numpy as np

from lab.api import Capabilities, DraftLength, UserError, Verified, register
from lab.runner.draft_lengths._rates import AcceptanceRates, Prior, Turns, depth_of_drafts
from lab.runner.draft_lengths._times import WEIGHT, StepTimes

# What is believed of acceptance before much was seen. Of a run's first requests: 0.7, as much as 5 drafts count for; of each
# later one: the rate of all requests, as much as 10 do. What was seen fades by `decay` a step, so it never counts for more than
# 20 steps. Once drafts are off, only the few dry runs tell that they would pay: with weaker beliefs two refusals at a request's
# start turned drafts off for a hundred steps. In simulations by batch the stronger ones took the speed, in times that without
# drafts, from 1.29 to 1.31, from 1.17 to 1.22 and from 1.06 to 1.07.
SLOW_TO_DOUBT = Prior(guess=0.7, guess_weight=5.0, others_weight=10.0)


@register("draft_length", "batch")
class ByBatch(DraftLength):
    """As many as pay at the batch's size: by each request's acceptance and the measured time of steps; none where none do."""

    capabilities = Capabilities(priority=1)

    @dataclass(frozen=True)
    class Options:
        margin: float = 0.03  # gain in tokens per second from which drafts are verified at all
        decay: float = 0.95  # what a step's outcome keeps of its weight when the next comes
        dry_share: float = 0.01  # of a step's time, for drafts that are proposed only to be compared with what comes
        lasting: int = 256  # steps after which the time of a size is measured anew

    def __init__(self, options: Options, num_drafts: int, max_rows: int) -> None:
        super().__init__(options, num_drafts, max_rows)
        if not 0 < options.decay < 1:
            raise UserError(f"draft_length.decay must be between 0 and 1; got {options.decay:g}.")
        if not options.margin >= 0:
            raise UserError(f"draft_length.margin must be 0 or more; got {options.margin:g}.")
        if not options.dry_share > 0:
            raise UserError(f"draft_length.dry_share must be over 0; got {options.dry_share:g}.")
        if options.lasting < 1:
            raise UserError(f"draft_length.lasting must be a whole number from 1; got {options.lasting}.")
        self._rates = AcceptanceRates(max_rows, options.decay, SLOW_TO_DOUBT)
        self._turns = Turns()
        self._times = StepTimes(options.lasting)
        self._draft_ms = 0.0  # of proposing for one row

    def start(self, row: int) -> None:
        self._rates.start(row)

    def observe(self, step: Verified) -> None:
        self._rates.observe(step)
        if step.is_decode:
            self._times.add(step.num_tokens, step.ms)
        if step.num_asked:
            self._draft_ms += WEIGHT * (step.draft_ms / step.num_asked - self._draft_ms)

    def lengths(self, rows_R: np.ndarray) -> np.ndarray:
        num_rows = len(rows_R)
        if not self._times.knows(num_rows):
            return np.zeros(num_rows, np.int64)  # this step shall tell what one without drafts takes
        depth_S = depth_of_drafts(self.num_drafts, self.tree_depth)
        width = self.num_drafts / self.tree_depth if self.tree_depth else 1.0  # drafts of a depth, of which one is accepted
        worth_RS = self._rates[rows_R][:, None] ** depth_S / width
        order_X = np.argsort(-worth_RS, axis=None, kind="stable")
        tokens_X = num_rows + np.concatenate([[0.0], worth_RS.ravel()[order_X].cumsum()])
        asked_X = np.concatenate([[0], (order_X % self.num_drafts == 0).cumsum()])  # rows whose first draft is among them
        ms_X = self._times.of(num_rows + np.arange(len(tokens_X))) + self._draft_ms * asked_X
        goodput_X = tokens_X / ms_X
        best = int(goodput_X.argmax())
        if goodput_X[best] < goodput_X[0] * (1 + self.options.margin):
            best = 0
        elif best > 1 and not self._times.knows(num_rows + best // 2):
            best //= 2  # between the sizes that are known the time is a guess: tell what half as many drafts take
        return np.bincount(order_X[:best] // self.num_drafts, minlength=num_rows)

    def dry_runs(self, rows_R: np.ndarray) -> np.ndarray:
        num_rows = len(rows_R)
        step_ms = self._times.of(np.array([num_rows]))[0] if self._times.knows(num_rows) else np.inf
        every = math.ceil(num_rows * self._draft_ms / (self.options.dry_share * step_ms))
        return self._turns.next(rows_R, max(every, 1))
