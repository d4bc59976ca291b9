"""The prompts of the studies: Spec-Bench by its path, copies that are made here, and lab's own set as free text."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.speculation.copies import prompts as copies
from lab.bench.workloads.prompts import DEFAULT_PROMPTS

Prompts = dict[str, list[dict[str, Any]]]  # category -> prompts as LLM.generate takes them


def read_sets(spec_bench: str | None, per_category: int) -> Prompts:
    """So many prompts of each category."""
    found: Prompts = defaultdict(list)
    if spec_bench is not None:
        for line in Path(spec_bench).expanduser().read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            found[data["category"]].append({"messages": [{"role": "user", "content": data["turns"][0]}]})
    for line in copies(3 * per_category):
        found[line["category"]].append({"messages": line["messages"]})
    for line in DEFAULT_PROMPTS.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        found["free text"].append({key: data[key] for key in ("prompt", "messages") if key in data})
    return {category: prompts[:per_category] for category, prompts in found.items()}
