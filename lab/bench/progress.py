"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

import logging
import sys
import time
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

log = logging.getLogger("lab")

LINE_SECONDS = 5.0
BAR_SECONDS = 0.1


class ProgressView(Protocol):
    """Shows how many of the requests have ended, and the output tokens so far."""

    def update(self, ended: int, tokens: int) -> None: ...

    def close(self) -> None: ...


def progress_view(mode: Literal["auto", "bar", "log", "off"], total: int) -> ProgressView:
    """The view for the setting tracking.progress; `auto` is a bar when stderr is a terminal."""
    if mode == "auto":
        mode = "bar" if sys.stderr.isatty() else "log"
    return {"bar": _Bar, "log": _Lines, "off": _Nothing}[mode](total)


class _Nothing:
    def __init__(self, total: int) -> None:
        pass

    def update(self, ended: int, tokens: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """A log line every few seconds."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s + LINE_SECONDS

    def update(self, ended: int, tokens: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_SECONDS
            rate = tokens / (now_s - self._begin_s)
            per_s = f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"
            log.info("%d of %d requests done, %s output tokens, %s per second", ended, self._total, f"{tokens:,}", per_s)

    def close(self) -> None:
        pass


class _Bar:
    """A bar on stderr, which log lines would tear: rich moves them above it."""

    def __init__(self, total: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]:,.0f} tok/s"),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,  # a refreshing thread would take time from the steps at moments of its own
        )
        self._task = self._progress.add_task("requests", total=total, rate=0.0)
        self._begin_s = time.monotonic()
        self._next_s = self._begin_s
        self._progress.start()

    def update(self, ended: int, tokens: int) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + BAR_SECONDS
            rate = tokens / max(now_s - self._begin_s, 1e-9)
            self._progress.update(self._task, completed=ended, rate=rate, refresh=True)

    def close(self) -> None:
        self._progress.stop()
