"""The main job, behind `lab run`: load, run the workload, write the run folder, show what came of it."""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.arrivals import checked_items
from lab.bench.files import RunLog, write_json
from lab.bench.profiling import SECTIONS, Profile
from lab.bench.progress import ProgressView, progress_view
from lab.bench.recorder import Recorder, Sinks
from lab.bench.samples import print_samples
from lab.bench.sender import Planned, Sender, plan
from lab.capabilities import Needs
from lab.contracts.sink import RunInfo
from lab.contracts.workload import ModelFacts
from lab.engine.resolution import Resolved, resolve, told
from lab.engine.stack import Stack, build_stack
from lab.engine.tokenizer import encode
from lab.errors import UserError
from lab.interrupt import WRITING, gentle_interrupt
from lab.metrics.environment import describe
from lab.metrics.roofline import floors, measure_device
from lab.registry import discover
from lab.report.profile import profile_text
from lab.report.table import print_summary
from lab.settings import PluginChoice, Settings

log = logging.getLogger("lab")

DONE, FAULT, USER_ERROR, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True)
class _Job:
    """All that a run needs, ready to start."""

    stack: Stack
    planned: list[Planned]
    recorder: Recorder
    sinks: Sinks
    progress: ProgressView
    profile: Profile | None


@dataclass(frozen=True)
class _Ending:
    """What a run came to. `error` is the mistake, or the full disk, that is to be told after its results."""

    exit_code: int
    metrics: dict[str, Any]
    error: UserError | None


def run_job(
    settings: Settings,
    folder: Path,
    *,
    config: dict[str, Any],
    as_json: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run the workload that the settings name, and keep everything in `folder`, which exists.

    Args:
        config: the settings as plain data, for the tracking sinks.
        as_json: the last line on stdout is one JSON object of the folder and the metrics; all else goes to stderr.
        clock, sleep: the time that the engine and the arrivals go by.

    Returns:
        The exit code. 0: done; some requests may have been refused, which metrics.json counts as failed. 1: a step failed,
        and with it the requests that it served. 130: Ctrl-C; what was done by then is in the files.

    Raises:
        UserError: what the settings or the workload get wrong; every request was refused; a disk that takes no more.
    """
    begin_s = time.perf_counter()
    screen = sys.stderr if as_json else sys.stdout
    with RunLog(folder):
        stack, workload, sinks = _load(settings, clock)
        with closing(stack.engine):
            job = _prepare(settings, folder, config, stack, workload, sinks, begin_s)
            ending = _run(job, folder, sleep)
        exit_code, metrics = ending.exit_code, ending.metrics
        print_samples(job.recorder.shown, screen)
        print_summary(metrics, screen)
        for profile in filter(None, map(metrics.get, SECTIONS)):
            print("\n" + profile_text(profile, metrics["roofline"]["disturbance"]), file=screen)
        print(f"\nrun folder: {folder}", file=screen)
        if ending.error is not None:
            raise ending.error
        if as_json:
            print(json.dumps({"folder": str(folder), **metrics}))
        if exit_code == USER_ERROR:
            raise UserError(f"every request was refused; the first one: {job.recorder.first_refusal}")
    return exit_code


def _load(settings: Settings, clock: Callable[[], float]) -> tuple[Stack, tuple[Resolved, Any], list[Resolved]]:
    """The engine, and the plugins of workload and sinks: first what takes no time and may be wrong, then the model."""
    discover()
    resolved = resolve("workload", settings.workload, Needs())
    workload = resolved.make(settings.seed)
    named = [name for name in settings.tracking.sinks if name not in ("jsonl", "wandb")]  # which have settings of their own
    sinks = [resolve("sink", PluginChoice(name), Needs()) for name in named]
    return build_stack(settings, clock=clock), (resolved, workload), sinks


def _prepare(
    settings: Settings,
    folder: Path,
    config: dict[str, Any],
    stack: Stack,
    workload: tuple[Resolved, Any],
    named_sinks: list[Resolved],
    begin_s: float,
) -> _Job:
    """Tokenise the workload, know the device, start the sinks: all that must not count in the run's time."""
    engine = stack.engine
    resolved, maker = workload
    items = checked_items(maker.items(model_facts(stack)), resolved.entry.name)
    planned = plan(items, stack.frontend, stack.frontend.defaults)
    startup_s = {**engine.startup_s, "total": time.perf_counter() - begin_s}
    records = {**engine.records, "workload": resolved.record}
    write_json(folder / "resolved.json", records)
    facts = engine.facts
    numbers = {"model": facts.model_name, "dtype": facts.dtype, "kv_dtype": facts.kv_dtype}
    write_json(folder / "env.json", describe(facts.device) | numbers)
    device = measure_device(engine.facts.device, threads=engine.facts.num_threads, log=log.info)
    sinks = _sinks(settings, named_sinks)
    limits = floors(engine.model_config, engine.facts.dtype, device, engine.facts.kv_dtype)
    recorder = Recorder(engine, sinks, settings.goodput, startup_s, device, limits)
    sinks.start(RunInfo(folder, config, records))
    profile = Profile(stack, limits) if settings.profile else None
    log.info("plugins: %s", told(records))
    log.info("running %d requests", len(planned))
    return _Job(stack, planned, recorder, sinks, progress_view(settings.tracking.progress, len(planned)), profile)


def _run(job: _Job, folder: Path, sleep: Callable[[float], None]) -> _Ending:
    """Send, step, record; whatever ends it, metrics.json is written of what was done."""
    recorder, exit_code, error, at_once = job.recorder, FAULT, None, False
    if job.profile is not None:
        sleep = job.profile.idle(sleep)
    try:
        with gentle_interrupt() as interrupt, closing(job.progress):
            sender = Sender(job.stack, job.planned, recorder, lambda: interrupt.wanted, sleep, job.progress.update)
            recorder.start(job.stack.engine.clock())
            if job.profile is not None:
                job.profile.begin()
            sender.run(recorder.start_s)
        exit_code = INTERRUPTED if interrupt.wanted and recorder.num_ended < len(job.planned) else _exit_code(recorder)
    except UserError as mistake:
        exit_code, error = USER_ERROR, mistake
    except KeyboardInterrupt:  # the second Ctrl-C
        exit_code, at_once = INTERRUPTED, True
        job.stack.engine.abandon()
    finally:
        with gentle_interrupt(WRITING):
            ending = _keep(job, folder, exit_code, error, profile=None if at_once else job.profile)
    return ending


def _keep(job: _Job, folder: Path, exit_code: int, error: UserError | None, *, profile: Profile | None) -> _Ending:
    """Write metrics.json, and of a profiled run its trace, which needs the runner's thread."""
    recorder = job.recorder
    recorder.close()
    metrics = recorder.metrics()
    if exit_code == INTERRUPTED:
        log.warning("interrupted: %d of %d requests had ended", recorder.num_ended, len(job.planned))
        metrics |= {"interrupted": True, "num_unfinished": len(job.planned) - recorder.num_ended}
    try:
        if profile is not None:
            metrics |= profile.finish(folder)
        try:
            write_json(folder / "metrics.json", metrics)
        finally:
            job.sinks.finish(metrics, exit_code)
    except UserError as mistake:
        exit_code, error = USER_ERROR, error or mistake
    return _Ending(exit_code, metrics, error)


def _exit_code(recorder: Recorder) -> int:
    if recorder.num_faults:
        return FAULT
    totals = recorder.requests
    return USER_ERROR if totals.num_failed and totals.num_failed == totals.num_requests else DONE


def model_facts(stack: Stack) -> ModelFacts:
    """What a workload may know of the model."""
    tokenizer, config = stack.frontend.tokenizer, stack.engine.model_config
    special = set(config.eos_ids)
    if tokenizer is not None:
        special.update(tokenizer.all_special_ids)
        special.update(token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)

    def encode_text(text: str) -> list[int]:
        if tokenizer is None:
            raise UserError("this workload needs text, and the model has no tokenizer.")
        return encode(tokenizer, text, add_special_tokens=True)

    return ModelFacts(config.vocab_size, stack.engine.max_model_len, frozenset(special), encode_text)


def _sinks(settings: Settings, named: list[Resolved]) -> Sinks:
    """The run folder's own, W&B unless it is disabled, and those that the settings name."""
    further = []
    if settings.tracking.wandb.mode != "disabled":
        further.append(resolve("sink", PluginChoice("wandb"), Needs()).entry.load()(settings.tracking.wandb))
    further += [sink.make() for sink in named]
    return Sinks(resolve("sink", PluginChoice("jsonl"), Needs()).make(), further)
