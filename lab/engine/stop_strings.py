"""Stop strings: found in a text while it grows, whatever pieces it grows by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string at text[start:end]."""

    string: str
    start: int
    end: int


class StopStrings:
    """Looks for any of some strings in a growing text.

    The string that is complete first wins, and of those complete at the same character the longest. So the answer depends
    on the text alone and not on how it was split into tokens.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings

    def find(self, text: str, num_new: int) -> StopMatch | None:
        """The first match that ends within the last `num_new` characters of `text`."""
        best: StopMatch | None = None
        for string in self._strings:
            start = text.find(string, max(0, len(text) - num_new - len(string) + 1))
            if start < 0:
                continue
            match = StopMatch(string, start, start + len(string))
            if best is None or (match.end, match.start) < (best.end, best.start):
                best = match
        return best

    def num_held(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string, and must not be shown yet."""
        return max((partial_match(text, string) for string in self._strings), default=0)


def partial_match(text: str, string: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `string`."""
    at = text.find(string[0], max(0, len(text) - len(string) + 1))
    while at >= 0:
        if string.startswith(text[at:]):
            return len(text) - at
        at = text.find(string[0], at + 1)
    return 0
