"""Every registered weight format keeps the contract, and the checks see the faults that they are there for."""

import pytest
import torch

from lab import registry
from lab.api import ParamSpec
from lab.checks import CheckFailed
from lab.checks import quant as checks

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
BUILT_IN = [entry for entry in registry.entries("quant") if entry.source == "built-in"]
NoQuant = registry.get("quant", "none").load()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
def test_contract(entry, check):
    check(entry, entry.options())


class Plain(NoQuant):
    """Unpacked, so that faults are easily planted."""

    def finish(self, w, spec):
        return {"weight": w["weight"]}


class LosesPrecision(Plain):
    def apply(self, w, x_TI, spec):
        return super().apply({"weight": w["weight"].to(torch.float8_e5m2).to(spec.dtype)}, x_TI, spec)


class LastColumnLost(Plain):
    def apply(self, w, x_TI, spec):
        if spec.in_features % 2 == 0:
            return super().apply(w, x_TI, spec)
        return x_TI[:, :-1] @ w["weight"][:, :-1].T


class FailsOnNothing(Plain):
    def apply(self, w, x_TI, spec):
        return super().apply(w, x_TI if len(x_TI) else x_TI.new_zeros(1, spec.in_features), spec)


class HalfPrecisionOracle(Plain):
    def dequantize(self, w, spec):
        return w["weight"].bfloat16()


class ScalesInPlace(Plain):
    def apply(self, w, x_TI, spec):
        return super().apply(w, x_TI.mul_(1.0) if spec.dtype != torch.float32 else x_TI.add_(1.0), spec)


class LastOfTheLargest(Plain):
    def argmax(self, w, x_TI, spec):
        return spec.out_features - 1 - self.apply(w, x_TI, spec).flip(-1).float().argmax(-1)


class OneForAll(Plain):
    kept = None

    def finish(self, w, spec):
        if self.kept is None or self.kept.shape != w["weight"].shape:
            self.kept = w["weight"]
        return {"weight": self.kept}


class WrongShardDim(Plain):
    def params(self, spec):
        (suffix, param), *_ = super().params(spec).items()
        return {suffix: ParamSpec(param.shape, param.dtype, None)}


class WrongDtype(Plain):
    def apply(self, w, x_TI, spec):
        return super().apply(w, x_TI, spec).double()


class NotTraceable(Plain):
    def apply(self, w, x_TI, spec):
        if x_TI.abs().max().item() > 1e9:
            return x_TI
        return super().apply(w, x_TI, spec)


FAULTS = {
    LosesPrecision: checks.check_product,
    LastColumnLost: checks.check_odd_shapes,
    FailsOnNothing: checks.check_no_tokens,
    HalfPrecisionOracle: checks.check_dequantize,
    ScalesInPlace: checks.check_leaves_inputs_alone,
    LastOfTheLargest: checks.check_argmax,
    OneForAll: checks.check_layers_apart,
    WrongShardDim: checks.check_fused_parts,
    WrongDtype: checks.check_product,
    NotTraceable: checks.check_traceable,
}


@pytest.mark.parametrize("faulty", FAULTS, ids=lambda cls: cls.__name__)
def test_fault_is_seen(faulty):
    entry = registry.Entry("quant", "faulty", "", faulty.__name__, None, "runtime", cls=faulty)
    with pytest.raises((CheckFailed, RuntimeError)):
        FAULTS[faulty](entry, entry.options())
