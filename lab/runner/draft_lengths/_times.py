"""How long steps of so many tokens take, as they are measured."""

import math

import numpy as np

FIRST_FEW = 3  # measurements of a size of which the least counts: the very first may include what is done once
WEIGHT = 0.2  # of a measurement, later
EXACT = 16  # tokens up to which each size is measured on its own; above, sizes within 12% share a place
RATIO = 1.12


class StepTimes:
    """Time of a decode step by its number of tokens, kept for `lasting` steps.

    What is not known is taken from the sizes around it, on a line between them; above the largest known one time stands
    still, so that a size that was not tried looks good and is tried.
    """

    def __init__(self, lasting: int) -> None:
        self._lasting = lasting
        self._now = 0
        self._known: dict[int, list[float]] = {}  # place -> [tokens, ms, measurements, when]

    def add(self, num_tokens: int, ms: float) -> None:
        self._now += 1
        place = _place(num_tokens)
        tokens, mean, count, when = self._known.get(place, (num_tokens, ms, 0, self._now))
        if self._now - when > self._lasting:
            mean, count = ms, 0
        if count < FIRST_FEW:
            mean = min(mean, ms)
        else:
            mean += WEIGHT * (min(max(ms, mean / 2), mean * 1.5) - mean)
        self._known[place] = [tokens + WEIGHT * (num_tokens - tokens), mean, count + 1, self._now]

    def knows(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens was measured lately."""
        found = self._known.get(_place(num_tokens))
        return found is not None and self._now - found[3] <= self._lasting

    def of(self, tokens_X: np.ndarray) -> np.ndarray:
        """The time of steps of so many tokens, in ms; never less for more tokens. Something must be known."""
        lately = sorted(entry[:2] for entry in self._known.values() if self._now - entry[3] <= self._lasting)
        sizes, times = np.array(lately).T
        return np.interp(tokens_X, sizes, np.maximum.accumulate(times))


def _place(num_tokens: int) -> int:
    if num_tokens <= EXACT:
        return num_tokens
    return EXACT + round(math.log(num_tokens / EXACT) / math.log(RATIO))
