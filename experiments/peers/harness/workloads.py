"""The four workloads, from text of our own making: the same token ids for every peer, other ones for every repeat.

No two repeats share a prompt, so that no prefix cache carries anything from one to the next; lengths are the same in all.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.protocol import Request

Encode = Callable[[str], list[int]]

SUBJECTS = (
    *("The harbour office", "Our night train", "A retired engineer", "The river survey", "Every second Tuesday the baker"),
    *("The old observatory", "Her first notebook", "The village council", "A small repair shop", "The museum's curator"),
    *("Nobody in the valley", "The weather station", "My neighbour's orchard", "The lighthouse crew", "A travelling printer"),
)
VERBS = (
    *("kept a careful record of", "argued at length about", "rebuilt without any help", "sold, for very little money,"),
    *("described in plain words", "had long forgotten", "measured again and again", "promised to look after", "painted"),
    *("compared with last year's notes", "carried across the bridge", "asked three friends about", "quietly replaced"),
)
OBJECTS = (
    *("the broken tide gauge", "a map of the northern hills", "forty crates of pears", "the cost of a new roof", "the bell"),
    *("seven letters from abroad", "the shape of the coastline", "a clock that ran backwards", "the school's only piano"),
    *("the rules for lending tools", "an engine from 1931", "the height of the spring flood", "a recipe for rye bread"),
)
ENDINGS = (
    *("because the winter had been mild.", "and nothing came of it for years.", "while the ferry waited.", "before noon."),
    *("although the figures did not agree.", "so that others could check the result.", "in spite of the rain.", "twice."),
    *("as the newspaper reported on page {n}.", "for {n} crowns and a handshake.", "until {n} people had signed.", "at last."),
)
SHARED_PREFIX = 1024  # tokens of w4
OPENINGS = (
    "Report {n}: ",
    "Dear reader number {n}, ",
    "Chapter {n}. ",
    "Notes, page {n}. ",
    "Minutes of meeting {n}. ",
    "Day {n}. ",
)


@dataclass(frozen=True)
class Workload:
    """What is measured, and how it is told."""

    name: str
    title: str
    make: Callable[["Texts"], list[Request]]


class Texts:
    """A stream of token ids of readable English. The same seed gives the same ids under the same tokenizer."""

    def __init__(self, seed: str, encode: Encode) -> None:
        self._chooser = random.Random(seed)
        self._encode = encode

    def ids(self, count: int) -> list[int]:
        """So many token ids of a new text, whose first words differ from all others'."""
        text = self._choose(OPENINGS)
        found: list[int] = []
        while len(found) < count:
            text += " ".join(self._sentence() for _ in range(max(2, count // 12)))
            found = self._encode(text)
            text += " "
        return found[:count]

    def _sentence(self) -> str:
        return " ".join(self._choose(words) for words in (SUBJECTS, VERBS, OBJECTS, ENDINGS))

    def _choose(self, words: tuple[str, ...]) -> str:
        return self._chooser.choice(words).format(n=self._chooser.randrange(100, 1_000_000))


def one_stream(texts: Texts) -> list[Request]:
    return [Request(texts.ids(128), 128)]


def many_at_once(texts: Texts) -> list[Request]:
    lengths = random.Random("lengths of w2")
    sizes = [(lengths.randint(16, 256), lengths.randint(16, 128)) for _ in range(64)]
    return [Request(texts.ids(num_prompt), num_output) for num_prompt, num_output in sizes]


def long_prompt(texts: Texts) -> list[Request]:
    return [Request(texts.ids(2048), 1)]


def shared_prefix(texts: Texts) -> list[Request]:
    prefix = texts.ids(SHARED_PREFIX)
    return [Request(prefix + texts.ids(32), 16) for _ in range(32)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", "one stream, 128 tokens in, 128 out", one_stream),
        Workload("w2", "64 requests at once, 16-256 tokens in, 16-128 out", many_at_once),
        Workload("w3", "one prompt of 2,048 tokens, prefill", long_prompt),
        Workload("w4", "32 requests at once that share 1,024 tokens, 32 own, 16 out", shared_prefix),
    )
}
MAX_LEN = 4096
MAX_SEQS = 64


def requests_of(name: str, repeat: int, encode: Encode) -> list[Request]:
    """The requests of one repeat of a workload."""
    return WORKLOADS[name].make(Texts(f"{name} repeat {repeat}", encode))


def warm_up_of(name: str, encode: Encode) -> list[Request]:
    """A small run of the same kind, with prompts that no repeat has: the shapes are met, little time is spent."""
    requests = WORKLOADS[name].make(Texts(f"{name} warm-up", encode))
    if name == "w4":
        requests = requests[:4]
    return [replace(request, num_output=min(request.num_output, 8)) for request in requests]
