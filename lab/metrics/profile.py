"""Where the time of a step goes: from the slices of a trace and the operators of some steps to a table. Torch-free.

There is a table of steps that only decode, and one of steps that only compute prompts.

A step lasts from the moment the runner takes it to the moment it takes the next one, idle waiting for requests left out. The
parts are disjoint and add up to it: each slice counts without those nested in it, an operator without the rest of its piece.
What the engine's thread does while the runner computes costs nothing and is told apart (`hidden_ms`).
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lab.metrics.costs import ATTEND, ELEMENTWISE, LM_HEAD, SAMPLE, WRITE, Cost, ModelCosts, StepShape
from lab.metrics.roofline import Floors
from lab.metrics.trace import Node, Slice, nested

DECODE_STEP, PREFILL_STEP = "decode step", "prefill step"
OTHER, GRAPHS, LINEARS = "other", "graphs", "linears"
MODEL, PIECE = "model", "piece"  # slices that hold operators: the whole forward pass, and a compiled piece of it
PART_OF = {  # slices on the runner's track
    "batch": "batch",
    "plan": "plan",
    PIECE: ELEMENTWISE,  # what is left of it
    "graph": GRAPHS,
    WRITE: WRITE,
    ATTEND: ATTEND,
    LM_HEAD: LM_HEAD,
    SAMPLE: SAMPLE,
    "take greedy": SAMPLE,  # which reads no logits
    "propose": "propose",
}
ENGINE_PART_OF = {"schedule": "scheduler", "update": "scheduler", "output": "output", "record": "output"}
IDLE = "idle"
ATTENTION_OPERATOR = "lab::attention"  # its time is in slices of its own
ORDER = ("scheduler", "batch", "plan", ELEMENTWISE)  # the parts before the linears; these are the ones after
ORDER_AFTER = (GRAPHS, WRITE, ATTEND, LM_HEAD, SAMPLE, "propose", "output", OTHER)


class Timed(Protocol):
    """An operator: see lab.metrics.operators."""

    name: str
    begin_ns: int
    end_ns: int

    @property
    def ms(self) -> float: ...

    @property
    def middle_ns(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Linears:
    """How a step's linear layers are known among its operators.

    Args:
        operators: names of operators that only linear layers use.
        names: what the linear layers are called, in the order in which a step runs them.
    """

    operators: frozenset[str]
    names: Sequence[str]

    def pick(self, operators: Iterable[Timed]) -> list[Timed]:
        """Those operators that are linear layers."""
        return [operator for operator in operators if operator.name in self.operators]

    def is_complete(self, step: "WatchedStep") -> bool:
        """Whether each layer has an operator in this step."""
        return len(self.pick(op for op, _ in step.of_model())) == len(self.names)

    def named(self, found: Sequence[Timed]) -> dict[int, str]:
        """The name of each operator picked, by its identity.

        Where they are more or fewer than the layers, as with fused ones, they cannot be told apart: all are `linears`.
        """
        names = self.names if len(found) == len(self.names) else [LINEARS] * len(found)
        return {id(operator): name for operator, name in zip(found, names, strict=True)}


@dataclass(frozen=True, slots=True)
class WatchedStep:
    """A watched step: its slices, its operators, its shape, and when the runner took the next step."""

    node: Node
    operators: Sequence[Timed]
    shape: StepShape
    next_ns: int

    @property
    def kind(self) -> str:
        return self.node.slice.name

    def of_model(self) -> list[tuple[Timed, str]]:
        """The operators of the forward pass without attention's, each with the kind of slice it is in."""
        inside = ((op, _kind(self.node.innermost(op.middle_ns))) for op in self.operators if op.name != ATTENTION_OPERATOR)
        return [(op, kind) for op, kind in inside if kind in (MODEL, PIECE)]


class EngineTime:
    """What the engine's thread did, to be asked for any span of time."""

    def __init__(self, slices: Iterable[Slice]) -> None:
        known = (s for s in slices if s.name in ENGINE_PART_OF or s.name == IDLE)
        self._slices = sorted(known, key=lambda s: s.begin_ns)
        self._ends = [s.end_ns for s in self._slices]

    def within(self, begin_ns: int, end_ns: int) -> Counter[str]:
        """Milliseconds of each of the engine's parts, and of waiting for requests, between two moments."""
        found: Counter[str] = Counter()
        for slice_ in self._slices[bisect_right(self._ends, begin_ns) :]:
            if slice_.begin_ns >= end_ns:
                break
            overlap_ns = min(slice_.end_ns, end_ns) - max(slice_.begin_ns, begin_ns)
            found[ENGINE_PART_OF.get(slice_.name, IDLE)] += overlap_ns / 1e6
        return found


def watched_steps(
    slices: Sequence[Slice], operators: Mapping[int, Sequence[Timed]], shapes: Mapping[int, StepShape]
) -> list[WatchedStep]:
    """The steps whose operators were recorded, in order; one that nothing follows has no known end and is left out.

    `operators` and `shapes` are theirs by the number of the step, which stands in the slice's args.
    """
    roots = nested(slices)
    found = []
    for place, node in enumerate(roots[:-1]):
        number = node.slice.args["step"] if node.slice.args else None
        if number in shapes:
            found.append(WatchedStep(node, operators[number], shapes[number], roots[place + 1].slice.begin_ns))
    return found


def largest_prefills(steps: Sequence[WatchedStep]) -> list[WatchedStep]:
    """Of the steps that only computed prompts those with the most tokens; the first one, which memory and caches are new to,
    only if there is no other.
    """
    prefills = [step for step in steps if step.kind == PREFILL_STEP]
    most = max((step.shape.num_tokens for step in prefills), default=0)
    found = [step for step in prefills if step.shape.num_tokens == most]
    return found[1:] if len(found) > 1 and found[0] is prefills[0] else found


def parts_of(step: WatchedStep, linears: Linears, engine: EngineTime) -> Counter[str]:
    """Milliseconds of each part of one step."""
    parts: Counter[str] = Counter()
    for node in step.node.walk():
        parts[PART_OF.get(_kind(node), OTHER)] += node.own_ms
    inside = step.of_model()
    name_of = linears.named(linears.pick(op for op, _ in inside))
    for op, kind in inside:
        parts[name_of.get(id(op), ELEMENTWISE)] += op.ms
        parts[PART_OF.get(kind, OTHER)] -= op.ms
    between = engine.within(step.node.slice.end_ns, step.next_ns)
    idle_ms = between.pop(IDLE, 0.0)
    parts.update(between)
    gap_ms = (step.next_ns - step.node.slice.end_ns) / 1e6 - idle_ms
    parts[OTHER] += max(gap_ms - between.total(), 0.0)
    return parts


def operator_slices(steps: Sequence[WatchedStep], linears: Linears) -> Iterator[Slice]:
    """The operators of the steps' forward passes as slices of the runner's track, linear layers by their names."""
    for step in steps:
        inside = [op for op, _ in step.of_model()]
        names = linears.named(linears.pick(inside))
        for op in inside:
            begin_ns, end_ns = step.node.innermost(op.middle_ns).own_span(op.middle_ns)  # the clocks differ a little
            yield Slice(names.get(id(op), op.name), max(op.begin_ns, begin_ns), min(op.end_ns, end_ns))


def _kind(node: Node) -> str:
    """A slice's name, without the number of a piece."""
    name = node.slice.name
    return PIECE if name.startswith(PIECE) else name


def table(
    steps: Sequence[WatchedStep], linears: Linears, engine: EngineTime, costs: ModelCosts, floors: Floors
) -> dict[str, Any]:
    """A `profile` section of metrics.json, from at least one step, all of one kind; the figures are means over the steps.

    When the thread is interrupted at a bad moment, an operator may seem to lie in another slice. Steps where one of the
    linear layers is missing are left out, unless that is so in all of them.
    """
    steps = [step for step in steps if linears.is_complete(step)] or steps
    num = len(steps)
    ms: Counter[str] = Counter()
    hidden: Counter[str] = Counter()
    spent: dict[str, Cost] = {}
    floor_ms = 0.0
    for step in steps:
        ms.update(parts_of(step, linears, engine))
        hidden.update(engine.within(step.node.slice.begin_ns, step.node.slice.end_ns))
        reads_logits = any(node.slice.name == SAMPLE for node in step.node.walk())
        for name, cost in costs.of_step(step.shape, reads_logits=reads_logits).items():
            spent[name] = spent.get(name, Cost()) + cost
        floor_ms += floors.step_s(0, sum(step.shape.ctx_lens)) * 1e3
    merged = _merged(spent, ms)
    total_ms = ms.total() / num
    total = sum((cost for name, cost in merged.items() if name in ms), Cost())
    floor_ms = max(floor_ms / num, total.flops / num / floors.peak_flops * 1e3)
    hidden.pop(IDLE, None)
    return {
        "steps": [step.node.slice.args["step"] for step in steps],
        "num_requests": sum(len(step.shape.q_lens) for step in steps) / num,
        "num_tokens": sum(step.shape.num_tokens for step in steps) / num,
        "context": sum(sum(step.shape.ctx_lens) / len(step.shape.ctx_lens) for step in steps) / num,
        "runner_ms": sum(step.node.slice.ms for step in steps) / num,
        "modes": dict(Counter(step.node.slice.args["mode"] for step in steps)),
        "bandwidth_gb_s": floors.bandwidth / 1e9,
        "peak_gflop_s": floors.peak_flops / 1e9,
        "total": {**_line(steps[0].kind, total_ms, total_ms, _over(total, num), floors), "floor_ms": floor_ms},
        "parts": [
            _line(name, ms[name] / num, total_ms, _over(merged[name], num) if name in merged else None, floors)
            for name in _ordered(ms, linears)
        ],
        "hidden_ms": {name: value / num for name, value in hidden.items()},
    }


def _merged(spent: dict[str, Cost], ms: Counter[str]) -> dict[str, Cost]:
    """Costs by the parts that were told apart: of graphs that are replayed whole, and of linears that were not named."""
    merged = dict(spent)
    together = GRAPHS if GRAPHS in ms else LINEARS if LINEARS in ms else None
    if together is not None:
        unseen = [name for name in spent if name not in ms and name not in (LM_HEAD, SAMPLE)]
        merged[together] = sum((merged.pop(name) for name in unseen), Cost())
    return merged


def _ordered(ms: Counter[str], linears: Linears) -> Iterator[str]:
    for name in (*ORDER, *dict.fromkeys(linears.names), LINEARS, *ORDER_AFTER):
        if name in ms:
            yield name


def _over(cost: Cost, num: int) -> Cost:
    return Cost(cost.bytes / num, cost.flops / num)


def _line(name: str, ms: float, total_ms: float, cost: Cost | None, floors: Floors) -> dict[str, Any]:
    """One row; a part that moves and computes nothing worth counting has a time and a share only."""
    line: dict[str, Any] = {"name": name, "ms": ms, "share": ms / total_ms if total_ms else 0.0}
    if cost is None:
        return line
    line |= {"bytes": cost.bytes, "flops": cost.flops}
    line["floor_ms"] = max(cost.bytes / floors.bandwidth, cost.flops / floors.peak_flops) * 1e3
    if ms > 0:
        line["gb_per_s"], line["gflop_per_s"] = cost.bytes / ms / 1e6, cost.flops / ms / 1e6
        line["bandwidth_share"] = cost.bytes / ms * 1e3 / floors.bandwidth
        line["peak_share"] = cost.flops / ms * 1e3 / floors.peak_flops
    return line
