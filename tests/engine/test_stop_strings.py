"""Stop strings in a growing text, against a search in the whole text."""

import random

import pytest

from lab.engine.stop_strings import StopMatch, StopStrings, partial_match


def grow(text: str, strings: tuple[str, ...], rng: random.Random) -> tuple[str, StopMatch | None, str]:
    """Feed `text` in random pieces. Returns the text as it stands at the match or the end, the match, and what was shown."""
    stop = StopStrings(strings)
    so_far, shown = "", ""
    while len(so_far) < len(text):
        piece = text[len(so_far) : len(so_far) + rng.randint(1, 4)]
        so_far += piece
        match = stop.find(so_far, len(piece))
        if match is not None:
            assert match.start >= len(shown), "a part of the stop string was shown"
            return so_far, match, so_far[: match.start]
        shown = so_far[: len(so_far) - stop.num_held(so_far)]
    return so_far, None, so_far


def naive(text: str, strings: tuple[str, ...]) -> StopMatch | None:
    """By definition: complete first, then longest."""
    for end in range(1, len(text) + 1):
        found = [string for string in strings if text[:end].endswith(string)]
        if found:
            longest = max(found, key=len)
            return StopMatch(longest, end - len(longest), end)
    return None


def test_random_texts_split_at_random_give_the_match_of_the_whole_text():
    rng = random.Random(0)
    num_matches = 0
    for _ in range(5000):
        text = "".join(rng.choices("aab", k=rng.randint(0, 20)))
        strings = tuple({"".join(rng.choices("aab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 3))})
        so_far, match, shown = grow(text, strings, rng)
        assert match == naive(text, strings), (text, strings)
        assert shown == (text if match is None else text[: match.start])
        num_matches += match is not None
    assert 500 < num_matches < 4900


@pytest.mark.parametrize(
    ("text", "string", "length"),
    [
        ("DEFG", "FGH", 2),
        ("DEF", "FGH", 1),
        ("DE", "FGH", 0),
        ("FGH", "FGH", 0),  # complete: not a proper prefix
        ("", "FGH", 0),
        ("aaa", "aab", 2),
        ("abab", "ababc", 4),
        ("xabab", "abac", 2),
        ("x", "x", 0),
    ],
)
def test_what_is_held_back_is_the_longest_beginning_of_the_string(text, string, length):
    assert partial_match(text, string) == length


def test_matches_before_the_new_text_do_not_count():
    assert StopStrings(("F",)).find("DEFG", 1) is None
    assert StopStrings(("FG",)).find("DEFG", 1) == StopMatch("FG", 2, 4)


def test_nothing_is_held_without_stop_strings():
    assert StopStrings(()).num_held("anything") == 0
    assert StopStrings(()).find("anything", 8) is None
