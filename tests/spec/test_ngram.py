"""The prompt-lookup proposer: its table of edges, a brute-force model, its options."""

import numpy as np
import pytest

from lab import registry
from lab.api import ProposeView, UserError

registry.discover()
Ngram = registry.get("spec", "ngram").load()
PAST_THE_END = 10**6


def propose(text, min_n, max_n, count, limit=64):
    proposer = Ngram(Ngram.Options(min_n=min_n, max_n=max_n, num_drafts=count))
    tokens_RC = np.full((3, len(text) + 16), PAST_THE_END, np.int32)
    tokens_RC[1, : len(text)] = text
    view = ProposeView(tokens_RC, np.array([1]), np.array([len(text)]), np.array([limit]))
    return proposer.propose(view).token_ids[0]


@pytest.mark.parametrize(
    ("text", "min_n", "max_n", "count", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 1, 3, 3, [4, 1, 2]),
        ([5, 5, 5, 5], 2, 2, 3, [5, 5]),  # never longer than the tokens that exist
        ([1, 2, 3], 2, 3, 3, []),  # no match
        ([9], 1, 3, 3, []),  # the end does not match itself
        ([9, 9], 1, 3, 3, [9]),
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 2, 1, [8]),  # among equals the latest
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, 2, 5, [7, 1, 2, 8, 1]),  # that is followed by as many as are asked for
        ([3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 1, 4, 2, [7, 9]),  # three tokens agree: more than in the later match of two
        ([3, 1, 2, 7, 9, 1, 2, 8, 3, 1, 2], 1, 2, 2, [8, 3]),  # agreement beyond max_n does not count
        ([4, 6, 1, 5, 6], 2, 3, 3, []),  # one token agrees, two are asked for
        ([4, 6, 1, 5, 6], 1, 3, 3, [1, 5, 6]),
        ([8, 1, 8, 1, 8, 1, 8], 1, 3, 4, [1, 8, 1, 8]),  # a short period is unrolled to the full number
    ],
)
def test_table(text, min_n, max_n, count, wanted):
    assert propose(text, min_n, max_n, count) == wanted


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_limit_of_the_row_cuts(limit):
    assert propose([1, 2, 3, 4, 1, 2, 3], 1, 3, 3, limit) == [4, 1, 2][:limit]


def brute_force(text, min_n, max_n, count):
    for n in range(max_n, min_n - 1, -1):
        starts = [i for i in range(len(text) - n) if text[i : i + n] == text[len(text) - n :]] if n < len(text) else []
        if starts:
            full = [i for i in starts if i + n + count <= len(text)]
            first = (full[-1] if full else starts[0]) + n
            return text[first : first + count]
    return []


def test_same_as_brute_force_on_random_texts():
    rng = np.random.default_rng(11)
    found = 0
    for _ in range(3000):
        text = rng.integers(0, rng.integers(1, 6), rng.integers(1, 40)).tolist()
        min_n = int(rng.integers(1, 4))
        max_n = int(rng.integers(min_n, 6))
        count, limit = int(rng.integers(1, 7)), int(rng.integers(0, 9))
        wanted = brute_force(text, min_n, max_n, min(count, limit)) if limit else []
        assert propose(text, min_n, max_n, count, limit) == wanted, (text, min_n, max_n, count, limit)
        found += bool(wanted)
    assert found > 1000


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"min_n": 0}, "min_n"),
        ({"max_n": -1, "min_n": 1}, "max_n"),
        ({"num_drafts": 0}, "num_drafts"),
        ({"min_n": 5}, "min_n 5"),
    ],
)
def test_bad_options_are_refused_by_name(options, named):
    with pytest.raises(UserError, match=named):
        Ngram(Ngram.Options(**options))
