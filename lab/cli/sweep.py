"""`lab run -m`: the points of a sweep, one after another, each in a process of its own.

A process per point keeps one point's caches, pools, globals or crash from the next, so a bad point is a row of the table and
never the end of the sweep. Every row is on disk as soon as it is known.
"""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from lab.cli.ahead import check_ahead
from lab.cli.arguments import Arguments
from lab.cli.folders import named_folder, new_folder, point_folder, points_share, short_name
from lab.cli.table import number, print_table
from lab.config import Composed, SweepPlan, compose_run
from lab.errors import UserError
from lab.interrupt import told_interrupt
from lab.metrics.quiet import taken_by_others
from lab.overrides import quoted
from lab.report.comparison import write_report
from lab.report.rows import read_rows

STOPPING_POINT = "lab: stopping this point after its running step and writing what is there; Ctrl-C again stops at once"
GRACE_S = 60  # for an interrupted point to write what it has finished
METRICS = (  # the columns of sweep.csv, dotted names of metrics.json
    "num_requests",
    "num_failed",
    "output_tokens",
    "duration_s",
    "output_tok_per_s",
    "total_tok_per_s",
    "requests_per_s",
    "goodput_req_per_s",
    "ttft_ms.p50",
    "ttft_ms.p99",
    "itl_ms.p50",
    "itl_ms.p99",
    "tpot_ms.mean",
    "e2e_ms.p50",
    "prefix_cache.hit_rate",
    "preemptions",
    "spec.acceptance_rate",
    "spec.mean_accepted_length",
    "kv.peak_used_blocks",
    "memory.peak_rss_bytes",
    "memory.peak_device_bytes",
    "roofline.floor_ratio",
    "others_cpu_share",
)
SHOWN = {  # of those, the columns of the printed table
    "output_tok_per_s": "out tok/s",
    "total_tok_per_s": "tok/s",
    "ttft_ms.p50": "TTFT p50 ms",
    "itl_ms.p50": "ITL p50 ms",
    "tpot_ms.mean": "TPOT ms",
    "e2e_ms.p50": "E2E p50 ms",
    "prefix_cache.hit_rate": "hit rate",
    "preemptions": "preempted",
    "spec.acceptance_rate": "accepted",
}


@dataclass
class Point:
    """One point and, once it has run, its row. status: pending | running | ok | failed | skipped | interrupted."""

    number: int  # from 1
    overrides: list[str]
    params: dict[str, str]
    folder: Path
    status: str = "pending"
    exit_code: int | None = None
    reason: str = ""
    seconds: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """The row, without what was measured."""
        return {
            "point": self.number,
            **self.params,
            "status": self.status,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "folder": self.folder.name,
        }

    def row(self) -> dict[str, Any]:
        return {**self.facts(), **self.metrics}


class Sweep:
    """A sweep's folder, its points, and the files that tell of them."""

    def __init__(self, plan: SweepPlan, arguments: Arguments, folder: Path, points: list[Point]) -> None:
        self.plan = plan
        self.arguments = arguments
        self.folder = folder
        self.points = points
        self.out: TextIO = sys.stderr if arguments.json else sys.stdout

    def run(self) -> int:
        """Run every point. Returns the exit code."""
        self.write()
        print(f"sweep of {len(self.points)} points in {self.folder}", *self.plan.notes, sep="\n", file=self.out, flush=True)
        interrupted = False
        try:
            for point in self.points:
                self._run_point(point)
                if self.arguments.fail_fast and point.status == "failed":
                    break
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted", file=self.out, flush=True)
        for point in self.points:
            if point.status == "running":
                point.status, point.exit_code, point.reason = "interrupted", 130, "Ctrl-C"
            elif point.status == "pending":
                point.status, point.reason = "skipped", "interrupted" if interrupted else "an earlier point failed"
        self.write()
        self._report(self._page())
        return 130 if interrupted else self._exit_code()

    def write(self) -> None:
        """sweep.json and sweep.csv, each replaced whole, so that a reader never sees half of one."""
        rows = self._rows()
        record = {"folder": str(self.folder), "swept": self.plan.swept, "counts": self._counts(), "points": rows}
        table = io.StringIO()
        writer = csv.DictWriter(table, [*self.points[0].facts(), *METRICS], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        for name, text in (("sweep.json", json.dumps(record, indent=2) + "\n"), ("sweep.csv", table.getvalue())):
            part = self.folder / f".{name}.part"
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(self.folder / name)
            except OSError as error:
                raise UserError(f"cannot write {self.folder / name}: {error.strerror}.") from None

    def _run_point(self, point: Point) -> None:
        print(
            " ".join([f"[{point.number}/{len(self.points)}]", *_label(point.params), "... "]), end="", file=self.out, flush=True
        )
        log = point.folder / "console.txt"
        start = time.monotonic()
        point.status = "running"
        self.write()
        command = [sys.executable, "-P", "-m", "lab", "run", *(f"--plugins={p}" for p in self.arguments.plugins)]
        command += [f"--config-dir={d}" for d in self.arguments.config_dirs]
        command += [*point.overrides, f"hydra.run.dir={quoted(str(point.folder))}", "hydra.mode=RUN"]
        with log.open("wb") as file:
            point.exit_code = _run_child(command, file)
        point.seconds = time.monotonic() - start
        if point.exit_code:
            point.reason = _reason(point.exit_code, log)
        metrics = point.folder / "metrics.json"
        if metrics.exists():
            point.metrics = _flatten(json.loads(metrics.read_text(encoding="utf-8")))
        point.status = "ok" if point.exit_code == 0 else "failed"
        self.write()
        print(_outcome(point), file=self.out, flush=True)

    def _page(self) -> Path:
        try:
            return write_report(self.folder, self.folder.name, read_rows([self.folder]))
        except OSError as error:
            raise UserError(f"cannot write {error.filename}: {error.strerror}.") from None

    def _report(self, page: Path) -> None:
        counts = self._counts()
        if self.arguments.json:
            record = {"folder": str(self.folder), "counts": counts, "points": self._rows(), "report": str(page)}
            print(json.dumps(record))
            return
        shown = [m for m in SHOWN if any(isinstance(p.metrics.get(m), int | float) for p in self.points)]
        failed = any(p.reason for p in self.points)
        headers = ["point", *self.points[0].params, "status", *(SHOWN[m] for m in shown), *(["reason"] if failed else [])]
        rows = []
        for p in self.points:
            digits = {m: 0 if m == "preemptions" else 2 for m in shown}
            values = [number(p.metrics.get(m), digits[m]) for m in shown]
            rows.append([str(p.number), *p.params.values(), p.status, *values, *([p.reason] if failed else [])])
        print()
        print_table(headers, rows)
        if busy := [f"{share} during point {p.number}" for p in self.points if (share := taken_by_others(p.metrics))]:
            print(f"\nthe machine was busy, and these times say little: other processes took of the CPU {', '.join(busy)}")
        print(
            f"\n{', '.join(f'{count} {status}' for status, count in counts.items())}\n{self.folder}\nplots and tokens: {page}"
        )

    def _rows(self) -> list[dict[str, Any]]:
        """The points' rows; their folders are relative to the sweep's."""
        return [{**p.row(), "folder": str(p.folder.relative_to(self.folder))} for p in self.points]

    def _counts(self) -> dict[str, int]:
        counts = {"ok": 0, "failed": 0}
        for point in self.points:
            counts[point.status] = counts.get(point.status, 0) + 1
        return counts

    def _exit_code(self) -> int:
        """0: all ok. 2: no point went well and each failure is one the user can mend. 1: any other failure."""
        failed = [p for p in self.points if p.status == "failed"]
        if not failed:
            return 0
        only_mistakes = all(p.exit_code == 2 for p in failed) and not any(p.status == "ok" for p in self.points)
        return 2 if only_mistakes else 1


def run_sweep(plan: SweepPlan, arguments: Arguments) -> int:
    """Run the sweep and return its exit code. Raises UserError, and has made nothing, when a point can be seen to be wrong."""
    composed: list[tuple[list[str], dict[str, str], Composed]] = []
    wrong: dict[str, list[str]] = {}  # the points that a message is about
    good: set[str] = set()
    for i, texts in enumerate(plan.points, 1):
        swept = [t for t in texts if t.partition("=")[0] in plan.swept]
        values = {t.partition("=")[0]: t.partition("=")[2] for t in swept}
        params = {key.lstrip("+"): values.get(key, "") for key in plan.swept}
        overrides = [t for t in texts if not t.startswith("hydra.job.name=")]
        overrides.append(f"hydra.job.name={quoted(short_name(swept))}")
        try:
            outcome = compose_run(overrides, arguments.config_dirs, point=i)
            check_ahead(outcome.settings, good)
        except UserError as error:
            wrong.setdefault(str(error), []).append(" ".join([f"[{i}/{len(plan.points)}]", *_label(params)]))
        else:
            composed.append((overrides, params, outcome))
    if wrong:
        raise _refusal(wrong, len(plan.points))

    subdirs = [outcome.sweep_subdir for _, _, outcome in composed]
    if shared := next((subdir for subdir in subdirs if subdirs.count(subdir) > 1), None):
        raise points_share(Path(plan.directory) / shared)
    is_named = any(t.startswith("hydra.sweep.dir=") for t in plan.points[0])
    folder = named_folder(plan.directory) if is_named else new_folder(plan.directory)
    points = []
    for i, (overrides, params, outcome) in enumerate(composed, 1):
        group = outcome.settings.tracking.wandb.group or folder.name
        tracking = [f"tracking.wandb.group={quoted(group)}", "tracking.wandb.job_type=sweep"]
        points.append(Point(i, [*overrides, *tracking], params, point_folder(folder / outcome.sweep_subdir)))
    with told_interrupt(STOPPING_POINT), _terminated_like_interrupted():
        return Sweep(plan, arguments, folder, points).run()


def _refusal(wrong: Mapping[str, Sequence[str]], num_points: int) -> UserError:
    """One message of all points that are wrong, each mistake once."""
    count = sum(map(len, wrong.values()))
    which = f"{count} of the sweep's {num_points} points" if num_points > 1 else "the sweep's only point"
    told = (f"{', '.join(points)}: {message}" for message, points in wrong.items())
    return UserError("\n".join([f"nothing was run, for {which} cannot be:", *told]))


def _run_child(command: list[str], log: Any) -> int:
    """Run one point and return its exit code; on Ctrl-C let it end cleanly, then leave none of its processes behind.

    The child has a session of its own, so that Ctrl-C reaches it once, from here. It imports from where this process does.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            child.wait(GRACE_S)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@contextlib.contextmanager
def _terminated_like_interrupted() -> Any:
    """Let SIGTERM end the sweep as Ctrl-C does: without it, the running point would go on alone."""
    before = signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reason(exit_code: int, log: Path) -> str:
    """Why a point failed, from the end of its log, in a line."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    if exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    message = next((line.removeprefix("lab: ") for line in reversed(lines) if line.startswith("lab: ")), None)
    if exit_code == 2 and message:
        return message
    return lines[-1].strip() if lines else f"exit code {exit_code} without a word"


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat[f"{prefix}{key}"] = value
    return flat


def _label(params: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in params.items()]


def _outcome(point: Point) -> str:
    if point.status == "ok":
        speed = point.metrics.get("output_tok_per_s")
        return f"ok, {point.seconds:.1f} s" + (f", {speed:.1f} output tok/s" if speed is not None else "")
    return f"{point.status}: {point.reason} ({point.folder})"
