"""How long each operator of a step takes, by torch's own profiler: the way to look into compiled pieces.

The profiler sees every call that goes through torch's dispatcher, compiled code or not: matrix products and the operators of
plugins. Inductor's own loops are no operators; they are what is left of a piece's time.
"""

import os
import statistics
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "lab.step"
ENCLOSING = (STEP, "lab_tape::run")  # events whose time is that of the operators inside; the second runs a compiled piece


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator that is not nested in another, by the clock of the trace. `device_ms` is of its kernels."""

    name: str
    begin_ns: int
    end_ns: int
    device_ms: float | None = None

    @property
    def ms(self) -> float:
        """How long it took: on the device, where it ran on one."""
        return (self.end_ns - self.begin_ns) / 1e6 if self.device_ms is None else self.device_ms

    @property
    def middle_ns(self) -> float:
        return (self.begin_ns + self.end_ns) / 2


class Anchor(NamedTuple):
    """How a step's event stands to our clock: it began between two moments, and the time of day was so far ahead of it."""

    before_ns: int
    after_ns: int
    ahead_ns: int


class RawEvent(Protocol):
    """What is used of the profiler's events. Times are the time of day, which the profiler works out from a faster clock."""

    def name(self) -> str: ...

    def start_ns(self) -> int: ...

    def duration_ns(self) -> int: ...

    def device_type(self) -> DeviceType: ...

    def correlation_id(self) -> int: ...  # of an operator: its own number

    def linked_correlation_id(self) -> int: ...  # of a kernel: the number of the operator that launched it


class OperatorRecorder:
    """Records the operators of the steps that one thread runs, between `start` and `stop`, which that thread calls.

    The first recording of a process takes seconds to start, and should be started on the main thread: `operator_names` does.
    """

    def __init__(self, device: str, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints lines of its own
        self._on_device = device != "cpu"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_device else [])]
        self._profile = profile(activities=activities, acc_events=False)
        self._clock = clock
        self._anchors: list[Anchor] = []
        self.is_open = False

    def start(self) -> None:
        self._profile.start()
        self.is_open = True

    def stop(self) -> None:
        self._profile.stop()
        self.is_open = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step. The event that marks it tells how the profiler's clock stands to ours."""
        ahead_ns = time.time_ns() - self._clock()
        before_ns = self._clock()
        with record_function(STEP):
            self._anchors.append(Anchor(before_ns, self._clock(), ahead_ns))
            yield

    def operators(self) -> list[list[Operator]]:
        """The outermost operators of each step, in order. Only when stopped."""
        events = self._profile.profiler.kineto_results.events() if self._anchors else ()
        return outermost(events, self._anchors, on_device=self._on_device)


def outermost(events: Sequence[RawEvent], anchors: Sequence[Anchor], *, on_device: bool) -> list[list[Operator]]:
    """The operators of each step, which has an event of its own, from all of the profiler's events."""
    host = sorted(
        (e.start_ns(), -e.duration_ns(), e.name(), e.correlation_id()) for e in events if e.device_type() == DeviceType.CPU
    )
    launched = Counter()
    for event in events:
        if event.device_type() != DeviceType.CPU:
            launched[event.linked_correlation_id()] += event.duration_ns() / 1e6
    steps = [(start, start - minus) for start, minus, name, _ in host if name == STEP]
    host = [entry for entry in host if entry[2] not in ENCLOSING]
    starts = [entry[0] for entry in host]
    found = []
    for (start, end), offset_ns in zip(steps, _offsets([start for start, _ in steps], anchors), strict=True):
        inside = host[bisect_left(starts, start) : bisect_left(starts, end)]
        found.append(list(_outermost(inside, offset_ns, launched if on_device else None)))
    return found


def _offsets(starts: Sequence[int], anchors: Sequence[Anchor]) -> list[int]:
    """By how much the profiler's clock is ahead of ours at each step: as the clocks stood, within what the step allows.

    A thread may be interrupted between two looks at two clocks, so the median of all steps counts.
    """
    ahead_ns = round(statistics.median(anchor.ahead_ns for anchor in anchors)) if anchors else 0
    pairs = zip(starts, anchors, strict=True)
    return [min(max(ahead_ns, start - anchor.after_ns), start - anchor.before_ns) for start, anchor in pairs]


def _outermost(
    entries: Sequence[tuple[int, int, str, int]], offset_ns: int, launched: Counter[int] | None
) -> Iterator[Operator]:
    """`entries` are (start, -duration, name, number), sorted: an outer one stands before those nested in it."""
    place = 0
    while place < len(entries):
        start, minus, name, _ = entries[place]
        end, device_ms = start - minus, 0.0
        while place < len(entries) and (entries[place][0] < end or entries[place][0] == start):
            if launched is not None:
                device_ms += launched[entries[place][3]]
            place += 1
        yield Operator(name, start - offset_ns, end - offset_ns, None if launched is None else device_ms)


def operator_names(device: str, call: Callable[[], Any]) -> set[str]:
    """The names of the operators that `call` calls. Call it on the main thread."""
    recorder = OperatorRecorder(device)
    recorder.start()
    with torch.inference_mode(), recorder.step():
        call()
    recorder.stop()
    return {operator.name for operator in recorder.operators()[0]}
