"""From samples to the figures and tables of README.md."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin (written by run.py) -->", "<!-- figures: end -->"
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One figure of the report: a median over the samples of a workload, or one of a peer's start."""

    key: str
    title: str
    higher_is_better: bool
    digits: int  # after the point
    workload: str | None  # whose samples it is taken from


FIGURES = (
    Figure("decode_tok_s", "W1 decode, tok/s", True, 1, "w1"),
    Figure("ttft_ms", "W1 TTFT, ms", False, 1, "w1"),
    Figure("itl_ms", "W1 ITL, ms", False, 2, "w1"),
    Figure("w2_tok_s", "W2, output tok/s", True, 0, "w2"),
    Figure("w3_tok_s", "W3 prefill, tok/s", True, 0, "w3"),
    Figure("w4_s", "W4, s", False, 2, "w4"),
    Figure("peak_mb", "peak memory at W1, MB", False, 0, "w1"),
    Figure("ready_cold_s", "ready, cold caches, s", False, 1, None),
    Figure("ready_warm_s", "ready, warm caches, s", False, 1, None),
)


def figures_of(workload: str, answer: Mapping[str, Any], num_prompt: int) -> dict[str, float]:
    """The figures of one sample. `answer` is a protocol.Answer as plain data; `num_prompt` the tokens of all its prompts."""
    seconds = answer["seconds"]
    if workload == "w1":
        times = answer["token_times_s"]
        gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
        return {
            "decode_tok_s": (len(times) - 1) / (times[-1] - times[0]),
            "ttft_ms": times[0] * 1e3,
            "itl_ms": statistics.median(gaps) * 1e3,
            "peak_mb": answer["peak_rss_bytes"] / 1e6,
        }
    if workload == "w2":
        return {"w2_tok_s": sum(len(ids) for ids in answer["token_ids"]) / seconds}
    if workload == "w3":
        return {"w3_tok_s": num_prompt / answer["token_times_s"][0]}
    return {"w4_s": seconds}


def medians(results: Results) -> dict[str, dict[str, float]]:
    """By peer, then by figure: the median of its samples. A peer that failed before a figure has none of it."""
    found: dict[str, dict[str, float]] = {}
    for name, peer in results["peers"].items():
        values = dict(_start_figures(peer))
        for figure in FIGURES:
            samples = _values(peer, figure)
            if samples:
                # memory only ever grows, and later workloads ran in the same process: the first sample counts
                values[figure.key] = samples[0] if figure.key == "peak_mb" else statistics.median(samples)
        found[name] = values
    return found


def _start_figures(peer: Mapping[str, Any]) -> dict[str, float]:
    ready = {kind: [start["load_s"] + start["first_s"] for start in peer["starts"][kind]] for kind in ("cold", "warm")}
    return {f"ready_{kind}_s": statistics.median(values) for kind, values in ready.items() if values}


def _values(peer: Mapping[str, Any], figure: Figure) -> list[float]:
    return [sample["figures"][figure.key] for sample in peer["samples"].get(figure.workload, [])]


def render(results: Results) -> str:
    """All tables, as Markdown."""
    found = medians(results)
    sections = [_conditions(results), _main_table(results, found), _ratio_table(results, found), _spread_table(results)]
    sections += [_agreement_table(results), _peer_table(results)]
    return "\n\n".join(section for section in sections if section)


def write_readme(path: Path, text: str) -> None:
    """Put `text` between the markers of a README, which must have them."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path.name} lacks the markers {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def _conditions(results: Results) -> str:
    machine = results["machine"]
    samples = [s for peer in results["peers"].values() for of_workload in peer["samples"].values() for s in of_workload]
    disturbed = sum(sample["disturbed"] for sample in samples)
    return (
        f"Measured {results['date']} on {machine['name']} ({machine['cores']} cores), {results['threads']} threads; model "
        f"{results['model']} in bf16. Limits of the machine: reads at {machine['bandwidth_gb_s']:.1f} GB/s, bf16 products at "
        f"{machine['bf16_gflop_s']:.0f} GFLOP/s. {len(samples)} samples, {disturbed} of them on a CPU that others used as well."
    )


def _main_table(results: Results, found: Mapping[str, Mapping[str, float]]) -> str:
    rows = [[name, *(_cell(values.get(figure.key), figure) for figure in FIGURES)] for name, values in found.items()]
    floor = results["floors"]
    rows.append(["*floor*", *(_cell(floor.get(figure.key), figure) for figure in FIGURES)])
    return _table(["engine", *(figure.title for figure in FIGURES)], rows)


def _ratio_table(results: Results, found: Mapping[str, Mapping[str, float]]) -> str:
    """lab against the best of the others and against the floor; over 1 is better than it, for every figure."""
    ours = found.get("lab", {})
    rows = []
    for figure in FIGURES:
        others = {name: values[figure.key] for name, values in found.items() if name != "lab" and figure.key in values}
        if figure.key not in ours or not others:
            continue
        best = (max if figure.higher_is_better else min)(others, key=others.__getitem__)
        floor = results["floors"].get(figure.key)
        rows.append(
            [
                figure.title,
                _cell(ours[figure.key], figure),
                f"{_cell(others[best], figure)} ({best})",
                f"{advantage(ours[figure.key], others[best], figure):.2f}",
                _cell(floor, figure),
                "" if floor is None else f"{advantage(ours[figure.key], floor, figure):.0%}",
            ]
        )
    if not rows:
        return ""
    return "Over 1 means that lab is better, also where less is better.\n\n" + _table(
        ["figure", "lab", "best other", "lab / best", "floor", "lab / floor"], rows
    )


def advantage(ours: float, other: float, figure: Figure) -> float:
    """How many times better `ours` is than `other`."""
    return ours / other if figure.higher_is_better else other / ours


def _spread_table(results: Results) -> str:
    header = ["engine, lowest to highest", *(figure.title for figure in FIGURES if figure.workload and figure.key != "peak_mb")]
    rows = []
    for name, peer in results["peers"].items():
        cells = []
        for figure in FIGURES:
            if figure.workload and figure.key != "peak_mb":
                values = _values(peer, figure)
                low, high = (_cell(pick(values, default=None), figure) for pick in (min, max))
                cells.append(f"{low} to {high} (n={len(values)})" if values else "")
        rows.append([name, *cells])
    return _table(header, rows)


def _agreement_table(results: Results) -> str:
    """Do the engines do the same work? In bf16 a near tie may go either way, and then the texts part."""
    reference = results.get("reference")
    if reference is None:
        return ""
    workloads = results["workloads"]
    rows = [
        [name, *("" if (share := peer["agreement"].get(w)) is None else f"{share:.0%}" for w in workloads)]
        for name, peer in results["peers"].items()
        if name != reference
    ]
    note = f"Tokens equal to those of {reference}, up to the first that differs in each request:"
    return f"{note}\n\n" + _table(["engine", *(name.upper() for name in workloads)], rows)


def agreement(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """The share of tokens that come before the first difference of their request."""
    alike = sum(_num_alike(ours, theirs) for ours, theirs in zip(tokens, reference, strict=True))
    return alike / sum(len(ids) for ids in reference)


def _num_alike(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(theirs))


def _peer_table(results: Results) -> str:
    rows = []
    for name, peer in results["peers"].items():
        versions = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
        rows.append([name, versions, peer["settings"], peer["failure"] or ""])
    rows += [[name, "", "", "not installed"] for name in results["skipped"]]
    return _table(["engine", "versions", "settings", "remarks"], rows)


def _cell(value: float | None, figure: Figure) -> str:
    return "" if value is None or math.isnan(value) else f"{value:,.{figure.digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escape: Callable[[str], str] = lambda cell: cell.replace("|", "\\|").replace("\n", " ")  # noqa: E731
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(escape(cell) for cell in line) + " |" for line in lines)
