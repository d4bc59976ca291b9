"""The runs that a report compares, read from the folders of runs and sweeps. Torch-free."""

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lab.errors import UserError

LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms")
OF_A_RUN = ("config.yaml", "log.txt")
WHERE_ONLY = ("tracking.", "hydra.")  # settings that say where a run goes, not what it is


@dataclass
class Row:
    """One run. `params` holds what was varied, by name; `reason` says why a run that is not `ok` failed."""

    folder: Path
    params: dict[str, str] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)  # env.json
    workload: str = ""  # the plugin that made it
    samples: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in LATENCIES})
    outputs: dict[tuple[str, int], "Output"] = field(default_factory=dict)  # by the request's id and the sample's index

    @property
    def label(self) -> str:
        return ", ".join(self.params.values()) or self.folder.name


@dataclass(frozen=True, slots=True)
class Output:
    """What one sample of a request came to."""

    prompt_tokens: int | None
    token_ids: array


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """A row for each run, and for each point of a sweep. Raises UserError for a folder that is neither."""
    rows: list[Row] = []
    for folder in folders:
        if (folder / "sweep.json").exists():
            rows += _points(folder)
        elif all((folder / file).exists() for file in OF_A_RUN):
            rows.append(Row(folder))
        else:
            raise UserError(
                f"{folder} is the folder of no run and no sweep: it has neither config.yaml and log.txt nor sweep.json."
            )
    if len(folders) > 1:
        _name_differences(rows)
    for row in rows:
        _read(row)
    return rows


def _points(folder: Path) -> Iterator[Row]:
    record = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    names = [name.lstrip("+") for name in record["swept"]]
    for point in record["points"]:
        params = {name: str(point[name]) for name in names if name in point}
        yield Row(folder / point["folder"], params, point["status"], point["reason"])


def _name_differences(rows: list[Row]) -> None:
    """Runs of several folders are told apart by the settings in which they differ; a run that has none keeps its own."""
    configs = [dict(_flat(_settings(row.folder))) for row in rows]
    known = [config for config in configs if config]
    names = dict.fromkeys(name for config in known for name in config if not name.startswith(WHERE_ONLY))
    varied = [name for name in names if len({repr(config.get(name)) for config in known}) > 1]
    for row, config in zip(rows, configs, strict=True):
        if config:
            row.params = {name.removesuffix(".name"): str(config.get(name, "")) for name in varied}


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _what_ended(folder: Path) -> tuple[str, str]:
    """Status and reason of a run without metrics: what its log noted on the way out, if it got there."""
    log = folder / "log.txt"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    notes = re.findall(r"^[-\d]+ [:,\d]+ ERROR (.*)$", text, re.MULTILINE)
    if notes:
        return "failed", notes[-1]
    return "unfinished", "it has no metrics.json: it did not end, or has not yet"


def _read(row: Row) -> None:
    """What ran, metrics and requests, as far as the run got."""
    metrics, requests = row.folder / "metrics.json", row.folder / "requests.jsonl"
    environment, resolved = row.folder / "env.json", row.folder / "resolved.json"
    if environment.exists():
        row.environment = json.loads(environment.read_text(encoding="utf-8"))
    if resolved.exists():
        row.workload = json.loads(resolved.read_text(encoding="utf-8")).get("workload", {}).get("name", "")
    if metrics.exists():
        row.metrics = json.loads(metrics.read_text(encoding="utf-8"))
        if row.status == "ok" and row.metrics.get("interrupted"):
            row.status, row.reason = "interrupted", f"requests that had not ended: {row.metrics['num_unfinished']}"
    elif row.status == "ok":
        row.status, row.reason = _what_ended(row.folder)
    if not requests.exists():
        return
    with requests.open(encoding="utf-8") as lines:
        for text in lines:
            if not text.endswith("\n"):
                return  # a run that was killed while it wrote
            line = json.loads(text)
            if line["error"]:
                continue
            if line["finish_reason"] != "abort":  # the tokens that it would have got are not known
                row.outputs[line["id"], line["index"]] = Output(line["prompt_tokens"], array("q", line["output_token_ids"]))
            for name in LATENCIES:
                value = line[name]
                row.samples[name].extend(value if isinstance(value, list) else [] if value is None else [value])
