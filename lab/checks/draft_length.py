"""Contract checks of draft lengths: numbers that can be used, whatever is observed."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from lab.checks import CheckFailed
from lab.contracts.draft_length import DraftLength, Verified
from lab.registry import Entry

NUM_DRAFTS, MAX_ROWS, NUM_STEPS = 5, 12, 60


def check_lengths(entry: Entry, options: Any) -> None:
    """Each row gets a whole number of drafts from 0 to the proposer's, be it one or several, whatever rows a step has."""
    for num_drafts in (1, NUM_DRAFTS):
        for acceptance in (0.0, 0.5, 1.0):
            for lengths_R, _, rows_R in _run(entry, options, num_drafts, acceptance):
                if not isinstance(lengths_R, np.ndarray) or lengths_R.shape != rows_R.shape:
                    raise CheckFailed(f"lengths gave {lengths_R!r} for {len(rows_R)} rows; it must be an array of one each")
                if lengths_R.dtype != np.int64:
                    raise CheckFailed(f"lengths gave {lengths_R.dtype}, not int64")
                if ((lengths_R < 0) | (lengths_R > num_drafts)).any():
                    raise CheckFailed(f"lengths gave {lengths_R.tolist()}; a proposer of {num_drafts} makes 0 to {num_drafts}")


def check_dry_runs(entry: Entry, options: Any) -> None:
    """Dry runs are None, or a truth value for each row."""
    for _, dry_R, rows_R in _run(entry, options, NUM_DRAFTS, 0.0):
        if dry_R is not None and not (isinstance(dry_R, np.ndarray) and dry_R.shape == rows_R.shape and dry_R.dtype == bool):
            raise CheckFailed(f"dry_runs gave {dry_R!r} for {len(rows_R)} rows; it must be None, or an array of one bool each")


def check_same_again(entry: Entry, options: Any) -> None:
    """What is observed decides alone: two of the same options that see the same steps give the same lengths."""
    first, second = (list(_run(entry, options, NUM_DRAFTS, 0.6)) for _ in range(2))
    for (lengths_R, _, _), (again_R, _, rows_R) in zip(first, second, strict=True):
        if not np.array_equal(lengths_R, again_R):
            raise CheckFailed(f"rows {rows_R.tolist()} got {lengths_R.tolist()} and the second time {again_R.tolist()}")


def check_arrays_are_left_alone(entry: Entry, options: Any) -> None:
    """The rows that it is asked about, and what it is told of a step, are not written to."""
    length = _make(entry, options, NUM_DRAFTS)
    rows_R, told = np.array([3, 0, 7]), _verified(np.array([3, 0, 7]), np.array([2, 0, 5]), np.array([1, 0, 5]), 1.0)
    before = [rows_R.copy(), told.rows_R.copy(), told.offered_R.copy(), told.accepted_R.copy()]
    for row in rows_R.tolist():
        length.start(row)
    length.observe(told)
    length.lengths(rows_R)
    length.dry_runs(rows_R)
    if not all(map(np.array_equal, before, (rows_R, told.rows_R, told.offered_R, told.accepted_R))):
        raise CheckFailed("it wrote to an array that it was given; copy what you change")


def _run(entry: Entry, options: Any, num_drafts: int, acceptance: float) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Steps of changing rows whose drafts are accepted so often: what it said before each, and the rows."""
    rng = np.random.default_rng(9)
    length = _make(entry, options, num_drafts)
    for row in range(MAX_ROWS):
        length.start(row)
    for number in range(NUM_STEPS):
        rows_R = rng.permutation(MAX_ROWS)[: 1 + number % MAX_ROWS]
        if number % 7 == 0:
            length.start(int(rows_R[0]))
        lengths_R, dry_R = length.lengths(rows_R), length.dry_runs(rows_R)
        yield lengths_R, dry_R, rows_R
        offered_R = np.minimum(lengths_R, rng.integers(0, num_drafts + 1, len(rows_R)))
        accepted_R = np.minimum(rng.geometric(1 - acceptance, len(rows_R)) - 1 if acceptance < 1 else offered_R, offered_R)
        length.observe(_verified(rows_R, offered_R, accepted_R, 1.0 + 0.1 * float(offered_R.sum())))


def _verified(rows_R: np.ndarray, offered_R: np.ndarray, accepted_R: np.ndarray, ms: float) -> Verified:
    num_tokens = len(rows_R) + int(offered_R.sum())
    return Verified(rows_R, offered_R, accepted_R, num_tokens, ms, True, len(rows_R), 0.01 * len(rows_R))


def _make(entry: Entry, options: Any, num_drafts: int) -> DraftLength:
    return entry.load()(options, num_drafts, MAX_ROWS)
