"""Captures a model's forward pass as one graph and splits it at attention into pieces that layers share.

The token dimension is an unbacked symbol from the start: nothing is known of it but that it is at least 1. A backed symbol
would be traced with an example's size, and torch treats the sizes 0 and 1 as constants, so that a batch of one token would
need a graph of its own; an unbacked one cannot be specialised, and the code made from it holds for every number of tokens.
Dynamo's guards are never evaluated: pieces are called directly, with arguments that have the traced shapes by construction.
"""

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from lab.compile.program import INPUT_IDS, NUM_TOKENS, POSITIONS, STATES, AttentionCall, Program, UnitCall, named_weights

EXAMPLE_TOKENS = 16  # any number does


@dataclass(frozen=True, slots=True)
class Graph:
    """The captured graph. Placeholders named in `weights` are the model's buffers, those in `inputs` are input registers."""

    module: fx.GraphModule
    weights: dict[str, str]
    inputs: dict[str, int]


@dataclass(frozen=True, slots=True)
class Split:
    """A program, and the unique pieces that its units are made from."""

    program: Program
    pieces: list[fx.GraphModule]


def with_graph(model: nn.Module, device: torch.device, use: Callable[[Graph], Any]) -> Any:
    """Capture `model` and give back `use(graph)`; it runs where Dynamo's tracing context is open, as Inductor needs it.

    A model with a `states_width` takes states of so many features beside ids and positions.
    """
    found: list[Any] = []
    names = {id(tensor): name for name, tensor in named_weights(model).items()}

    def backend(module: fx.GraphModule, examples: list[Any]) -> Callable[..., tuple[None]]:
        found.append(use(_graph(module, examples, names)))
        return lambda *_: (None,)

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        return model(*inputs)

    # Dynamo keeps what it compiled with the code object: one of its own makes every capture a fresh one
    fresh = types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    inputs = [torch.zeros(EXAMPLE_TOKENS, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)]
    if model.states_width:
        inputs.append(torch.zeros(EXAMPLE_TOKENS, model.states_width, dtype=model.build.dtype, device=device))
    for tensor in inputs:
        torch._dynamo.decorators.mark_unbacked(tensor, 0, shape_id="tokens", min=1)
    # what differs from the model captured before, such as a norm's epsilon, is still a constant, not an argument
    constants = torch._dynamo.config.patch(specialize_float=True, automatic_dynamic_shapes=False)
    with torch.no_grad(), constants:
        torch.compile(fresh, backend=backend, fullgraph=True)(*inputs)
    (result,) = found
    return result


def _graph(module: fx.GraphModule, examples: list[Any], names: dict[int, str]) -> Graph:
    """Tell weights, inputs and the token count apart among the placeholders."""
    weights, inputs = {}, {}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, example in zip(placeholders, examples, strict=True):
        if isinstance(example, torch.SymInt):
            inputs[node.name] = NUM_TOKENS
        elif id(example) in names:
            weights[node.name] = names[id(example)]
        else:
            inputs[node.name] = {torch.int32: INPUT_IDS, torch.int64: POSITIONS}.get(example.dtype, STATES)
    return Graph(module, weights, inputs)


def split_at_attention(graph: Graph) -> Split:
    """Pieces between the attention calls, alike ones once."""
    part_of: dict[fx.Node, int] = {}
    part = 0
    for node in graph.module.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_attention(node):
            part_of[node], part = part + 1, part + 2
        else:
            part_of[node] = part
    whole = split_module(graph.module, None, part_of.__getitem__, keep_original_order=True)
    return _Assembler(graph, whole).assemble()


def unsplit(graph: Graph) -> Split:
    """The whole graph as one piece, attention inside."""
    whole = split_module(graph.module, None, lambda _: 0, keep_original_order=True)
    return _Assembler(graph, whole).assemble()


def _is_attention(node: fx.Node) -> bool:
    return node.target in (torch.ops.lab.attention, torch.ops.lab.attention.default)


class _Assembler:
    """Turns a split graph, whose nodes are calls of submodules, into a program."""

    def __init__(self, graph: Graph, whole: fx.GraphModule) -> None:
        self._graph = graph
        self._whole = whole
        self._pieces: list[fx.GraphModule] = []
        self._unit_of: dict[str, int] = {}  # fingerprint of a piece -> its unit
        self._registers: dict[fx.Node, int] = {}
        self._last_use: dict[fx.Node, int] = {}
        self._free: list[int] = []
        self._num_registers = STATES + 1

    def assemble(self) -> Split:
        nodes = [node for node in self._whole.graph.nodes if node.op == "call_module"]
        (output,) = (node for node in self._whole.graph.nodes if node.op == "output")
        values = self._values(nodes)
        self._find_last_uses(nodes, values)
        for node in self._whole.graph.nodes:
            if node.op == "placeholder" and node.name in self._graph.inputs:
                self._registers[node] = self._graph.inputs[node.name]
        (result,) = output.args[0] if isinstance(output.args[0], tuple | list) else output.args
        self._last_use[result] = len(nodes)
        calls = []
        for index, node in enumerate(nodes):
            piece = getattr(self._whole, node.target)
            attention = next((n for n in piece.graph.nodes if _is_attention(n)), None)
            if attention is not None and len(self._ops(piece)) == 1:
                calls.append(self._attention_call(node, piece, attention))
            else:
                calls.append(self._unit_call(index, node, piece, values[node]))
            self._release(index)
        takes_states = STATES in self._graph.inputs.values()
        program = Program(len(self._pieces), self._num_registers, tuple(calls), self._registers[result], takes_states)
        return Split(program, self._pieces)

    @staticmethod
    def _ops(piece: fx.GraphModule) -> list[fx.Node]:
        return [n for n in piece.graph.nodes if n.op not in ("placeholder", "output")]

    @staticmethod
    def _values(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """For each piece's call the nodes that stand for its outputs, in order."""
        values = {}
        for node in nodes:
            getters = [user for user in node.users if user.op == "call_function" and "getitem" in user.name]
            values[node] = sorted(getters, key=lambda getter: getter.args[1]) if getters else [node]
        return values

    def _find_last_uses(self, nodes: list[fx.Node], values: dict[fx.Node, list[fx.Node]]) -> None:
        for index, node in enumerate(nodes):
            for argument in node.args:
                self._last_use[argument] = index
            for value in values[node]:
                self._last_use.setdefault(value, index)

    def _release(self, index: int) -> None:
        """Registers whose value is not needed after call `index` may be written again."""
        for node, register in list(self._registers.items()):
            if self._last_use.get(node) == index and register > STATES:
                self._free.append(register)
                del self._last_use[node]

    def _register_for(self, node: fx.Node) -> int:
        if self._free:
            self._registers[node] = self._free.pop()
        else:
            self._registers[node] = self._num_registers
            self._num_registers += 1
        return self._registers[node]

    def _attention_call(self, node: fx.Node, piece: fx.GraphModule, attention: fx.Node) -> AttentionCall:
        placeholders = [n for n in piece.graph.nodes if n.op == "placeholder"]
        outer = dict(zip(placeholders, node.args, strict=True))
        q, k, v, out, layer = (*attention.args, *attention.kwargs.values())
        return AttentionCall(*(self._registers[outer[n]] for n in (q, k, v, out)), layer=layer)

    def _unit_call(self, index: int, node: fx.Node, piece: fx.GraphModule, outputs: list[fx.Node]) -> UnitCall:
        fingerprint = fingerprint_of(piece)
        unit = self._unit_of.setdefault(fingerprint, len(self._pieces))
        if unit == len(self._pieces):
            self._pieces.append(piece)
        weights, values = [], []
        for position, argument in enumerate(node.args):
            if argument.name in self._graph.weights:
                weights.append((position, self._graph.weights[argument.name]))
            else:
                values.append((position, self._registers[argument]))
        registers = tuple(self._register_for(value) for value in outputs)
        return UnitCall(unit, len(node.args), tuple(weights), tuple(values), registers)


def fingerprint_of(piece: fx.GraphModule) -> str:
    """A text that two pieces share exactly when one may be called in place of the other: names left out, shapes left in."""
    number = {node: index for index, node in enumerate(piece.graph.nodes)}
    lines = []
    for node in piece.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        target = "" if node.op in ("placeholder", "output") else node.target
        lines.append(f"{node.op} {target} {args} {kwargs} {_shape(node) if node.op == 'placeholder' else ''}")
    return "\n".join(lines)


def _shape(node: fx.Node) -> str:
    example = node.meta["example_value"]
    if isinstance(example, torch.Tensor):
        return f"{example.dtype} {example.device} {tuple(example.shape)} {example.stride()}"
    return str(example)
