"""What a step with drafts takes by the shape of the tree, in plain steps: to choose the default shape by.

    python -m experiments.spec_methods.shapes [--shapes 12x2 15x4 ...] [--max-tokens 64]

One request at a time, greedy, all drafts verified; on every prompt all shapes take turns in one process. A shape is its nodes
and its depth. The default one is DEFAULT_NODES and DEFAULT_DEPTH in plugins/spec_decode/_eagle_tree.py.
"""

import argparse
from collections import defaultdict
from statistics import mean, median
from typing import Any

from experiments.speculation.engines import engines, markdown
from lab import SamplingParams

PROMPTS = (
    "Explain in a few sentences how a bicycle stays upright when it moves.",
    "Write a short story about a ship that sails to an unknown island.",
    "A train leaves at nine and travels 120 miles at 40 miles an hour. When does it arrive? Think step by step.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["12x2", "12x3", "15x3", "15x4"], help="NODESxDEPTH")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--override", nargs="*", default=[], help="settings of all engines")
    given = parser.parse_args()
    methods = {"none": "none", **{method_of(shape): shape for shape in given.shapes}}
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    params = SamplingParams(temperature=0.0, max_tokens=given.max_tokens, ignore_eos=True)
    with engines(list(methods), ["draft_length=fixed", *given.override], given.model) as found:
        for llm in found.values():
            llm.generate(PROMPTS[0], params)
        for name, llm in found.items():
            llm.engine.on_step = steps[name].append
        for prompt in PROMPTS:
            for llm in found.values():
                llm.generate(prompt, params)
    print(markdown(["nodes x depth", "a step", "in plain ones", "of it drafting", "tokens/step"], rows_of(methods, steps)))


def method_of(shape: str) -> str:
    nodes, depth = shape.split("x")
    return f"eagle:spec.tree=dynamic;spec.num_drafts={nodes};spec.depth={depth}"


def rows_of(methods: dict[str, str], steps: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """A row for each method, of the steps that verified what it drafts."""
    rows, plain_ms = [], 0.0
    for name, shape in methods.items():
        some = [step for step in steps[name] if step["num_drafts"] or (name == "none" and step["num_tokens"] == 1)]
        ms = median(step["ms"] for step in some)
        plain_ms = plain_ms or ms
        drafting_ms, tokens = median(step["draft_ms"] for step in some), mean(1 + step["num_accepted"] for step in some)
        rows.append([shape, f"{ms:.2f} ms", f"{ms / plain_ms:.2f}", f"{drafting_ms:.2f} ms", f"{tokens:.2f}"])
    return rows


if __name__ == "__main__":
    main()
