"""The timeline of a run: slices of time on tracks, one track for each thread, as a file that Perfetto opens. Torch-free.

The file is in Chrome's trace event format (https://ui.perfetto.dev and chrome://tracing read it): complete slices, nested by
their times, and counters.
"""

import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

MOST_SLICES = 300_000  # of a track: some 40 MB in the file


class Mark(Protocol):
    """A moment on a device's own clock."""

    def elapsed_time(self, later: "Mark") -> float:
        """Milliseconds from this mark to a later one."""


@dataclass(slots=True)
class Slice:
    """From `begin_ns` to `end_ns` the thread did `name`. `marks` are those moments on a device, where they were taken."""

    name: str
    begin_ns: int
    end_ns: int
    args: dict[str, Any] | None = None
    marks: tuple[Mark, Mark] | None = None

    @property
    def ms(self) -> float:
        """How long it took: by the device's clock where there is one."""
        if self.marks is not None:
            return self.marks[0].elapsed_time(self.marks[1])
        return (self.end_ns - self.begin_ns) / 1e6


@dataclass(slots=True)
class Track:
    """The slices of one thread, in the order in which they ended, so that a slice comes after those nested in it.

    Only its thread writes. When it is full, further slices are counted and not kept.
    """

    name: str
    clock: Callable[[], int] = time.perf_counter_ns
    limit: int = MOST_SLICES
    slices: list[Slice] = field(default_factory=list)
    num_dropped: int = 0

    def add(self, slice_: Slice) -> None:
        if len(self.slices) < self.limit:
            self.slices.append(slice_)
        else:
            self.num_dropped += 1

    def timed(self, name: str, call: Callable[..., Any], mark: Callable[[], Mark | None] | None = None) -> Callable[..., Any]:
        """A call that does the same and leaves a slice. `mark`, where given, notes the moment on a device, if it is to be."""
        clock, add = self.clock, self.add

        def run(*args: Any, **kwargs: Any) -> Any:
            begin_ns = clock()
            try:
                return call(*args, **kwargs)
            finally:
                add(Slice(name, begin_ns, clock()))

        def run_marked(*args: Any, **kwargs: Any) -> Any:
            begin_ns, first = clock(), mark()
            try:
                return call(*args, **kwargs)
            finally:
                marks = None if first is None else (first, mark())
                add(Slice(name, begin_ns, clock(), None, marks))

        return run if mark is None else run_marked


@dataclass(slots=True)
class Trace:
    """All of a run: its tracks, and values that change over time. Only one thread writes the counters."""

    tracks: list[Track]
    counters: list[tuple[int, dict[str, int]]] = field(default_factory=list)  # (when, value by name)

    def events(self) -> Iterator[dict[str, Any]]:
        """The events of the file; times in microseconds from the first one."""
        pid = os.getpid()
        begins = (slice_.begin_ns for track in self.tracks for slice_ in track.slices)
        start_ns = min(begins, default=self.counters[0][0] if self.counters else 0)
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "lab"}}
        for number, track in enumerate(self.tracks, 1):
            at = {"pid": pid, "tid": number}
            yield {"ph": "M", "name": "thread_name", **at, "args": {"name": track.name}}
            yield {"ph": "M", "name": "thread_sort_index", **at, "args": {"sort_index": number}}
            for slice_ in sorted(track.slices, key=lambda s: (s.begin_ns, -s.end_ns)):
                times = {"ts": (slice_.begin_ns - start_ns) / 1e3, "dur": (slice_.end_ns - slice_.begin_ns) / 1e3}
                args = {} if slice_.args is None else {"args": slice_.args}
                yield {"ph": "X", "name": slice_.name, **at, **times, **args}
        for when_ns, values in self.counters:
            for name, value in values.items():
                yield {"ph": "C", "name": name, "pid": pid, "ts": (when_ns - start_ns) / 1e3, "args": {name: value}}

    def write(self, path: Path) -> None:
        """Write the file. Raises OSError."""
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            file.write(",\n".join(json.dumps(event) for event in self.events()))
            file.write("\n]}\n")


@dataclass(slots=True)
class Node:
    """A slice with those that lie directly in it, in order."""

    slice: Slice
    children: list["Node"] = field(default_factory=list)

    @property
    def own_ms(self) -> float:
        """The time that no nested slice accounts for."""
        return max(self.slice.ms - sum(child.slice.ms for child in self.children), 0.0)

    def walk(self) -> Iterator["Node"]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def own_span(self, at_ns: float) -> tuple[int, int]:
        """From where to where, around this moment of its own, the slice holds no nested one."""
        place = bisect_right(self.children, at_ns, key=lambda child: child.slice.begin_ns)
        begin_ns = self.children[place - 1].slice.end_ns if place else self.slice.begin_ns
        end_ns = self.children[place].slice.begin_ns if place < len(self.children) else self.slice.end_ns
        return begin_ns, end_ns

    def innermost(self, at_ns: float) -> "Node":
        """The deepest slice that holds this moment, which lies in this one."""
        place = bisect_right(self.children, at_ns, key=lambda child: child.slice.begin_ns) - 1
        if place >= 0 and at_ns < self.children[place].slice.end_ns:
            return self.children[place].innermost(at_ns)
        return self


def nested(slices: Sequence[Slice]) -> list[Node]:
    """The outermost slices of a track, in order, with all that lies in them."""
    roots: list[Node] = []
    open_: list[Node] = []
    for slice_ in sorted(slices, key=lambda s: (s.begin_ns, -s.end_ns)):
        node = Node(slice_)
        while open_ and open_[-1].slice.end_ns < slice_.end_ns:
            open_.pop()
        while open_ and open_[-1].slice.end_ns <= slice_.begin_ns:
            open_.pop()
        (open_[-1].children if open_ else roots).append(node)
        open_.append(node)
    return roots
