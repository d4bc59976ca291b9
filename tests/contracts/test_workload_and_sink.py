"""The contract checks of workloads and sinks, on every plugin of these kinds and on planted faults."""

import itertools

import pytest

from lab import registry
from lab.checks import run_checks
from lab.contracts.sink import Sink
from lab.contracts.workload import WorkItem, Workload
from lab.registry import Entry

registry.discover()
BUILT_IN = [entry for kind in ("workload", "sink") for entry in registry.entries(kind)]


def verdicts(entry):
    return {result.name: result.reason for result in run_checks(entry, entry.options())}


def entry_of(cls, kind):
    return Entry(kind, "planted", cls.__module__, cls.__name__, None, "runtime", cls=cls)


@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda entry: f"{entry.kind}.{entry.name}")
def test_plugins_keep_their_contract(entry, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = verdicts(entry)
    assert len(found) == 3
    assert not any(found.values()), found


def planted_workload(make):
    class Planted(Workload):
        def items(self, model):
            return make(self)

    return entry_of(Planted, "workload")


COUNTER = itertools.count()


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (lambda self: [WorkItem(prompt=str(next(COUNTER)))], "same_seed_same_requests"),
        (lambda self: [], "requests_can_be_sent"),
        (lambda self: [WorkItem()], "requests_can_be_sent"),
        (lambda self: [WorkItem(prompt="x", prompt_token_ids=[4])], "requests_can_be_sent"),
        (lambda self: [WorkItem(prompt_token_ids=[1000])], "requests_can_be_sent"),
        (lambda self: [WorkItem(prompt="x", sampling={"top_p": 7})], "requests_can_be_sent"),
        (lambda self: [WorkItem(prompt="x", arrival_s=2.0), WorkItem(prompt="y", arrival_s=1.0)], "arrivals_are_in_order"),
        (lambda self: [WorkItem(prompt="x", arrival_s=-1.0)], "arrivals_are_in_order"),
    ],
)
def test_faults_of_workloads_are_found(make, check):
    assert [name for name, reason in verdicts(planted_workload(make)).items() if reason] == [check]


class Healthy(Sink):
    def start(self, run):
        self.seen = 0

    def step(self, record):
        self.seen += 1

    def request(self, record):
        pass

    def finish(self, metrics, exit_code):
        pass


class NeedsSteps(Healthy):
    def finish(self, metrics, exit_code):
        return 1 / self.seen


class Changes(Healthy):
    def step(self, record):
        super().step(record)
        del record["ms"]


@pytest.mark.parametrize(
    ("sink", "failed"), [(Healthy, []), (NeedsSteps, ["takes_a_run_that_fails"]), (Changes, ["leaves_records_alone"])]
)
def test_faults_of_sinks_are_found(sink, failed):
    assert [name for name, reason in verdicts(entry_of(sink, "sink")).items() if reason] == failed
