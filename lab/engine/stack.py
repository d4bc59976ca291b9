"""Engine, front and output side put together: what LLM, AsyncLLM and the jobs are built on."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lab.engine.detokenizer import Vocabulary
from lab.engine.engine import Engine
from lab.engine.frontend import Frontend
from lab.engine.output import OutputProcessor
from lab.engine.tokenizer import load_tokenizer
from lab.errors import UserError
from lab.sampling_params import SamplingParams
from lab.settings import Settings


@dataclass(frozen=True, slots=True)
class Stack:
    """One engine with its front. None of it may be used by two threads at once."""

    settings: Settings
    engine: Engine
    frontend: Frontend
    outputs: OutputProcessor


def build_stack(settings: Settings, *, clock: Callable[[], float] = time.monotonic, model: nn.Module | None = None) -> Stack:
    """Load the model, or take the one given (see `Engine.build`), and its tokenizer.

    Raises UserError for what the settings get wrong.
    """
    engine = Engine.build(settings, clock=clock, model=model)
    tokenizer = load_tokenizer(engine.tokenizer_folder)
    vocabulary = Vocabulary(tokenizer) if tokenizer is not None else None
    defaults = SamplingParams.from_mapping(settings.sampling)
    frontend = Frontend(engine, tokenizer, seed=settings.seed, defaults=defaults)
    return Stack(settings, engine, frontend, OutputProcessor(engine, vocabulary))


def settings_for(
    model: str | Path | None, plugins: dict[str, str | None], overrides: Sequence[str], settings: Settings | None
) -> Settings:
    """The settings of a program that names a model, plugins by kind, and overrides in Hydra's syntax; or brings them ready.

    The model's path does not pass through Hydra's grammar, so that a folder may have any name. Raises UserError when two of
    them speak of the same thing.
    """
    if isinstance(overrides, str):
        raise UserError(f"overrides must be a list of texts: overrides=[{overrides!r}].")
    if settings is not None:
        given = {"model": model, **plugins, "overrides": list(overrides) or None}
        clashing = [name for name, value in given.items() if value is not None]
        if clashing:
            raise UserError(f"settings were given, so {', '.join(clashing)} must not be: put it into the settings.")
        return settings
    from lab.config import compose  # imports Hydra, which ready settings do not need

    names = [override.lstrip("+").partition("=")[0] for override in overrides]
    if model is not None and ("model" in names or "model.path" in names):
        raise UserError("the model is named twice: as an argument and in the overrides.")
    chosen = [f"+{kind}={name}" for kind, name in plugins.items() if name is not None]
    composed = compose([*chosen, *overrides])
    if model is None:
        return composed
    return dataclasses.replace(composed, model=dataclasses.replace(composed.model, path=str(model)))


def engine_metrics(stack: Stack) -> dict[str, Any]:
    """Counters since the engine's start, in the names of metrics.json, and what it holds now."""
    engine, blocks = stack.engine, stack.engine.blocks
    return {
        **dataclasses.asdict(stack.outputs.totals),
        "running": engine.scheduler.num_running,
        "waiting": engine.scheduler.num_waiting,
        "preemptions": engine.scheduler.num_preemptions,
        "prefix_cache": {
            "queries": blocks.stats.queries,
            "hits": blocks.stats.hits,
            "hit_rate": blocks.stats.hit_rate,
        },
        "kv": {
            "num_blocks": blocks.num_blocks,
            "block_size": blocks.block_size,
            "bytes_per_token": engine.facts.kv_bytes_per_token,
            "used_blocks": blocks.num_used,
            "peak_used_blocks": blocks.peak_used,
        },
        "compile": engine.compile_metrics,
        "startup_s": dict(engine.startup_s),
    }
