"""Runs steps in this process: `submit` hands one over, `collect` waits for its result. Steps run in order."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import nn

from lab.runner.runner import Runner
from lab.types import Step, StepResult, Watch


class InProcessExecutor:
    """Executes on the caller's thread, or (`overlap`) on one of its own, so that planning and execution overlap."""

    def __init__(self, runner: Runner, *, overlap: bool) -> None:
        self._runner = runner
        self._pending: deque[Future[StepResult] | Step] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lab-runner") if overlap else None

    @property
    def model(self) -> nn.Module:
        return self._runner.model

    def watch(self, watch: Watch) -> None:
        """See `Runner.watch`."""
        self._runner.watch(watch)

    def call(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done on the thread that executes steps, after those submitted."""
        return self._thread.submit(work).result() if self._thread else work()

    def submit(self, step: Step) -> None:
        """Queue a step for execution."""
        self._pending.append(self._thread.submit(self._runner.execute, step) if self._thread else step)

    def collect(self) -> StepResult:
        """The result of the oldest step not collected yet; raises what its execution raised."""
        pending = self._pending.popleft()
        return self._runner.execute(pending) if isinstance(pending, Step) else pending.result()

    def reset(self) -> None:
        """Drop all that is queued and forget every row, after a step has failed."""
        while self._pending:
            pending = self._pending.popleft()
            if isinstance(pending, Future) and not pending.cancel():
                pending.exception()  # wait for it; its failure is known already
        self._runner.reset()

    def close(self) -> None:
        if self._thread:
            self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        """Drop all that is queued and wait for nothing, the running step included; no step can follow."""
        self._pending.clear()
        if self._thread:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
