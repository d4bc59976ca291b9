"""Time of one proposal for one row, by proposer and context: CPU time of the thread, medians. Prints a Markdown table.

    python -m experiments.speculation.proposing [--methods ngram suffix] [--contexts 128 1024 8192]

The text has token ids that fall off with their rank, and a passage of 300 tokens that comes again at its end; it grows by a
token from call to call, as in a run. The first call, in which `suffix` reads the prompt, stands apart.
"""

import argparse
import time
from statistics import median

import numpy as np

from experiments.speculation.engines import markdown
from lab import SamplingParams, registry
from lab.api import ProposeView
from lab.types import NewRow

NUM_CALLS, NUM_DRAFTS = 400, 8


def microseconds(method: str, context: int) -> tuple[float, float]:
    """Of the first call, and the median of the others."""
    entry = registry.get("spec", method)
    proposer = entry.load()(entry.options())
    rng = np.random.default_rng(0)
    tokens_1C = (rng.zipf(1.3, context + NUM_CALLS) % 40000).astype(np.int32)[None]
    passage = min(300, context // 4)
    tokens_1C[0, context - passage : context] = tokens_1C[0, :passage]
    prompt = tokens_1C[0, :context].tolist()
    proposer.start(0, NewRow("a", prompt, context, SamplingParams(), 0, frozenset(), [], 0))
    times = []
    for length in range(context, context + NUM_CALLS):
        view = ProposeView(tokens_1C, np.array([0]), np.array([length]), np.array([NUM_DRAFTS]))
        begin = time.thread_time()
        proposer.propose(view)
        times.append((time.thread_time() - begin) * 1e6)
    return times[0], median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    given = parser.parse_args()
    registry.discover()
    rows = []
    for method in given.methods:
        found = [microseconds(method, context) for context in given.contexts]
        rows.append([method, *(f"{later:.0f} us (first {first:,.0f})" for first, later in found)])
    print(markdown(["proposer", *(f"{context:,} tokens" for context in given.contexts)], rows))


if __name__ == "__main__":
    main()
