"""A profiled run (`profile=true`): watches an ordinary engine, and ends in trace.json and the tables of two kinds of steps.

The parts of the engine are not changed. Each is asked to let its calls be timed (`watch`), before the first request; without
profile nothing is watched, and nothing costs anything.
"""

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lab.engine.engine import Engine
from lab.engine.stack import Stack
from lab.errors import UserError
from lab.metrics.costs import AttentionShape, LinearShape, ModelCosts, StepShape
from lab.metrics.operators import Operator, OperatorRecorder, operator_names
from lab.metrics.profile import (
    DECODE_STEP,
    IDLE,
    PREFILL_STEP,
    EngineTime,
    Linears,
    WatchedStep,
    largest_prefills,
    operator_slices,
    table,
    watched_steps,
)
from lab.metrics.roofline import Floors
from lab.metrics.trace import Mark, Slice, Trace, Track
from lab.model.decoder import Decoder
from lab.model.layers.linear import Linear
from lab.types import Step, StepResult

log = logging.getLogger("lab")

SKIPPED_STEPS = 2  # decode steps before the first one whose operators are recorded
RECORDED_STEPS = 32  # decode steps whose operators are recorded
RECORDED_PREFILLS = 8  # steps of prompts alone, of those before the first decode step
LONGEST_RECORDING = 256  # steps of any kind, from the first to the last of them
SECTIONS = ("profile", "profile_prefill")  # of metrics.json
MATRIX_PRODUCTS = frozenset(  # of which a compiler may put one in another's place
    {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::_int_mm", "mkldnn::_linear_pointwise"}
)


def step_name(step: Step) -> str:
    """What a step is called.

    `decode step`: every row computes the token sampled last and its drafts, and nothing else is computed. `prefill step`: no
    row does that. `mixed step`: some do.
    """
    decoding = [chunk.samples and chunk.num_tokens == 1 + chunk.num_drafts for chunk in step.chunks]
    return DECODE_STEP if all(decoding) else "mixed step" if any(decoding) else PREFILL_STEP


class _Recording:
    """A span of the run in which operators are recorded: of the steps whose numbers are in `steps`."""

    def __init__(self, device: str) -> None:
        self.recorder = OperatorRecorder(device)
        self.steps: list[int] = []
        self.num_left = LONGEST_RECORDING  # steps of any kind

    def operators(self) -> dict[int, list[Operator]]:
        return dict(zip(self.steps, self.recorder.operators(), strict=True))


class Profile:
    """Watches the engine of one run. Make it on the main thread when the engine is ready and no request has been sent."""

    def __init__(self, stack: Stack, floors: Floors) -> None:
        engine = stack.engine
        self._engine = engine
        self._floors = floors
        model: Decoder = engine.model
        log.info("profiling: starting torch's profiler (some seconds)")
        self._linears, self._costs = _linears(model), _costs(engine, model)
        self._prefills, self._decodes = _Recording(engine.facts.device), _Recording(engine.facts.device)
        self._open: _Recording | None = None
        self._engine_track, self._runner_track = Track("engine"), Track("runner")
        self._trace = Trace([self._engine_track, self._runner_track])
        self._num_decode_steps = 0
        self._shape: StepShape | None = None  # of the step in progress
        self._shapes: dict[int, StepShape] = {}  # of the steps whose operators were recorded, if they did not fail
        engine.watch(self._watch_engine, self._watch_runner)
        stack.outputs.process = self._watch_engine("output", stack.outputs.process)

    def begin(self) -> None:
        """The run starts: take in the records of the steps on their way to `engine.on_step`."""
        record = self._watch_engine("record", self._engine.on_step)

        def on_step(line: dict[str, Any]) -> None:
            record(line)
            values = {"running": line["running"], "waiting": line["waiting"], "kv blocks": line["kv_used_blocks"]}
            self._trace.counters.append((time.perf_counter_ns(), values))

        self._engine.on_step = on_step

    def idle(self, sleep: Callable[[float], None]) -> Callable[[float], None]:
        """A sleep that shows on the timeline."""
        return self._watch_engine(IDLE, sleep)

    def finish(self, folder: Path) -> dict[str, dict[str, Any] | None]:
        """Write trace.json; returns the SECTIONS: of decode steps and of prefill steps a table, None where there were none.

        Raises UserError when the disk is full.
        """
        self._engine.on_runner(self._stop)
        path = folder / "trace.json"
        slices = self._runner_track.slices
        steps = watched_steps(slices, self._prefills.operators() | self._decodes.operators(), self._shapes)
        slices += operator_slices(steps, self._linears)
        try:
            self._trace.write(path)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}.") from None
        dropped = sum(track.num_dropped for track in self._trace.tracks)
        if dropped:
            log.warning("trace.json ends before the run does: %d more slices were not kept", dropped)
        decodes = [step for step in steps if step.kind == DECODE_STEP]
        if not decodes:
            log.warning("profile: too few steps only decoded, there is no table of them")
        return dict(zip(SECTIONS, map(self._table, (decodes, largest_prefills(steps))), strict=True))

    def _table(self, steps: list[WatchedStep]) -> dict[str, Any] | None:
        if not steps:
            return None
        found = table(steps, self._linears, EngineTime(self._engine_track.slices), self._costs, self._floors)
        watched = sum(1 for step in steps for _ in step.node.walk()) / len(steps)
        return found | {"watching_ms": watched * _slice_ms(), "unrecorded_runner_ms": self._like(steps[0])}

    def _stop(self) -> None:
        """On the runner's thread: no more operators are recorded, and the device's marks can be read."""
        if self._open is not None:
            self._open.recorder.stop()
        if self._engine.facts.device != "cpu":
            torch.cuda.synchronize()

    def _watch_engine(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._engine_track.timed(name, call)

    def _watch_runner(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name == "step":
            return self._step(call)
        if name == "batch":
            call = self._noting_shape(call)
        return self._runner_track.timed(name, call, self._mark if self._engine.facts.device != "cpu" else None)

    def _mark(self) -> Mark | None:
        """This moment on the GPU, while operators are recorded."""
        if self._open is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _noting_shape(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            batch = build(*args)
            if self._open is None:
                return batch
            starts = batch.q_start_R1_cpu.tolist()
            q_lens = [end - start for start, end in zip(starts, starts[1:], strict=False)]
            self._shape = StepShape(batch.num_tokens, len(batch.logits_idx_L), q_lens, batch.ctx_len_R_cpu.tolist())
            return batch

        return run

    def _step(self, execute: Callable[[Step], StepResult]) -> Callable[[Step], StepResult]:
        """The runner's `execute` with a slice around it, and with its operators recorded where they are wanted."""

        def recorded(step: Step) -> StepResult:
            self._open.steps.append(step.index)
            with self._open.recorder.step():
                return execute(step)

        def run(step: Step) -> StepResult:
            if not step.chunks:
                return execute(step)
            name = step_name(step)
            is_recorded = self._is_recorded(name)
            begin_ns = self._runner_track.clock()
            result = (recorded if is_recorded else execute)(step)
            end_ns = self._runner_track.clock()
            args = {"step": step.index, "num_tokens": step.num_tokens, "num_requests": len(step.chunks), "mode": result.mode}
            self._runner_track.add(Slice(name, begin_ns, end_ns, args))
            if is_recorded:
                self._shapes[step.index] = self._shape
            return result

        return run

    def _is_recorded(self, name: str) -> bool:
        """Whether the step about to run is one to look into; opens and closes the recordings."""
        is_decode = name == DECODE_STEP
        if self._open is not None:
            self._open.num_left -= 1
            if self._open.num_left == 0 or self._is_done(is_decode):
                self._switch(None)
        if is_decode and self._num_decode_steps == SKIPPED_STEPS:
            self._switch(self._decodes)
        elif name == PREFILL_STEP and self._num_decode_steps == 0 and not self._prefills.steps:
            self._switch(self._prefills)
        self._num_decode_steps += is_decode
        return self._open is not None and name in (DECODE_STEP, PREFILL_STEP)

    def _is_done(self, is_decode: bool) -> bool:
        """Whether the open recording has what it is for, before a step that is about to run."""
        if self._open is self._prefills:
            return is_decode or len(self._prefills.steps) == RECORDED_PREFILLS
        return self._num_decode_steps + is_decode > SKIPPED_STEPS + RECORDED_STEPS

    def _switch(self, to: _Recording | None) -> None:
        """Ends the step before, whose time must not hold this."""
        if self._open is not None:
            self._runner_track.timed("profiler", self._open.recorder.stop)()
        self._open = to
        if to is not None:
            self._runner_track.timed("profiler", to.recorder.start)()

    def _like(self, step: WatchedStep) -> float | None:
        """Mean time of the steps of this kind and so many tokens whose operators were not recorded."""
        times = [
            (s.end_ns - s.begin_ns) / 1e6
            for s in self._runner_track.slices
            if s.name == step.kind and s.args["num_tokens"] == step.shape.num_tokens and s.args["step"] not in self._shapes
        ]
        return sum(times) / len(times) if times else None


def _slice_ms() -> float:
    """What it costs to leave one slice."""

    def nothing() -> None:
        pass

    def ms(call: Callable[[], None]) -> float:
        begin_ns = time.perf_counter_ns()
        for _ in range(1000):
            call()
        return (time.perf_counter_ns() - begin_ns) / 1e9

    timed = Track("").timed("", nothing)
    return max(min(ms(timed) for _ in range(5)) - min(ms(nothing) for _ in range(5)), 0.0)


def _linears(model: Decoder) -> Linears:
    """The linear layers in the order of a forward pass, and the operators that their weight format uses."""
    layers = [module for module in model.layers.modules() if isinstance(module, Linear)]
    names = [layer.spec.name.rpartition(".")[2] for layer in layers]
    used: set[str] = set()
    for layer in dict(zip(names, layers, strict=True)).values():
        spec = layer.spec
        x_TI = torch.zeros(1, spec.in_features, dtype=spec.dtype, device=spec.device)
        used |= operator_names(spec.device.type, functools.partial(layer.quant.apply, layer.weights, x_TI, spec))
        used |= operator_names(spec.device.type, functools.partial(layer.gated, x_TI))
    own = {name for name in used if not name.startswith("aten::")}
    return Linears(frozenset(own | (MATRIX_PRODUCTS if used - own else set())), names)


def _costs(engine: Engine, model: Decoder) -> ModelCosts:
    itemsize = model.embed.weight.dtype.itemsize

    def shape(layer: Linear) -> LinearShape:
        name = layer.spec.name.rpartition(".")[2]
        return LinearShape(name, layer.spec.in_features, layer.spec.out_features, layer.num_bytes)

    kv_bytes = engine.facts.kv_bytes_per_token // len(model.attention_layers)
    return ModelCosts(
        engine.model_config,
        [shape(module) for module in model.layers.modules() if isinstance(module, Linear)],
        shape(model.lm_head),
        [AttentionShape(a.num_heads, a.head_dim, kv_bytes, a.sliding_window) for a in model.attention_layers],
        itemsize,
    )
