"""What drafts came to, in the words of the summary. Torch-free."""

from collections.abc import Mapping
from typing import Any

CATEGORY_HEADER = ("category", "requests", "tokens/step", "ms/token", "accepted", "by position")


def spec_rows(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary's lines about drafts, name and value."""
    rows = [("drafts", f"{spec['acceptance_rate']:.1%} accepted, {spec['mean_accepted_length']:.2f} tokens per verification")]
    rows.append(("by position", _by_position(spec)))
    if "verify_ms_share" in spec:
        shares = f"proposing {spec['draft_ms_share']:.1%} of the time, steps that verify {spec['verify_ms_share']:.1%}"
        rows.append(("drafting", shares))
    if speedup := spec.get("speedup"):
        rows.append(
            (
                "speed-up",
                f"{speedup['measured']:.2f} measured, {speedup['expected']:.2f} expected of alpha {spec['alpha']:.2f}, "
                f"gamma {spec['gamma']:.1f}; a step with drafts takes {speedup['verify_cost']:.2f} plain steps "
                f"(there were {speedup['num_plain_steps']}), its drafts {speedup['draft_cost']:.2f}",
            )
        )
    elif "num_plain_steps" in spec:
        rows.append(("speed-up", f"unknown: {_too_few(spec['num_plain_steps'])} without drafts to compare with"))
    return rows


def _too_few(count: int) -> str:
    if not count:
        return "no decode steps of as many requests were"
    counted = "was only 1 decode step" if count == 1 else f"were only {count} decode steps"
    return f"there {counted} of as many requests"


def category_rows(categories: Mapping[str, Any]) -> list[list[str]]:
    """One row per category, in the columns of CATEGORY_HEADER."""
    return [
        [
            name,
            str(its["num_requests"]),
            f"{its['tokens_per_step']:.2f}" if "tokens_per_step" in its else "",
            f"{its['ms_per_token']:.2f}" if "ms_per_token" in its else "",
            f"{its['acceptance_rate']:.1%}" if "acceptance_rate" in its else "",
            _by_position(its) if "acceptance_rate" in its else "",
        ]
        for name, its in categories.items()
    ]


def _by_position(spec: Mapping[str, Any]) -> str:
    return " ".join(f"{share:.0%}" for share in spec["acceptance_per_position"])
