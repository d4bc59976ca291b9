"""Every registered expert kernel keeps the contract, and the checks see the faults that they are there for."""

from contextlib import suppress

import pytest
import torch
from torch.nn import functional

from lab import registry
from lab.api import Capabilities, Moe, UserError
from lab.checks import CheckFailed, NotDeclared
from lab.checks import moe as checks

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
BUILT_IN = [entry for entry in registry.entries("moe") if entry.source == "built-in"]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
def test_contract(entry, check):
    with suppress(NotDeclared):
        check(entry, entry.options())


def test_none_refuses_experts():
    with pytest.raises(UserError, match="serves dense models only"):
        registry.get("moe", "none").load()(None).pack(torch.zeros(1, 2, 1), torch.zeros(1, 1, 1))


class Loop(Moe):
    """Right: expert by expert."""

    capabilities = Capabilities(features={"moe"}, dtypes={"float32", "bfloat16"})

    def pack(self, w13_EGD, w2_EDF):
        return w13_EGD, w2_EDF

    def experts(self, x_TD, ids_TA, gates_TA, w):
        y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for expert, (w13_GD, w2_DF) in enumerate(zip(*w, strict=True)):
            gate_TF, up_TF = functional.linear(x_TD, w13_GD).chunk(2, dim=-1)
            weight_T1 = (gates_TA * (ids_TA == expert)).sum(-1, keepdim=True)
            y_TD += weight_T1 * functional.linear(functional.silu(gate_TF) * up_TF, w2_DF).float()
        return y_TD.to(x_TD.dtype)


class Ungated(Loop):
    def experts(self, x_TD, ids_TA, gates_TA, w):
        return super().experts(x_TD, ids_TA, torch.ones_like(gates_TA), w)


class Swapped(Loop):
    def pack(self, w13_EGD, w2_EDF):
        return torch.cat(w13_EGD.chunk(2, dim=1)[::-1], dim=1), w2_EDF


class LastForMissing(Loop):
    def experts(self, x_TD, ids_TA, gates_TA, w):
        return super().experts(x_TD, ids_TA % w[0].shape[0], gates_TA, w)


class Undeclared(Loop):
    capabilities = Capabilities()


def entry_of(cls):
    return registry.Entry("moe", "mine", "", cls.__name__, None, "runtime", cls=cls)


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right_kernel_passes(check):
    check(entry_of(Loop), None)


@pytest.mark.parametrize(
    ("faulty", "check"),
    [
        (Ungated, checks.check_experts),
        (Swapped, checks.check_experts),
        (LastForMissing, checks.check_experts_elsewhere),
        (Undeclared, checks.check_declares_what_it_does),
    ],
)
def test_fault_is_seen(faulty, check):
    with pytest.raises(CheckFailed):
        check(entry_of(faulty), None)
