"""Which of several equal matches prompt lookup should take: tokens per step when a text is generated with n-gram drafts.

    python experiments/sampling/ngram_ties.py TOKENIZER_FOLDER FILE...

Each file is read as the output of a model that writes exactly it (its first quarter is the prompt): drafts are accepted as
far as they agree with what follows in the file, and every step gives one more token. No model runs; what is compared is the
rule that picks the match, everything else is the plugin's. Prints a Markdown table.
"""

import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from lab import registry
from lab.api import ProposeView

NUM_DRAFTS = 5
MOST_TOKENS = 6000
RULES = {
    "first": lambda ends, length, count: ends[0],
    "latest": lambda ends, length, count: ends[-1],
    "latest followed by k, else first": None,  # what the plugin does
}


def tokens_per_step(propose, text: np.ndarray) -> float:
    """Tokens put out per step from the first quarter of the text to its end."""
    position, steps = len(text) // 4, 0
    first = position
    while position < len(text):
        draft = propose(text, position)
        agreed = 0
        while agreed < len(draft) and position + agreed < len(text) and draft[agreed] == text[position + agreed]:
            agreed += 1
        position += agreed + 1
        steps += 1
    return (position - first) / steps


def proposer(min_n: int, max_n: int, rule: str):
    """The plugin, or a plain proposer with another rule among equal matches."""
    plugin_class = registry.get("spec", "ngram").load()
    plugin = plugin_class(plugin_class.Options(min_n=min_n, max_n=max_n, num_drafts=NUM_DRAFTS))
    choose = RULES[rule]

    def by_plugin(text: np.ndarray, length: int) -> list[int]:
        view = ProposeView(text[None], np.array([0]), np.array([length]), np.array([NUM_DRAFTS]))
        return plugin.propose(view).token_ids[0]

    def by_rule(text: np.ndarray, length: int) -> list[int]:
        text = text[:length]
        for n in range(max_n, min_n - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
            ends = np.flatnonzero((windows == text[-n:]).all(-1)) + n - 1
            if len(ends):
                first = choose(ends, length, NUM_DRAFTS) + 1
                return text[first : first + NUM_DRAFTS].tolist()
        return []

    return by_plugin if choose is None else by_rule


def main() -> None:
    registry.discover()
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    texts = []
    for name in sys.argv[2:]:
        ids = tokenizer(Path(name).read_text(errors="replace")).input_ids[:MOST_TOKENS]
        texts.append(np.array(ids, np.int32))
    print("| min_n | max_n | " + " | ".join(RULES) + " |\n|---:|---:|" + "---:|" * len(RULES))
    for min_n, max_n in ((1, 1), (1, 3), (2, 3), (2, 4), (3, 5)):
        found = [np.mean([tokens_per_step(proposer(min_n, max_n, rule), text) for text in texts]) for rule in RULES]
        print(f"| {min_n} | {max_n} | " + " | ".join(f"{value:.3f}" for value in found) + " |", flush=True)


if __name__ == "__main__":
    main()
