"""The suffix proposer: its automaton against brute force, what it takes from this text and from earlier ones, its options."""

from collections import Counter

import numpy as np
import pytest

from lab.api import UserError
from tests.spec.proposing import Rig, make


def automaton():
    make("suffix")
    from plugins.spec_decode._automaton import SuffixAutomaton

    return SuffixAutomaton()


def followers(texts, end):
    """What followed `end` in the texts, by brute force."""
    n = len(end)
    return Counter(text[i + n] for text in texts for i in range(len(text) - n) if text[i : i + n] == end)


def test_the_longest_earlier_end_and_what_followed_it_on_random_texts():
    rng = np.random.default_rng(3)
    matches = 0
    for _ in range(300):
        text = rng.integers(0, rng.integers(1, 5), rng.integers(1, 15)).tolist()
        found = automaton()
        for i in range(len(text)):
            found.add(text[i])
            seen = text[: i + 1]
            longest = max((n for n in range(1, i + 1) if followers([seen], seen[-n:])), default=0)
            state, matched = found.context()
            assert matched == longest, seen
            if longest:
                wanted = followers([seen], seen[-longest:])
                token, _, share = found.likeliest(state)
                assert wanted[token] == max(wanted.values()) and share == pytest.approx(wanted[token] / wanted.total()), seen
                matches += 1
    assert matches > 1000


def test_a_cursor_finds_its_way_through_several_texts_as_they_are_added():
    """The longest end of a query that stands in any of the texts, although states split under the cursor."""
    rng = np.random.default_rng(4)
    found_any = 0
    for _ in range(200):
        known, texts = automaton(), []
        query = rng.integers(0, 3, 12).tolist()
        cursor, read = (0, 0), 0
        for _ in range(4):
            text = rng.integers(0, 3, rng.integers(1, 9)).tolist()
            texts.append(text)
            known.begin()
            for token in text:
                known.add(token)
            for token in query[read : read + 3]:
                before = query[:read]
                cursor = known.step(*cursor, token)
                read += 1
                ends = [query[read - n : read] for n in range(1, read + 1)]
                inside = [end for end in ends if any(end == t[i : i + len(end)] for t in texts for i in range(len(t)))]
                longest = max(map(len, inside), default=0)
                # texts added after a token was read are found from the next token on: never more than there is, never false
                assert cursor[1] <= longest, (texts, before, token)
                if cursor[1]:
                    state = known.settled(*cursor)
                    end = query[read - cursor[1] : read]
                    wanted = followers(texts, end)
                    token_id, _, share = known.likeliest(state)
                    assert (token_id < 0) == (not wanted)
                    if wanted:
                        assert wanted[token_id] == max(wanted.values()), (texts, end)
                        assert share == pytest.approx(wanted[token_id] / wanted.total())
                        found_any += 1
    assert found_any > 200


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {"per_match": 1.0}, [4, 1, 2]),  # as many drafts as tokens agree
        ([1, 2, 3, 4, 1, 2, 3], {"per_match": 9.0}, [4, 1, 2, 3]),  # no longer than what is there
        ([1, 2, 3, 4, 1, 2, 3], {"num_drafts": 2}, [4, 1]),
        ([1, 2, 3], {}, []),
        ([9], {"min_match": 1}, []),
        ([9, 9], {"min_match": 1}, [9]),
        ([4, 6, 1, 5, 6], {"min_match": 2}, []),  # one token agrees, two are asked for
        ([4, 6, 1, 5, 6], {"min_match": 1, "per_match": 3.0}, [1, 5, 6]),
        # what followed more often, although something else followed last
        ([1, 2, 7, 5, 1, 2, 7, 6, 1, 2, 8, 4, 1, 2], {"per_match": 0.5}, [7]),
        # nothing is likely enough
        ([1, 2, 7, 5, 1, 2, 8, 6, 1, 2, 9, 4, 1, 2], {"min_share": 0.5}, []),
    ],
)
def test_table(text, options, wanted):
    rig = Rig(make("suffix", **options))
    rig.start(0, text)
    assert rig.propose(0) == wanted
    assert rig.propose(0, limit=1) == wanted[:1] and rig.propose(0, limit=0) == []


def test_a_text_that_grows_is_read_on():
    rig = Rig(make("suffix", min_match=2, per_match=2.0))
    rig.start(1, [1, 2, 3, 4, 5])
    assert rig.propose(1) == []
    rig.add(1, 1, 2)
    assert rig.propose(1, limit=0) == []  # not asked for: it is read later
    assert rig.propose(1) == [3, 4, 5, 1]
    rig.add(1, 3, 9)
    assert rig.propose(1) == []


def test_past_outputs_are_proposed_to_others_and_prompts_are_not():
    rig = Rig(make("suffix", min_match=2, per_match=2.0))
    rig.start(0, [50, 51, 52, 53], [])
    rig.add(0, 60, 61, 62, 63, 64)
    rig.start(1, [1, 60, 61])
    assert rig.propose(1) == []  # the first request has not ended
    rig.end(0)
    assert rig.propose(1) == []  # the end was read before: it is found from the next token on
    rig.add(1, 62)
    assert rig.propose(1) == []  # one token agrees
    rig.add(1, 63)
    assert rig.propose(1) == [64]
    rig.start(2, [1, 60, 61])
    assert rig.propose(2) == [62, 63, 64]
    rig.end(2)
    rig.start(2, [7, 50, 51])
    assert rig.propose(2) == []  # that stood in a prompt


def test_a_resumed_request_teaches_only_what_is_new():
    rig = Rig(make("suffix", min_match=2, per_match=2.0))
    rig.start(0, [5], output=[60, 61, 62, 63])
    rig.add(0, 70, 71, 72, 73)
    rig.end(0)
    rig.start(1, [9, 60, 61])
    assert rig.propose(1) == []
    rig.start(1, [9, 70, 71])
    assert rig.propose(1) == [72, 73]


def test_past_outputs_are_bounded_and_the_oldest_go_first():
    proposer = make("suffix", max_past=40)
    rig = Rig(proposer)
    for number in range(10):
        rig.start(0, [0])
        rig.add(0, *range(100 * number, 100 * number + 10))
        rig.end(0)
        assert sum(past.num_tokens for past in proposer._past.values()) <= 40
    rig.start(0, [901, 902, 903])
    assert rig.propose(0) == [904, 905, 906, 907]
    rig.start(1, [101, 102, 103])
    assert rig.propose(1) == []
    none = Rig(make("suffix", max_past=0))
    none.start(0, [0])
    none.add(0, 1, 2, 3, 4, 5)
    none.end(0)
    none.start(0, [1, 2, 3])
    assert none.propose(0) == []


@pytest.mark.parametrize("name", ["num_drafts", "min_match", "max_past", "per_match", "min_share"])
def test_bad_options_are_refused_by_name(name):
    with pytest.raises(UserError, match=rf"spec\.{name}"):
        make("suffix", **{name: -1})
