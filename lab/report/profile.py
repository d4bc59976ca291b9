"""The profile of a kind of step as a Markdown table. Torch-free."""

from collections.abc import Mapping
from typing import Any

HEADER = ("part", "ms", "share", "MB", "MFLOP", "GB/s", "of bandwidth", "GFLOP/s", "of peak", "floor, ms")
NAMES = {
    "scheduler": "scheduler, between steps",
    "batch": "batch build",
    "plan": "attention: plan",
    "elementwise": "embedding, norms, rotation, activation",
    "attention write": "attention: write keys and values",
    "attention attend": "attention: attend",
    "graphs": "captured graphs",
    "sample": "sampling",
    "propose": "proposing drafts",
    "output": "output, between steps",
    "other": "other Python",
}


def profile_text(profile: Mapping[str, Any], disturbance: str | None = None) -> str:
    """A `profile` section of metrics.json: a Markdown table, and what it is of.

    `disturbance` is what kept the device's limits from being measured well.
    """
    rows = [_row(part) for part in profile["parts"]]
    rows.append(_row(profile["total"]))
    widths = [max(len(row[i]) for row in (HEADER, *rows)) for i in range(len(HEADER))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = [_line(HEADER, widths), _line(rule, widths), *(_line(row, widths) for row in rows)]
    return "\n".join([*lines, "", _described(profile, disturbance)])


def _described(profile: Mapping[str, Any], disturbance: str | None) -> str:
    modes = ", ".join(profile["modes"])
    requests = "1 request" if profile["num_requests"] == 1 else f"{profile['num_requests']:.3g} requests"
    num, kind = len(profile["steps"]), profile["total"]["name"]
    text = (
        f"Mean of {num} {kind}{'s' * (num != 1)} (mode {modes}) of {requests} with "
        f"{profile['context']:.0f} tokens of context each, against {profile['bandwidth_gb_s']:.1f} GB/s and "
        f"{profile['peak_gflop_s']:.0f} GFLOP/s as measured"
    )
    text += "." if disturbance is None else f", which may be far too low: {disturbance}."
    if profile["hidden_ms"]:
        hidden = ", ".join(f"{name} {ms:.3f} ms" for name, ms in profile["hidden_ms"].items())
        text += f"\nMeanwhile, on the engine's thread: {hidden}."
    text += f"\nWatching takes some {profile['watching_ms']:.2f} ms of a step"
    if profile["unrecorded_runner_ms"] is not None:
        with_it, without = profile["runner_ms"], profile["unrecorded_runner_ms"]
        text += f"; in the runner it took {with_it:.2f} ms while operators were recorded, {without:.2f} ms while they were not"
    return text + "."


def _row(part: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        NAMES.get(part["name"], part["name"]),
        f"{part['ms']:.3f}",
        f"{part['share']:.1%}",
        *(_figure(part, key, scale) for key, scale in (("bytes", 1e6), ("flops", 1e6))),
        _figure(part, "gb_per_s"),
        _share(part, "bandwidth_share"),
        _figure(part, "gflop_per_s"),
        _share(part, "peak_share"),
        "" if "floor_ms" not in part else f"{part['floor_ms']:.3f}",
    )


def _figure(part: Mapping[str, Any], key: str, scale: float = 1.0) -> str:
    value = part.get(key)
    if not value:
        return ""
    value /= scale
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _share(part: Mapping[str, Any], key: str) -> str:
    return f"{part[key]:.0%}" if part.get(key) else ""


def _line(cells: tuple[str, ...] | list[str], widths: list[int]) -> str:
    padded = (
        cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join(padded)} |"
