"""Runs a captured program on a model: its pieces and attention one by one, or as one chain where none of them needs Python."""

import dataclasses
from typing import Any

import torch
from torch import nn

from lab import context
from lab.compile.chain import Chain, chain_of
from lab.compile.program import (
    INPUT_IDS,
    NUM_TOKENS,
    POSITIONS,
    STATES,
    AttentionCall,
    BoundCall,
    Program,
    Unit,
    UnitCall,
    named_weights,
)
from lab.context import ForwardContext
from lab.model.layers.attention import run_attention
from lab.types import Watch


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
        self._chain: Chain | None = None
        self._chained: list[torch.Tensor] | None = None  # the caches of the steps that `_chain` serves

    def watch(self, watch: Watch) -> None:
        """Let each unit's calls be timed, as `piece` and its number. They are then made one by one."""
        for index, (call, bound) in enumerate(zip(self.program.calls, self.calls, strict=True)):
            if isinstance(call, UnitCall):
                self.calls[index] = dataclasses.replace(bound, run=watch(f"piece {call.unit}", bound.run))
        self._chained = None

    def chain(self, step: ForwardContext) -> Chain | None:
        """The whole program as one call, for the step's caches; None where it cannot be had."""
        if self._chained is not step.kv:
            self._chain, self._chained = chain_of(self.program, self.calls, step), step.kv
        return self._chain

    def registers(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, states_TD: torch.Tensor | None = None
    ) -> list[Any]:
        """Fresh registers that hold the inputs."""
        registers: list[Any] = [None] * self.program.num_registers
        registers[NUM_TOKENS], registers[INPUT_IDS], registers[POSITIONS] = len(input_ids_T), input_ids_T, positions_T
        registers[STATES] = states_TD
        return registers

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, states_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`states_TD`, contiguous, for a program that takes them."""
        step = context.current()
        chain = self.chain(step)
        if chain is not None:
            inputs = [input_ids_T, positions_T] if states_TD is None else [input_ids_T, positions_T, states_TD]
            return chain.run(inputs, step)
        registers = self.registers(input_ids_T, positions_T, states_TD)
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
