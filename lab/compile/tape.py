"""Compiled pieces on the CPU, run without Python: Inductor's wrapper of a piece, translated into steps of native/tape.cpp.

The wrapper is a straight line in Python: tensors are made, looked at in another shape, and given to operators and to loops in
C++. Each line costs some microseconds of interpreter, and a decode step of one token has hundreds of them. What is translated
is the text of the wrapper, so it does what Inductor meant; a wrapper with anything else in it stays in Python.
"""

import ast
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab import native

NAMESPACE = "lab_tape"
SOURCES = (Path(__file__).parent / "native" / "tape.cpp",)
FLAGS = ("-O1",)  # it calls what others compute: to optimise it further takes a third longer and runs no faster
REGISTER, SIZE, REAL, FLAG, NOTHING = range(5)  # kinds of arguments, as ArgumentKind in native/tape.cpp
MOST_LOOP_ARGUMENTS = 16


class Untranslatable(Exception):
    """A wrapper has something that no step stands for; the message says what."""


@dataclass(frozen=True, slots=True)
class Size:
    """a * T + b, with T the number of tokens."""

    per_token: int
    fixed: int


@dataclass(frozen=True, slots=True)
class Register:
    """A tensor that a step makes or that is given."""

    number: int


@dataclass(slots=True)
class Step:
    """One call of a Tape's method, or of call_tape: `reads` and `writes` are the registers concerned."""

    method: str
    arguments: tuple[Any, ...]
    reads: set[int]
    writes: set[int]
    dropped: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Translation:
    """The steps of a wrapper. `parameters`: of each argument the register that it belongs in, None for the token count."""

    steps: list[Step]
    num_registers: int
    parameters: list[int | None]
    outputs: list[int]


class TapeUnit:
    """A piece's tape. Layers share it; each binds its own weights."""

    def __init__(self, translation: Translation) -> None:
        self._parameters = translation.parameters
        self._tape = made_of(translation.steps, translation.num_registers)
        self._outputs = translation.outputs

    def bind(self, template: list[Any], values: Sequence[tuple[int, int]]) -> "TapeRun":
        """As Unit.bind has it."""
        source = dict(values)
        tokens = self._parameters.index(None)
        inputs = [position for position in source if position != tokens]
        weights = [position for position in range(len(template)) if position not in source]
        bound = torch.classes.lab_tape.BoundTape(
            self._tape,
            [self._parameters[position] for position in weights],
            [template[position] for position in weights],
            [self._parameters[position] for position in inputs],
            self._outputs,
        )
        return TapeRun(bound, [source[position] for position in inputs], source[tokens])


class TapeRun:
    """Runs a bound tape on the registers of a program."""

    __slots__ = ("_address", "_run", "_tokens", "bound", "inputs")

    def __init__(self, bound: Any, inputs: list[int], tokens: int) -> None:
        self.bound = bound  # lives as long as its address is in use
        self.inputs = inputs
        self._tokens = tokens
        self._run, self._address = torch.ops.lab_tape.run.default, bound.address()

    def __call__(self, registers: list[Any]) -> Sequence[torch.Tensor]:
        return self._run(self._address, [registers[at] for at in self.inputs], registers[self._tokens])


def made_of(steps: Sequence[Step], num_registers: int) -> Any:
    """The Tape of these steps."""
    tape = torch.classes.lab_tape.Tape(num_registers)
    for step in steps:
        if step.method == "call_tape":
            torch.ops.lab_tape.call_tape(tape, *step.arguments, step.dropped)
        else:
            getattr(tape, step.method)(*step.arguments, step.dropped)
    return tape


def drop_unneeded(steps: Sequence[Step], kept: set[int]) -> None:
    """Tell each step which registers nothing behind it needs; `kept` are those that are needed at the end."""
    needed = set(kept)
    for step in reversed(steps):
        step.dropped = sorted((step.reads | step.writes) - needed)
        needed |= step.reads | step.writes


def load() -> None:
    """Build or find the library of tapes. Raises BuildError where it cannot be built."""
    native.load(NAMESPACE, SOURCES, flags=FLAGS)


def address_of(library: Path) -> int:
    """Where the loop of a kernel's library is in memory. The library stays loaded."""
    return ctypes.cast(ctypes.CDLL(str(library)).kernel, ctypes.c_void_p).value


def translate(source: str, loops: Mapping[str, int]) -> Translation:
    """The steps of a wrapper's text; `loops` are the addresses of the kernels that it calls by name.

    Raises:
        Untranslatable: it holds what no step stands for.
    """
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise Untranslatable("not one function 'call'")
    return _Translator(loops).translate(functions[0].body)


class _Translator:
    def __init__(self, loops: Mapping[str, int]) -> None:
        self._loops = loops
        self._values: dict[str, Any] = {}  # what each name stands for
        self._parameters: list[int | None] = []
        self._steps: list[Step] = []
        self._num_registers = 0

    def translate(self, body: list[ast.stmt]) -> Translation:
        outputs: list[int] | None = None
        for statement in body:
            match statement:
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Name(id="args")):
                    self._take_parameters([name.id for name in names])
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._assign(name, value)
                case ast.Expr(value=ast.Call(func=ast.Name(id=loop), args=arguments)) if loop in self._loops:
                    self._call_loop(loop, arguments)
                case ast.Return(value=ast.Tuple(elts=values)):
                    outputs = [self._register(value) for value in values]
                case ast.Delete() | ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="args"), attr="clear"))):
                    pass  # registers are dropped behind their last use
                case ast.If(body=[ast.Raise()], orelse=[]):
                    self._check_assertion(statement.test)
                case _:
                    raise Untranslatable(ast.unparse(statement))
        if outputs is None or self._parameters.count(None) != 1:
            raise Untranslatable("no result, or not one token count")
        drop_unneeded(self._steps, set(outputs))
        return Translation(self._steps, self._num_registers, self._parameters, outputs)

    def _take_parameters(self, names: list[str]) -> None:
        for name in names:
            self._values[name] = self._new_register()
            self._parameters.append(self._values[name].number)

    def _assign(self, name: str, value: ast.expr) -> None:
        if name[0] in "us" and name[1:].isdigit() and isinstance(value, ast.Name):  # Inductor's name of a size
            self._parameters[self._parameters.index(self._values[value.id].number)] = None
            self._values[name] = Size(1, 0)
        else:
            self._values[name] = self._value(value)

    def _check_assertion(self, test: ast.expr) -> None:
        """What is asserted of sizes alone holds for every number of tokens from one on."""
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        if not all(isinstance(self._values.get(name), Size) for name in names):
            raise Untranslatable(ast.unparse(test))

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._values:
                return self._values[name]
            case ast.Tuple(elts=elements):
                return [self._value(element) for element in elements]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as operator, right=right):
                return _arithmetic(operator, self._size(left), self._size(right))
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=index)):
                return self._values[name][index]
            case ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[tensor, sizes, strides, offset], keywords=[]):
                return self._view(self._register(tensor), self._pairs(sizes), self._pairs(strides), _pair(self._size(offset)))
            case ast.Call(func=ast.Name(id="empty_strided_cpu"), args=[sizes, strides, dtype], keywords=[]):
                return self._new_tensor(self._pairs(sizes), self._pairs(strides), ast.unparse(dtype))
            case ast.Call(func=ast.Attribute() as operator, args=arguments, keywords=named):
                return self._call_operator(ast.unparse(operator), arguments, named)
        raise Untranslatable(ast.unparse(node))

    def _size(self, node: ast.expr) -> Size:
        value = self._value(node)
        if isinstance(value, Size):
            return value
        if type(value) is int:
            return Size(0, value)
        raise Untranslatable(f"{ast.unparse(node)} as a size")

    def _register(self, node: ast.expr) -> int:
        value = self._value(node)
        if not isinstance(value, Register):
            raise Untranslatable(f"{ast.unparse(node)} as a tensor")
        return value.number

    def _pairs(self, node: ast.expr) -> list[int]:
        if not isinstance(node, ast.Tuple):
            raise Untranslatable(f"{ast.unparse(node)} as a shape")
        return [number for element in node.elts for number in _pair(self._size(element))]

    def _new_register(self) -> Register:
        self._num_registers += 1
        return Register(self._num_registers - 1)

    def _view(self, of: int, sizes: list[int], strides: list[int], offset: list[int]) -> Register:
        made = self._new_register()
        self._steps.append(Step("view", (of, made.number, sizes, strides, offset), {of}, {made.number}))
        return made

    def _new_tensor(self, sizes: list[int], strides: list[int], dtype: str) -> Register:
        found = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise Untranslatable(f"{dtype} as a dtype")
        made = self._new_register()
        self._steps.append(Step("new_tensor", (made.number, torch.empty(0, dtype=found), sizes, strides), set(), {made.number}))
        return made

    def _call_loop(self, name: str, nodes: list[ast.expr]) -> None:
        if len(nodes) > MOST_LOOP_ARGUMENTS:
            raise Untranslatable(f"{len(nodes)} arguments of {name}")
        arguments, reads = self._arguments([self._value(node) for node in nodes])
        if not set(arguments[::3]) <= {REGISTER, SIZE}:
            raise Untranslatable(f"the arguments of {name}")
        self._steps.append(Step("call_loop", (self._loops[name], arguments), reads, set()))

    def _call_operator(self, path: str, nodes: list[ast.expr], named: list[ast.keyword]) -> Register | list[Register]:
        match path.split("."):
            case ["torch", "ops", namespace, name, overload]:
                operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
            case _:
                raise Untranslatable(path)
        schema = operator._schema
        values = [self._value(node) for node in nodes]
        by_name = {keyword.arg: self._value(keyword.value) for keyword in named}
        for parameter in schema.arguments[len(values) :]:
            if parameter.name not in by_name and not parameter.has_default_value():
                raise Untranslatable(f"{path} without its {parameter.name}")
            values.append(by_name.pop(parameter.name, parameter.default_value))
        if by_name:
            raise Untranslatable(f"{path} with {', '.join(map(str, by_name))}")
        values = [_fitted(parameter, value, path) for parameter, value in zip(schema.arguments, values, strict=True)]
        if not all(str(result.type) == "Tensor" for result in schema.returns):
            raise Untranslatable(f"{path}, which returns something else than tensors")
        made = [self._new_register() for _ in schema.returns]
        writes = [register.number for register in made]
        reals = [value for value in values if type(value) is float]
        arguments, reads = self._arguments(values)
        name, _, overload = operator._name.partition(".")
        step = ("call_operator", (name, overload, arguments, reals, writes), reads, set(writes))
        self._steps.append(Step(*step))
        return made[0] if len(made) == 1 else made

    @staticmethod
    def _arguments(values: list[Any]) -> tuple[list[int], set[int]]:
        """Arguments as call_operator takes them, (kind, a, b) one behind the other, and the registers among them."""
        flat, reads, num_reals = [], set(), 0
        for value in values:
            if isinstance(value, Register):
                flat += [REGISTER, value.number, 0]
                reads.add(value.number)
            elif isinstance(value, Size):
                flat += [SIZE, value.per_token, value.fixed]
            elif value is None:
                flat += [NOTHING, 0, 0]
            elif isinstance(value, bool):
                flat += [FLAG, int(value), 0]
            elif isinstance(value, int):
                flat += [SIZE, 0, value]
            elif isinstance(value, float):
                flat += [REAL, num_reals, 0]
                num_reals += 1
            else:
                raise Untranslatable(f"{value!r} as an argument")
        return flat, reads


def _fitted(parameter: Any, value: Any, path: str) -> Any:
    """The value as the parameter's type wants it, which Python would see to, and the dispatcher does not."""
    kind = str(parameter.type)
    if kind == "Tensor" and not isinstance(value, Register):
        raise Untranslatable(f"{path} with a number for its {parameter.name}")
    return float(value) if kind == "float" and type(value) is int else value


def _pair(size: Size) -> list[int]:
    return [size.per_token, size.fixed]


def _arithmetic(operator: ast.operator, left: Size, right: Size) -> Size:
    match operator:
        case ast.Add():
            return Size(left.per_token + right.per_token, left.fixed + right.fixed)
        case ast.Sub():
            return Size(left.per_token - right.per_token, left.fixed - right.fixed)
    if left.per_token and right.per_token:
        raise Untranslatable("a size that grows with the square of the tokens")
    return Size(left.per_token * right.fixed + right.per_token * left.fixed, left.fixed * right.fixed)
