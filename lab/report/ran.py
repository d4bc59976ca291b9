"""What a report's runs were made of: model, workload, machine and code, each said once where runs have it alike."""

from collections.abc import Sequence
from typing import Any

from lab.report.rows import Row

COMMIT = 12  # letters of one that are told


def what_ran(rows: Sequence[Row]) -> list[str]:
    """A line for each of model, workload, machine and code; with the numbers of the runs where these differ in it."""
    numbered = [(number, row) for number, row in enumerate(rows, 1) if row.environment]
    lines = []
    for name, tell in (("model", _model), ("workload", _workload), ("machine", _machine), ("code", _code)):
        runs_of: dict[str, list[str]] = {}
        for number, row in numbered:
            runs_of.setdefault(tell(row), []).append(str(number))
        told = [f"{text} (run {', '.join(runs)})" if len(runs_of) > 1 else text for text, runs in runs_of.items()]
        if told:
            lines.append(f"{name}: {'; '.join(told)}")
    return lines


def _model(row: Row) -> str:
    model, dtype, kv_dtype = (row.environment.get(name) for name in ("model", "dtype", "kv_dtype"))
    cache = "" if kv_dtype in (None, dtype) else f"KV cache {kv_dtype}"
    return _listed(model, dtype, cache)


def _workload(row: Row) -> str:
    counted = [
        _count(row.metrics, name, unit) for name, unit in (("num_requests", "requests"), ("prompt_tokens", "prompt tokens"))
    ]
    return _listed(row.workload, *counted)


def _machine(row: Row) -> str:
    said = row.environment
    return _listed(said.get("gpu"), said.get("cpu"), _count(said, "usable_cores", "cores"), _count(said, "threads", "threads"))


def _code(row: Row) -> str:
    said = row.environment
    versions = [f"{name} {said[name]}" for name in ("lab", "torch", "python") if name in said]
    git = said.get("git") or {}
    commit = f"commit {git['commit'][:COMMIT]}{' with changes' if git.get('dirty') else ''}" if git else ""
    return _listed(versions[0] if versions else "", commit, *versions[1:])


def _count(values: dict[str, Any], name: str, unit: str) -> str:
    if name not in values:
        return ""
    return f"{values[name]:,} {unit.removesuffix('s') if values[name] == 1 else unit}"


def _listed(*texts: Any) -> str:
    return ", ".join(str(text) for text in texts if text) or "unknown"
