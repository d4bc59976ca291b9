"""Every registered policy keeps the contract, and the checks see the faults that they are there for."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lab import registry
from lab.checks import CheckFailed
from lab.checks import policy as checks

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
BUILT_IN = [entry for entry in registry.entries("policy") if entry.source == "built-in"]
Fcfs = registry.get("policy", "fcfs").load()


def test_the_built_in_policies_are_found():
    assert [entry.name for entry in BUILT_IN] == ["fcfs", "priority"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
def test_contract(entry, check):
    check(entry, entry.options())


class EqualKeys(Fcfs):
    def key(self, request):
        return (request.arrival_s,)


class KeysOfTwoKinds(Fcfs):
    def key(self, request):
        return (request.arrival_index if request.arrival_index % 2 else str(request.arrival_index),)


class NotATuple(Fcfs):
    def key(self, request):
        return request.arrival_index


class KeyOfProgress(Fcfs):
    def key(self, request):
        return len(request.token_ids), request.arrival_index


class RandomKey(Fcfs):
    def key(self, request):
        return random.random(), request.arrival_index


class KeyOfTheInstance(Fcfs):
    def key(self, request):
        return id(self), request.arrival_index


class VictimFromElsewhere(Fcfs):
    def victim(self, running):
        return replace(running[-1])


class RandomVictim(Fcfs):
    def victim(self, running):
        return random.choice(running)


class SortsTheList(Fcfs):
    def victim(self, running):
        running.sort(key=lambda r: (r.priority, r.arrival_index))
        return running[-1]


class WritesRequests(Fcfs):
    def key(self, request):
        request.priority += 1
        return super().key(request)


class AppendsToRequests(Fcfs):
    def victim(self, running):
        running[-1].draft_ids.append(1)
        return running[-1]


class NeverPreempts(Fcfs):
    """Makes the cache look as if nobody ever had to give way: it cuts the requests short."""

    def key(self, request):
        request.max_len = min(request.max_len, request.num_prompt + 1)
        return super().key(request)


FAULTS = [
    (EqualKeys, checks.check_key_is_a_total_order),
    (KeysOfTwoKinds, checks.check_key_is_a_total_order),
    (NotATuple, checks.check_key_is_a_total_order),
    (KeyOfProgress, checks.check_key_is_stable),
    (RandomKey, checks.check_key_is_stable),
    (KeyOfTheInstance, checks.check_key_is_stable),
    (VictimFromElsewhere, checks.check_victim_is_running),
    (RandomVictim, checks.check_victim_is_running),
    (SortsTheList, checks.check_nothing_is_changed),
    (WritesRequests, checks.check_nothing_is_changed),
    (AppendsToRequests, checks.check_nothing_is_changed),
    (NeverPreempts, checks.check_everyone_is_served),
]


@pytest.mark.parametrize(("policy", "check"), FAULTS, ids=lambda v: v.__name__)
def test_the_checks_see_faults(policy, check):
    with pytest.raises(CheckFailed):
        check(SimpleNamespace(load=lambda: policy), Fcfs.Options())
