"""The engine core: one step loop over scheduler, executor and block manager."""

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lab import registry
from lab.compile.setup import num_compilations
from lab.engine.executor import InProcessExecutor
from lab.kv.blocks import BlockManager
from lab.model.config import ModelConfig
from lab.sched.scheduler import Scheduler
from lab.settings import Settings
from lab.types import FinishReason, Request, Step, StepResult, Update, Watch

log = logging.getLogger("lab")


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """What was compiled and captured at start."""

    mode: str  # none (eager) or piecewise
    seconds: float
    num_graphs: int  # unique compiled graphs
    num_captured: int  # batch shapes captured on the device
    from_cache: bool
    num_compilations: int  # of torch.compile in this process until the engine was ready


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was settled while the engine was built."""

    model_config: ModelConfig
    model_name: str
    tokenizer_folder: Path
    max_model_len: int
    device: str
    dtype: str
    kv_dtype: str  # of the cache
    weights_bytes: int
    kv_bytes_per_token: int  # of all layers
    kv_bytes_per_block: int  # of the layers that share a block
    num_threads: int
    records: dict[str, Any]  # resolved.json
    startup_s: dict[str, float]  # load, compile, warmup, total
    compile: CompileFacts

    @property
    def block_tokens(self) -> float:
        """How many tokens' keys and values, of all layers, take as much memory as a block: with one KV group its size."""
        return self.kv_bytes_per_block / self.kv_bytes_per_token


class Engine:
    """Takes requests, steps, and gives updates. Text, streams and files are its users' business.

    `on_step`, when set, is called with one record (plain data, the fields of steps.jsonl) after every step.
    """

    def __init__(
        self,
        settings: Settings,
        scheduler: Scheduler,
        blocks: BlockManager,
        executor: InProcessExecutor,
        facts: EngineFacts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self.clock = clock
        self.blocks = blocks
        self.scheduler = scheduler
        self.on_step: Callable[[dict[str, Any]], None] | None = None
        self._executor = executor
        self._depth = 2 if settings.scheduler.async_scheduling else 1
        self._in_flight: deque[tuple[Step, float]] = deque()
        self._start_s: float | None = None

    @classmethod
    def build(
        cls, settings: Settings, *, clock: Callable[[], float] = time.monotonic, model: nn.Module | None = None
    ) -> "Engine":
        """Load the model, choose the plugins, size the KV pool. Raises UserError for what the settings get wrong.

        `model` is taken in place of loading: that of an engine which is closed and had the same settings of model and quant.
        """
        from lab.engine.build import build_engine

        return build_engine(settings, clock, model)

    @property
    def model_config(self) -> ModelConfig:
        return self.facts.model_config

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len

    @property
    def tokenizer_folder(self) -> Path:
        return self.facts.tokenizer_folder

    @property
    def records(self) -> dict[str, Any]:
        """Which plugin serves each component, and why: the content of resolved.json."""
        return self.facts.records

    @property
    def startup_s(self) -> dict[str, float]:
        return self.facts.startup_s

    @property
    def compile_metrics(self) -> dict[str, Any]:
        """The compile section of metrics.json, but for what each step ran on."""
        facts = self.facts.compile
        return {
            "mode": facts.mode,
            "seconds": facts.seconds,
            "from_cache": facts.from_cache,
            "num_graphs": facts.num_graphs,
            "num_captured": facts.num_captured,
            "recompiles_after_warmup": num_compilations() - facts.num_compilations,
        }

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Take a request. Raises UserError, and changes nothing, when it can never fit."""
        self.scheduler.add(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a request now (stop string, abort). False when it is not known any more."""
        return self.scheduler.finish(request_id, reason, stop_reason)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while blocks are in use."""
        return self.blocks.reset_prefix_cache()

    @property
    def model(self) -> nn.Module:
        """For studies that look inside."""
        return self._executor.model

    def watch(self, watch: Watch, watch_runner: Watch) -> None:
        """Let the calls that a step is made of be timed, those of the runner, which may be on its own thread, apart."""
        for owner, method, name in (
            (self, "step", "engine step"),
            (self.scheduler, "schedule", "schedule"),
            (self.scheduler, "update", "update"),
            (self._executor, "collect", "collect"),
        ):
            setattr(owner, method, watch(name, getattr(owner, method)))
        self._executor.watch(watch_runner)

    def on_runner(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, done on the thread that executes steps."""
        return self._executor.call(work)

    def step(self) -> list[Update]:
        """Plan and submit until the pipeline is full, then collect the oldest step: what is new of each request."""
        while len(self._in_flight) < self._depth and self.scheduler.has_work:
            step = self.scheduler.schedule(self.clock())
            if not step.chunks and not step.freed:
                break
            self._in_flight.append((step, self.clock()))
            self._executor.submit(step)
        if not self._in_flight:
            return []
        step, _ = self._in_flight.popleft()
        try:
            result = self._executor.collect()
        except Exception as error:  # noqa: BLE001 - whatever a step raises ends its requests, not the engine
            return self._fail(error)
        updates = self.scheduler.update(step, result)
        if self.on_step is not None and step.chunks:
            self.on_step(self._record(step, result))
        return updates

    def close(self) -> None:
        """Wait for what is in flight and release the executor's thread."""
        while self._in_flight:
            self._in_flight.popleft()
            self._executor.collect()
        self._executor.close()

    def abandon(self) -> None:
        """End without waiting for what is in flight: a step that runs goes on, and nobody asks for its result."""
        self._in_flight.clear()
        self._executor.abandon()

    def _fail(self, error: Exception) -> list[Update]:
        """End every request with the error: what the failed step left in the cache cannot be told."""
        log.error("a step failed:\n%s", "".join(traceback.format_exception(error)).rstrip())
        self._in_flight.clear()
        self._executor.reset()
        plugin = registry.to_blame(error)
        message = f"{type(error).__name__}: {error}"
        if plugin is not None:
            message = f"{plugin.kind} plugin '{plugin.name}' ({plugin.path}) failed: {message}"
        return [
            Update(request_id, [], finish_reason=FinishReason.ERROR, error=message) for request_id in self.scheduler.fail_all()
        ]

    def _record(self, step: Step, result: StepResult) -> dict[str, Any]:
        now = self.clock()
        if self._start_s is None:
            self._start_s = now - result.ms / 1e3
        return {
            "step": step.index,
            "t_s": now - self._start_s,
            "ms": result.ms,
            "num_tokens": result.num_tokens,
            "num_requests": len(step.chunks),
            "num_drafts": sum(row.num_drafts for row in result.rows),
            "draft_depth": sum(row.draft_depth for row in result.rows),
            "num_drafting": sum(row.num_drafts > 0 for row in result.rows),
            "num_accepted": sum(row.num_accepted for row in result.rows),
            "padded_to": result.padded_to,
            "mode": result.mode,
            "kv_used_blocks": self.blocks.num_used,
            "waiting": self.scheduler.num_waiting,
            "running": self.scheduler.num_running,
            "preempted": step.preempted,
            "draft_ms": result.draft_ms,
        }
