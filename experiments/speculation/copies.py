"""Prompts whose answers copy: edits of code, summaries that quote, extraction. Seeded, so that all see the same ones.

python -m experiments.speculation.copies --num 24 > copies.jsonl     # as a file for `lab run workload.path=copies.jsonl`
"""

import argparse
import json
import random
from typing import Any

NOUNS = [
    "order",
    "invoice",
    "sensor",
    "customer",
    "ticket",
    "route",
    "batch",
    "report",
    "account",
    "shipment",
    "reading",
    "payment",
]
FIELDS = ["total", "weight", "price", "count", "score", "delay", "volume", "rate", "level", "balance"]
VERBS = ["collect", "filter", "update", "merge", "check", "group"]
PEOPLE = ["Anna Miller", "Tom Baker", "Ivana Novak", "Kenji Sato", "Lucia Rossi", "Omar Haddad", "Petra Kral", "Sam Green"]
PLACES = ["Prague", "Osaka", "Lisbon", "Toronto", "Nairobi", "Oslo", "Lima", "Cairo"]
EVENTS = (
    "{who} opened a new workshop in {place} and hired {n} people in the first month",
    "the bridge in {place} was closed for {n} days after inspectors found cracks",
    "{who} said that the harbour of {place} would handle {n} ships a week by autumn",
    "a storm left {n} households in {place} without power until the next morning",
    "the museum of {place} bought {n} paintings from the collection of {who}",
    "{who} won the city race of {place} and finished {n} seconds before the next runner",
)


def prompts(num: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of a workload file: a third each of code edits, quotations and extractions."""
    rng = random.Random(f"copies {seed}")
    makers = (_edit, _quotation, _extraction)
    return [dict(zip(("category", "messages"), makers[i % 3](rng), strict=True)) for i in range(num)]


def _message(category: str, text: str) -> tuple[str, list[dict[str, str]]]:
    return category, [{"role": "user", "content": text}]


def _edit(rng: random.Random) -> tuple[str, list[dict[str, str]]]:
    noun, field, verb = rng.choice(NOUNS), rng.choice(FIELDS), rng.choice(VERBS)
    code = "\n".join(_function(noun, field, f"{verb}_{noun}s_{i}", rng) for i in range(1, 4))
    task = rng.choice(
        [
            f"Rename the variable {noun} to item in this code.",
            "Add a docstring to the first function of this code.",
            f"Rename the function {verb}_{noun}s_2 to {verb}_all in this code.",
        ]
    )
    return _message("copy: code", f"{task} Write out the whole code, and change nothing else.\n\n```python\n{code}```")


def _function(noun: str, field: str, name: str, rng: random.Random) -> str:
    limit = rng.randrange(2, 90)
    return (
        f"def {name}({noun}s, limit={limit}):\n    result = []\n    for {noun} in {noun}s:\n"
        f"        if {noun}['{field}'] > limit:\n            result.append({noun}['{field}'] * {rng.randrange(2, 9)})\n"
        f"    return result\n"
    )


def _report(rng: random.Random, num: int) -> list[str]:
    events = rng.sample(EVENTS, num)
    filled = (e.format(who=rng.choice(PEOPLE), place=rng.choice(PLACES), n=rng.randrange(12, 400)) for e in events)
    return [text[0].upper() + text[1:] + "." for text in filled]


def _quotation(rng: random.Random) -> tuple[str, list[dict[str, str]]]:
    sentences = _report(rng, 5)
    text = " ".join(sentences)
    return _message("copy: quotes", f"Repeat the following report word for word.\n\n{text}")


def _extraction(rng: random.Random) -> tuple[str, list[dict[str, str]]]:
    sentences = _report(rng, 5)
    listed = "\n".join(f"{i}. {sentence}" for i, sentence in enumerate(sentences, 1))
    return _message("copy: lists", f"Copy this list without the last line, and with every sentence in full.\n\n{listed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for line in prompts(given.num, given.seed):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
