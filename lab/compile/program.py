"""A captured forward pass as plain data, and what its calls come to for one model.

A `Program` is a straight line of calls over numbered registers: compiled units, and attention between them. It holds no
tensors: weights are named, so that it can be kept as JSON and bound to any model of the same shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

Run = Callable[[list[Any]], Sequence[Any]]  # from the registers to the values of a call's outputs

NUM_TOKENS, INPUT_IDS, POSITIONS, STATES = range(4)  # the registers that hold the inputs


@dataclass(frozen=True, slots=True)
class UnitCall:
    """Call unit number `unit`. Its arguments are, in any order, weights and registers, each with its position."""

    unit: int
    num_args: int
    weights: tuple[tuple[int, str], ...]  # (position, name of a buffer of the model)
    values: tuple[tuple[int, int], ...]  # (position, register)
    outputs: tuple[int, ...]  # registers


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Call the attention of `layer` on these registers; it writes into `out`."""

    q: int
    k: int
    v: int
    out: int
    layer: int


@dataclass(frozen=True, slots=True)
class Program:
    """The calls of a forward pass, and the register that holds hidden_TD at its end. A draft head's begins with states, too."""

    num_units: int
    num_registers: int
    calls: tuple[UnitCall | AttentionCall, ...]
    output: int
    takes_states: bool = False

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> "Program":
        """The inverse of `to_plain`, after a way through JSON."""
        calls = tuple(_call_from_plain(call) for call in data["calls"])
        return cls(data["num_units"], data["num_registers"], calls, data["output"], data["takes_states"])


def _call_from_plain(call: dict[str, Any]) -> UnitCall | AttentionCall:
    if "layer" in call:
        return AttentionCall(**call)
    pairs = {name: tuple((position, value) for position, value in call[name]) for name in ("weights", "values")}
    return UnitCall(call["unit"], call["num_args"], **pairs, outputs=tuple(call["outputs"]))


class Unit(Protocol):
    """A compiled piece."""

    def bind(self, template: list[Any], values: Sequence[tuple[int, int]]) -> Run:
        """What runs the piece. `template` holds its arguments, with None at the positions of `values`: (position, register)."""


@dataclass(frozen=True, slots=True)
class BoundCall:
    """A unit call with its weights in place."""

    unit: Unit
    template: list[Any]
    run: Run
    outputs: tuple[int, ...]


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer and parameter of the model by its dotted name."""
    return dict(model.named_buffers()) | dict(model.named_parameters())
