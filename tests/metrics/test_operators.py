"""Operators from torch's profiler: which are outermost, and on which clock they stand."""

from dataclasses import dataclass

import pytest
import torch
from torch.autograd import DeviceType

from lab.metrics.operators import STEP, Anchor, OperatorRecorder, operator_names, outermost


@dataclass(frozen=True)
class Event:
    """As the profiler gives them."""

    label: str
    start: int
    duration: int
    number: int = 0
    launched_by: int = 0
    device: DeviceType = DeviceType.CPU

    def name(self):
        return self.label

    def start_ns(self):
        return self.start

    def duration_ns(self):
        return self.duration

    def device_type(self):
        return self.device

    def correlation_id(self):
        return self.number

    def linked_correlation_id(self):
        return self.launched_by


EVENTS = [
    Event("aten::mm", 1120, 30, 3),
    Event(STEP, 1100, 100, 1),
    Event("aten::linear", 1110, 50, 2),
    Event("aten::t", 1111, 5, 4),
    Event("aten::add", 1170, 20, 5),
    Event("aten::add", 1250, 20, 6),  # between the steps
    Event(STEP, 1300, 100, 7),
    Event("own::op", 1310, 0, 8),
    Event(STEP, 1400, 100, 9),
    Event("gemm", 9000, 2_000_000, launched_by=3, device=DeviceType.CUDA),
    Event("split", 9000, 1_000_000, launched_by=2, device=DeviceType.CUDA),
]


def test_the_outermost_operators_of_each_step_on_our_clock():
    # the second look at both clocks was interrupted: the median counts
    first, second = outermost(EVENTS, [Anchor(95, 103, 1000), Anchor(290, 330, 1000), Anchor(0, 500, 1450)], on_device=False)[
        :2
    ]
    assert [(op.name, op.begin_ns, op.end_ns) for op in first] == [("aten::linear", 110, 160), ("aten::add", 170, 190)]
    assert [(op.name, op.begin_ns, op.end_ns) for op in second] == [("own::op", 310, 310)]
    assert first[0].ms == pytest.approx(50e-6) and first[0].middle_ns == 135


def test_a_step_keeps_to_what_its_own_look_at_the_clock_allows():
    _, second, _ = outermost(EVENTS, [Anchor(98, 102, 1000), Anchor(305, 330, 1000), Anchor(0, 500, 1000)], on_device=False)
    assert second[0].begin_ns == 315


def test_on_a_device_the_kernels_count():
    (linear, add), _, _ = outermost(EVENTS, [Anchor(0, 500, 1000)] * 3, on_device=True)
    assert (linear.ms, add.ms) == (3.0, 0.0)


def test_what_really_runs_is_recorded():
    x, weight = torch.ones(1, 8), torch.ones(4, 8)
    assert operator_names("cpu", lambda: torch.nn.functional.linear(x, weight)) == {"aten::linear"}
    recorder = OperatorRecorder("cpu")
    recorder.start()
    for _ in range(2):
        begin_ns = recorder._clock()
        with recorder.step():
            torch.mm(x, weight.t())
        end_ns = recorder._clock()
    recorder.stop()
    steps = recorder.operators()
    assert [[op.name for op in step] for step in steps] == [["aten::t", "aten::mm"]] * 2
    assert begin_ns <= steps[1][0].begin_ns <= steps[1][1].end_ns <= end_ns


def test_a_recorder_that_recorded_nothing_has_no_steps():
    assert OperatorRecorder("cpu").operators() == []
