"""The timeline: slices that nest, and the file that holds them."""

import json

import pytest

from lab.metrics.trace import Slice, Trace, Track, nested


class Clock:
    """Moves by ten nanoseconds each time it is read."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 10
        return self.now


def test_a_timed_call_does_the_same_and_leaves_a_slice():
    track = Track("runner", Clock())
    outer = track.timed("outer", lambda x, *, y: inner(x) + y)
    inner = track.timed("inner", lambda x: 2 * x)
    assert outer(3, y=1) == 7
    assert track.slices == [Slice("inner", 20, 30), Slice("outer", 10, 40)]
    with pytest.raises(ZeroDivisionError):
        track.timed("failed", lambda: 1 / 0)()
    assert track.slices[-1].name == "failed"


def test_marks_are_taken_only_when_there_is_a_device_to_ask():
    marks = iter(["begin", "end", None])
    track = Track("runner", Clock())
    call = track.timed("work", lambda: None, lambda: next(marks))
    call()
    call()
    assert [s.marks for s in track.slices] == [("begin", "end"), None]


def test_a_full_track_counts_what_it_does_not_keep():
    track = Track("runner", Clock(), limit=2)
    for _ in range(5):
        track.timed("work", lambda: None)()
    assert (len(track.slices), track.num_dropped) == (2, 3)


def test_slices_nest_by_their_times():
    slices = [Slice("b", 12, 15), Slice("c", 15, 20), Slice("a", 10, 20), Slice("d", 20, 40)]
    a, d = nested(slices)
    assert (a.slice.name, d.slice.name, d.children) == ("a", "d", [])
    assert [child.slice.name for child in a.children] == ["b", "c"]
    assert a.own_ms == pytest.approx(2e-6)
    assert a.innermost(13).slice.name == "b" and a.innermost(11) is a
    assert a.own_span(11) == (10, 12)


def test_the_device_clock_counts_where_there_is_one():
    class Mark:
        def __init__(self, at):
            self.at = at

        def elapsed_time(self, later):
            return later.at - self.at

    (node,) = nested([Slice("step", 0, 9_000_000), Slice("piece", 10, 20, None, (Mark(1.0), Mark(7.5)))])
    assert node.children[0].slice.ms == 6.5 and node.own_ms == pytest.approx(2.5)


def test_the_file_names_threads_and_holds_slices_and_counters(tmp_path):
    engine, runner = Track("engine"), Track("runner")
    engine.add(Slice("engine step", 1000, 9000))
    runner.add(Slice("piece 0", 3000, 4000))
    runner.add(Slice("decode step", 2000, 8000, {"num_tokens": 3}))
    Trace([engine, runner], [(9500, {"running": 3, "waiting": 0})]).write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "engine", 2: "runner"}
    step = next(e for e in events if e["name"] == "decode step")
    assert (step["ph"], step["tid"], step["ts"], step["dur"], step["args"]) == ("X", 2, 1.0, 6.0, {"num_tokens": 3})
    assert [(e["name"], e["args"]) for e in events if e["ph"] == "C"] == [
        ("running", {"running": 3}),
        ("waiting", {"waiting": 0}),
    ]
    assert json.loads(json.dumps(events))[0]["args"] == {"name": "lab"}


def test_a_trace_of_nothing_is_a_file_still(tmp_path):
    Trace([Track("engine")]).write(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
