"""A whole forward pass on the CPU without Python: the tapes of a program's pieces, with attention's operators between them.

Python then makes one call a step in place of some three a layer, which for one token of a small model take as long as the
pieces. It serves where every piece is a tape and every attention backend says what operators it comes down to.
"""

from collections.abc import Sequence

import torch

from lab.compile.program import INPUT_IDS, POSITIONS, STATES, AttentionCall, BoundCall, Program
from lab.compile.tape import REGISTER, Step, TapeRun, drop_unneeded, made_of
from lab.context import ForwardContext
from lab.contracts.attention import OperatorCall


def chain_of(program: Program, calls: Sequence[BoundCall | AttentionCall], step: ForwardContext) -> "Chain | None":
    """The chain for steps with this one's backends and caches; None where some call of the program needs Python."""
    if any(isinstance(call, BoundCall) and not isinstance(call.run, TapeRun) for call in calls):
        return None
    operators = {id(backend): backend.operators() for backend in step.backends}
    if any(found is None for found in operators.values()):
        return None
    return Chain(program, calls, step, operators)


class Chain:
    """A program as one tape, for one KV store. Registers past the program's hold the caches, and what a step's plans hold."""

    def __init__(
        self,
        program: Program,
        calls: Sequence[BoundCall | AttentionCall],
        step: ForwardContext,
        operators: dict[int, Sequence[OperatorCall]],
    ) -> None:
        self._num_registers = program.num_registers
        self._caches: dict[int, int] = {}  # layer -> register
        self._sources: dict[tuple[int, str], tuple[int, int]] = {}  # (backend, name) -> (register, a layer of the backend)
        steps: list[Step] = []
        for call in calls:
            if isinstance(call, BoundCall):
                steps.append(_tape_step(call))
                continue
            backend = id(step.backends[call.layer])
            for operator in operators[backend]:
                registers = [self._register(name, call, backend) for name in operator.arguments]
                steps.append(_operator_step(operator, registers))
        drop_unneeded(steps, {program.output})
        of_model = [INPUT_IDS, POSITIONS, STATES] if program.takes_states else [INPUT_IDS, POSITIONS]
        inputs = [*of_model, *(register for register, _ in self._sources.values())]
        caches = [step.kv[layer] for layer in self._caches]
        tape = made_of(steps, self._num_registers)
        self._bound = torch.classes.lab_tape.BoundTape(tape, list(self._caches.values()), caches, inputs, [program.output])
        self._run, self._address = torch.ops.lab_tape.run.default, self._bound.address()
        self._names = [(name, layer) for (_, name), (_, layer) in self._sources.items()]

    def run(self, inputs: list[torch.Tensor], step: ForwardContext) -> torch.Tensor:
        """hidden_TD of a step with the caches that the chain was made for. `inputs`: ids, positions, and states if any."""
        batches, plans = step.batches, step.plans
        given = [batches[layer].slots_T if name == "slots" else getattr(plans[layer], name) for name, layer in self._names]
        return self._run(self._address, [*inputs, *given], len(inputs[0]))[0]

    def _register(self, name: str, call: AttentionCall, backend: int) -> int:
        """Where an argument of an attention operator lies."""
        if name in ("q", "k", "v", "out"):
            return getattr(call, name)
        if name == "kv":
            if call.layer not in self._caches:
                self._caches[call.layer] = self._new_register()
            return self._caches[call.layer]
        if (backend, name) not in self._sources:
            self._sources[backend, name] = (self._new_register(), call.layer)
        return self._sources[backend, name][0]

    def _new_register(self) -> int:
        self._num_registers += 1
        return self._num_registers - 1


def _tape_step(call: BoundCall) -> Step:
    inputs, outputs = call.run.inputs, list(call.outputs)
    return Step("call_tape", (call.run.bound, inputs, outputs), set(inputs), set(outputs))


def _operator_step(call: OperatorCall, registers: list[int]) -> Step:
    name, _, overload = call.operator._name.partition(".")
    arguments = [number for register in registers for number in (REGISTER, register, 0)]
    return Step("call_operator", (name, overload, arguments, [], []), set(registers), set())
