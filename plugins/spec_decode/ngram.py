"""Prompt lookup: what followed the last tokens when they stood in the text before is proposed to follow them again.

Idea of Saxena, "Prompt Lookup Decoding" (2023): no draft model, worth it where output repeats its input (code edits,
summaries, extraction) or itself.

Which match is taken: the one that agrees with the most tokens at the end of the text, from max_n down to min_n. Among equals,
the latest that is followed by as many tokens as are asked for, because what was said last is the better guide; if none is,
the first, because it is followed by the most tokens. Plain "latest" would propose a single period of a text that repeats
itself with a short period, however many tokens are asked for.
"""

from dataclasses import dataclass

import numpy as np

from lab.api import Capabilities, Draft, Proposer, ProposeView, UserError, register

from ._options import check_whole


@register("spec", "ngram")
class Ngram(Proposer):
    """Looks the last tokens up in the text before them and proposes what followed there."""

    capabilities = Capabilities(features={"batch_invariant"})

    @dataclass(frozen=True)
    class Options:
        min_n: int = 2  # a match must agree in at least so many tokens
        max_n: int = 4  # agreement beyond so many tokens does not count
        num_drafts: int = 5  # the most tokens proposed for a row and step

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        for name in ("min_n", "max_n", "num_drafts"):
            check_whole(name, getattr(options, name))
        if options.min_n > options.max_n:
            raise UserError(f"spec.min_n {options.min_n} is more than spec.max_n {options.max_n}.")
        self.num_drafts = options.num_drafts

    def propose(self, view: ProposeView) -> Draft:
        counts = np.minimum(view.limits_R, self.num_drafts).tolist()
        rows = zip(view.rows_R.tolist(), view.lengths_R.tolist(), counts, strict=True)
        return Draft([self._continuation(view.tokens_RC[row, :length], count) for row, length, count in rows])

    def _continuation(self, text: np.ndarray, count: int) -> list[int]:
        """At most `count` tokens that followed the end of `text` where it stood before; never past the end of the text."""
        length = len(text)
        if count < 1 or length <= self.options.min_n:
            return []
        # Places of the last token, the last one itself excluded: so no match is the end of the text itself, and each is
        # followed by a token at least. Then only those that agree one token further back, for as long as there are any.
        ends = np.flatnonzero(text[:-1] == text[-1])
        agreed = 1
        while len(ends) and agreed < self.options.max_n:
            longer = ends[ends >= agreed]
            longer = longer[text[longer - agreed] == text[length - 1 - agreed]]
            if not len(longer):
                break
            ends, agreed = longer, agreed + 1
        if not len(ends) or agreed < self.options.min_n:
            return []
        full = np.searchsorted(ends, length - 1 - count, side="right")  # so many matches are followed by `count` tokens
        first = int(ends[full - 1] if full else ends[0]) + 1
        return text[first : first + count].tolist()
