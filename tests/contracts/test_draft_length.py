"""Every registered draft length keeps the contract, and the checks see the faults that they are there for."""

from types import SimpleNamespace

import numpy as np
import pytest

from lab import registry
from lab.checks import CheckFailed
from lab.checks import draft_length as checks

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
BUILT_IN = [entry for entry in registry.entries("draft_length") if entry.source == "built-in"]
ByAcceptance = registry.get("draft_length", "acceptance").load()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
def test_contract(entry, check):
    check(entry, entry.options())


def test_there_are_three():
    assert {entry.name for entry in BUILT_IN} == {"fixed", "acceptance", "batch"}


class TooMany(ByAcceptance):
    def lengths(self, rows_R):
        return super().lengths(rows_R) + 1


class Floats(ByAcceptance):
    def lengths(self, rows_R):
        return super().lengths(rows_R) * 1.0


class ForAllRows(ByAcceptance):
    def lengths(self, rows_R):
        return super().lengths(np.arange(self.max_rows))


class DryForAllRows(ByAcceptance):
    def dry_runs(self, rows_R):
        return np.ones(self.max_rows, bool)


class AtRandom(ByAcceptance):
    def lengths(self, rows_R):
        return np.random.default_rng().integers(0, self.num_drafts + 1, len(rows_R))


class Writes(ByAcceptance):
    def lengths(self, rows_R):
        rows_R.sort()
        return super().lengths(rows_R)


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (TooMany, "check_lengths"),
        (Floats, "check_lengths"),
        (ForAllRows, "check_lengths"),
        (DryForAllRows, "check_dry_runs"),
        (AtRandom, "check_same_again"),
        (Writes, "check_arrays_are_left_alone"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_planted_fault_is_found(faulty, name):
    entry = SimpleNamespace(name="faulty", load=lambda: faulty)
    with pytest.raises(CheckFailed):
        getattr(checks, name)(entry, faulty.Options())
