"""A proposer driven by hand: rows that begin, are asked for drafts, and end."""

import numpy as np

from lab import SamplingParams, registry
from lab.api import ProposeView
from lab.types import NewRow

PAST_THE_END = 10**6


def make(name, **options):
    registry.discover()
    entry = registry.get("spec", name)
    return entry.load()(entry.make_options(options))


class Rig:
    """Rows of a proposer, as the runner has them."""

    def __init__(self, proposer, num_rows=3, capacity=400):
        self.proposer = proposer
        self.tokens_RC = np.full((num_rows, capacity), PAST_THE_END, np.int32)
        self.length = {}

    def start(self, row, prompt, output=(), request_id="a", **params):
        tokens = [*prompt, *output]
        self.tokens_RC[row] = PAST_THE_END
        self.tokens_RC[row, : len(tokens)] = tokens
        self.length[row] = len(tokens)
        new = NewRow(request_id, tokens, len(prompt), SamplingParams(**params), 0, frozenset(), [], 0)
        self.proposer.start(row, new)

    def add(self, row, *tokens):
        length = self.length[row]
        self.tokens_RC[row, length : length + len(tokens)] = tokens
        self.length[row] = length + len(tokens)

    def end(self, row):
        self.proposer.end(row, self.tokens_RC[row, : self.length.pop(row)])

    def propose(self, row, limit=64):
        view = ProposeView(self.tokens_RC, np.array([row]), np.array([self.length[row]]), np.array([limit]))
        return self.proposer.propose(view).token_ids[0]
