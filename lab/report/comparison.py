"""Runs beside one another: what was varied, how fast each was, and whether all gave the same tokens. Torch-free."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lab.metrics.quiet import taken_by_others
from lab.report.ran import what_ran
from lab.report.rows import LATENCIES, Row
from lab.report.svg import bars, distributions, short_number

NAMES = {
    "ttft_ms": "TTFT, ms: arrival to first token",
    "itl_ms": "ITL, ms: between tokens",
    "tpot_ms": "TPOT, ms: per token after the first",
}
FIGURES = (  # column, where it is in metrics.json
    ("out tok/s", ("output_tok_per_s",)),
    ("TTFT p50", ("ttft_ms", "p50")),
    ("TTFT p99", ("ttft_ms", "p99")),
    ("ITL p50", ("itl_ms", "p50")),
    ("ITL p99", ("itl_ms", "p99")),
    ("TPOT p50", ("tpot_ms", "p50")),
    ("goodput, requests/s", ("goodput_req_per_s",)),
    ("drafts accepted", ("spec", "acceptance_rate")),
    ("step / floor", ("roofline", "floor_ratio")),
)
BUSY = "CPU of others"  # the column of runs that were disturbed
STYLE = """body { font: 14px/1.5 sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse } td, th { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: left }
td.figure { text-align: right; font-variant-numeric: tabular-nums } tr.failed { color: #a22 } tr.busy { background: #fe9 }
svg { max-width: 100%; margin: 1em 0 }"""


@dataclass(frozen=True)
class Report:
    """A comparison of runs, as Markdown and as a page that stands alone."""

    title: str
    rows: list[Row]
    folder: Path  # where it will lie, which its links are relative to

    def markdown(self) -> str:
        """The table, and what it says of tokens; aligned, so that it can be read as it stands."""
        header, lines = self._table()
        cells = [header, *([cell.replace("|", "\\|") for cell in line] for line in lines)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
        text = [f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in cells]
        text.insert(1, f"| {' | '.join('-' * width for width in widths)} |")
        above = [*(f"- {line}" for line in what_ran(self.rows)), ""] if any(row.environment for row in self.rows) else []
        above += [f"All runs: {', '.join(alike)}.", ""] if (alike := self._alike_as_text()) else []
        return "\n".join([f"# {self.title}", "", *above, *text, "", *self._notes(), ""])

    def html(self) -> str:
        header, lines = self._table()
        body = [f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in what_ran(self.rows))}</ul>"]
        body += [f"<p>All runs: {escape(', '.join(alike))}.</p>"] if (alike := self._alike_as_text()) else []
        body += ["<table>", f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>"]
        for row, line in zip(self.rows, lines, strict=True):
            kind = ' class="failed"' if row.status != "ok" else ' class="busy"' if taken_by_others(row.metrics) else ""
            link = escape(os.path.relpath(row.folder, self.folder), quote=True)
            first = f'<td><a href="{link}/">{escape(line[0])}</a></td>'
            body.append(f"<tr{kind}>{first}{''.join(_cell(text) for text in line[1:])}</tr>")
        body += ["</table>", *(f"<p>{escape(note)}</p>" for note in self._notes()), *self._plots()]
        head = f'<meta charset="utf-8"><title>{escape(self.title)}</title><style>{STYLE}</style>'
        page = [f"<!doctype html><html><head>{head}</head><body>", f"<h1>{escape(self.title)}</h1>", *body, "</body></html>"]
        return "\n".join(page) + "\n"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        params = list(dict.fromkeys(name for row in self.rows for name in row.params))
        figures = [(name, place) for name, place in FIGURES if any(_at(row.metrics, place) is not None for row in self.rows)]
        alike = self._alike()
        params = [name for name in params if name not in alike]
        told = any(row.reason for row in self.rows)
        busy = [BUSY] if any(taken_by_others(row.metrics) for row in self.rows) else []
        header = ["run", *params, "status", *(name for name, _ in figures), *busy, "tokens", *(["reason"] if told else [])]
        lines = []
        for number, (row, tokens) in enumerate(zip(self.rows, same_tokens(self.rows), strict=True), 1):
            values = [_at(row.metrics, place) for _, place in figures]
            shown = ["" if value is None else short_number(value) for value in values]
            shown += [taken_by_others(row.metrics) or "" for _ in busy]
            reason = [" ".join(row.reason.split())] if told else []
            lines.append([str(number), *(row.params.get(name, "") for name in params), row.status, *shown, tokens, *reason])
        return header, lines

    def _alike(self) -> dict[str, str]:
        """The settings that all of several runs have alike: they would be columns that say nothing."""
        if len(self.rows) < 2:
            return {}
        first = self.rows[0].params
        return {name: value for name, value in first.items() if all(row.params.get(name) == value for row in self.rows)}

    def _alike_as_text(self) -> list[str]:
        return [f"{name}={value}" for name, value in self._alike().items()]

    def _notes(self) -> list[str]:
        notes = ["Times are in ms. `tokens` compares the output of every request with that of the first run that has any."]
        guessed = [number for number, row in enumerate(self.rows, 1) if _at(row.metrics, ("roofline", "quiet")) is False]
        if guessed:
            which = ", ".join(str(number) for number in guessed)
            notes.append(f"step / floor of run {which} is a guess: something disturbed the measurement of the device.")
        busy = [str(number) for number, row in enumerate(self.rows, 1) if taken_by_others(row.metrics)]
        if busy:
            notes.append(
                f"`{BUSY}` is what other processes took while run {', '.join(busy)} ran: its times and rates say little."
            )
        return notes

    def _plots(self) -> list[str]:
        plots = []
        for title, place in (
            ("output tokens per second", ("output_tok_per_s",)),
            ("decode step over its floor: 1 is the machine's limit", ("roofline", "floor_ratio")),
        ):
            values = [(row.label, _at(row.metrics, place)) for row in self.rows]
            values = [(label, value) for label, value in values if value is not None]
            if values:
                plots.append(bars(title, values))
        for name in LATENCIES:
            samples = [(row.label, row.samples[name]) for row in self.rows if len(row.samples[name])]
            if samples:
                plots.append(distributions(f"{NAMES[name]}; share of samples up to a value", samples))
        return plots


def same_tokens(rows: Sequence[Row]) -> list[str]:
    """For each row how its outputs compare with those of the first row that has any; empty where there are none."""
    reference = next((row for row in rows if row.outputs), None)
    told = []
    for row in rows:
        if reference is None or not row.outputs:
            told.append("")
        elif row is reference:
            told.append("reference")
        else:
            told.append(_compared(row, reference))
    return told


def _compared(row: Row, reference: Row) -> str:
    shared = [key for key in reference.outputs if key in row.outputs]
    if any(row.outputs[key].prompt_tokens != reference.outputs[key].prompt_tokens for key in shared) or not shared:
        return "other requests"
    firsts = []
    for key in shared:
        ours, theirs = row.outputs[key].token_ids, reference.outputs[key].token_ids
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            firsts.append(next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs))))
    missing = len(reference.outputs.keys() ^ row.outputs.keys())
    lacking = f"; {missing} in one of the two only" if missing else ""
    if firsts:
        return f"{len(firsts)} of {len(shared)} differ, the first at token {min(firsts) + 1}{lacking}"
    return f"same{lacking}"


def _at(metrics: dict[str, Any], place: Sequence[str]) -> Any:
    value: Any = metrics
    for key in place:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _cell(text: str) -> str:
    is_figure = text.replace(",", "").replace(".", "", 1).isdigit()
    return f'<td class="figure">{escape(text)}</td>' if is_figure else f"<td>{escape(text)}</td>"


def write_report(folder: Path, title: str, rows: list[Row]) -> Path:
    """Write report.html and report.md into `folder`; returns the page's path."""
    report = Report(title, rows, folder)
    for name, text in (("report.md", report.markdown()), ("report.html", report.html())):
        part = folder / f".{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)
    return folder / "report.html"
