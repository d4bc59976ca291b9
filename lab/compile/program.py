"""A captured forward pass as plain data, and the object that runs it.

A `Program` is a straight line of calls over numbered registers: compiled units, and attention between them. It holds no
tensors: weights are named, so that it can be kept as JSON and bound to any model of the same shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lab.model.layers.attention import run_attention
from lab.types import Watch

Run = Callable[[list[Any]], Sequence[Any]]  # from the registers to the values of a call's outputs

NUM_TOKENS, INPUT_IDS, POSITIONS = range(3)  # the registers that hold the inputs


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
    """The calls of a forward pass, and the register that holds hidden_TD at its end."""

    num_units: int
    num_registers: int
    calls: tuple[UnitCall | AttentionCall, ...]
    output: int

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> "Program":
        """The inverse of `to_plain`, after a way through JSON."""
        calls = tuple(_call_from_plain(call) for call in data["calls"])
        return cls(data["num_units"], data["num_registers"], calls, data["output"])


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


class Executable:
    """A program with its units, bound to a model's weights. Called like the model itself, in an open forward context."""

    def __init__(self, program: Program, units: list[Unit], model: nn.Module) -> None:
        weights = named_weights(model)
        self.program = program
        self.calls: list[BoundCall | AttentionCall] = []
        for call in program.calls:
            if isinstance(call, AttentionCall):
                self.calls.append(call)
                continue
            template: list[Any] = [None] * call.num_args
            for position, name in call.weights:
                template[position] = weights[name]
            unit = units[call.unit]
            self.calls.append(BoundCall(unit, template, unit.bind(template, call.values), call.outputs))

    def watch(self, watch: Watch) -> None:
        """Let each unit's calls be timed, as `piece` and its number."""
        for index, (call, bound) in enumerate(zip(self.program.calls, self.calls, strict=True)):
            if isinstance(call, UnitCall):
                self.calls[index] = dataclasses.replace(bound, run=watch(f"piece {call.unit}", bound.run))

    def registers(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> list[Any]:
        """Fresh registers that hold the inputs."""
        registers: list[Any] = [None] * self.program.num_registers
        registers[NUM_TOKENS], registers[INPUT_IDS], registers[POSITIONS] = len(input_ids_T), input_ids_T, positions_T
        return registers

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        registers = self.registers(input_ids_T, positions_T)
        for call in self.calls:
            if type(call) is AttentionCall:
                attend(call, registers)
                continue
            for register, value in zip(call.outputs, call.run(registers), strict=True):
                registers[register] = value
        return registers[self.program.output]


def attend(call: AttentionCall, registers: list[Any]) -> None:
    """Run one attention call on the registers."""
    run_attention(registers[call.q], registers[call.k], registers[call.v], registers[call.out], call.layer)


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every buffer and parameter of the model by its dotted name."""
    return dict(model.named_buffers()) | dict(model.named_parameters())
