"""What followed the end of the text most often, in this request and in the outputs of earlier ones.

After Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications" (2024): the longest ends of the
text that occurred before are looked up, what followed them is weighed by how often it did, and the draft that promises the
most accepted tokens is taken; a longer match earns a longer draft. Worth it where outputs resemble each other: agents, code,
templates, the same questions again. Instead of a tree of bounded depth, suffix automata: a token is added in a few
microseconds, the longest match is known without a search, and it may be of any length.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.api import Capabilities, Draft, Proposer, ProposeView, UserError, register

from ._automaton import ROOT, SuffixAutomaton
from ._options import check_whole

MOST_CONTEXTS = 3  # ends of the text that are tried in one automaton, from the longest
LOOK_BACK = 32  # tokens of a new request whose place among earlier outputs is looked for


@dataclass(slots=True)
class _Text:
    """One request: its own automaton, and where its end stands in each generation of past outputs."""

    num_known: int  # tokens that it had when it began: no output of this row
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # generation -> state, matched, tokens read


@register("spec", "suffix")
class Suffix(Proposer):
    """Looks the end of the text up in this request and in past outputs, and proposes what followed most often."""

    capabilities = Capabilities(features={"batch_invariant"})

    @dataclass(frozen=True)
    class Options:
        num_drafts: int = 8  # the most tokens proposed for a row and step
        min_match: int = 2  # a match must agree in at least so many tokens
        per_match: float = 1.5  # drafts for each token that agrees
        min_share: float = 0.3  # drafts go on while all of them together are at least so likely, by what followed before
        max_past: int = 200_000  # tokens of past outputs that are kept, some 200 bytes each; 0: this request's text alone

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        for name, least in (("num_drafts", 1), ("min_match", 1), ("max_past", 0)):
            check_whole(name, getattr(options, name), least)
        if not options.per_match > 0:
            raise UserError(f"spec.per_match must be over 0, got {options.per_match:g}.")
        if not 0 <= options.min_share <= 1:
            raise UserError(f"spec.min_share must be from 0 to 1, got {options.min_share:g}.")
        self.num_drafts = options.num_drafts
        self._texts: dict[int, _Text] = {}
        self._past: dict[int, SuffixAutomaton] = {0: SuffixAutomaton()}  # the last two generations, the older one first

    def start(self, row: int, request: Any) -> None:
        self._texts[row] = _Text(len(request.token_ids))

    def end(self, row: int, tokens: np.ndarray) -> None:
        text = self._texts.pop(row, None)
        output = tokens[text.num_known :].tolist() if text is not None else []
        if len(output) <= self.options.min_match or not self.options.max_past:
            return
        generation, young = next(reversed(self._past.items()))
        if young.num_tokens + len(output) > self.options.max_past // 2:  # two halves: the older one is forgotten at once
            generation, young = generation + 1, SuffixAutomaton()
            self._past = {**dict(list(self._past.items())[-1:]), generation: young}
        young.begin()
        for token in output[: self.options.max_past // 2]:
            young.add(token)

    def propose(self, view: ProposeView) -> Draft:
        counts = np.minimum(view.limits_R, self.num_drafts).tolist()
        rows = zip(view.rows_R.tolist(), view.lengths_R.tolist(), counts, strict=True)
        return Draft([self._continuation(row, view.tokens_RC[row, :length], count) for row, length, count in rows])

    def _continuation(self, row: int, tokens: np.ndarray, count: int) -> list[int]:
        if count < 1:
            return []
        text = self._texts[row]
        add = text.own.add
        for token in tokens[text.own.num_tokens :].tolist():
            add(token)
        found, promise = self._best(text.own, *text.own.context(), count)
        for generation, past in reversed(self._past.items()):
            drafts, its = self._best(past, *self._cursor(text, generation, past, tokens), count)
            if its > promise:
                found, promise = drafts, its
        return found

    def _cursor(self, text: _Text, generation: int, past: SuffixAutomaton, tokens: np.ndarray) -> tuple[int, int]:
        """Where the end of the text stands among the outputs of a generation, and in how many tokens it agrees."""
        state, matched, num_read = text.cursors.get(generation, (ROOT, 0, max(0, len(tokens) - LOOK_BACK)))
        for token in tokens[num_read:].tolist():
            state, matched = past.step(state, matched, token)
        state = past.settled(state, matched)
        text.cursors[generation] = state, matched, len(tokens)
        return state, matched

    def _best(self, automaton: SuffixAutomaton, state: int, matched: int, count: int) -> tuple[list[int], float]:
        """Of the longest matches, the draft that promises the most accepted tokens, and how many it promises."""
        found: list[int] = []
        promise = 0.0
        for _ in range(MOST_CONTEXTS):
            if matched < self.options.min_match:
                break
            drafts, total = self._walk(automaton, state, min(count, int(matched * self.options.per_match) or 1))
            if total > promise:
                found, promise = drafts, total
            state, matched = automaton.shorter(state)
        return found, promise

    def _walk(self, automaton: SuffixAutomaton, state: int, count: int) -> tuple[list[int], float]:
        """The likeliest continuation of a state, and the sum of the probabilities that each of its tokens is right."""
        drafts: list[int] = []
        likely, total = 1.0, 0.0
        while len(drafts) < count:
            token, state, share = automaton.likeliest(state)
            likely *= share
            if token < 0 or likely < self.options.min_share:
                break
            drafts.append(token)
            total += likely
        return drafts, total
