"""Behind `lab calibrate`: runs a workload, as fast as it goes, and keeps the ranges of keys and values."""

import logging
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench.arrivals import checked_items
from lab.bench.job import model_facts
from lab.bench.sender import plan
from lab.capabilities import Needs
from lab.engine.ranges import RangeWatch
from lab.engine.resolution import resolve
from lab.engine.stack import build_stack
from lab.errors import UserError
from lab.registry import discover
from lab.settings import CompileSettings, Settings

log = logging.getLogger("lab")


def calibrate(settings: Settings, path: Path, *, per_head: bool) -> dict[str, Any]:
    """Write the ranges of the settings' model over their workload to `path`.

    The model runs eagerly, its cache is not quantized and every layer has its own, whatever the settings say.

    Returns:
        What the file is about: path, model, num_layers, num_tokens.

    Raises:
        UserError: what the settings or the workload get wrong; a request that the model cannot take; a step that failed.
    """
    discover()
    resolved = resolve("workload", settings.workload, Needs())
    workload = resolved.make(settings.seed)
    plain = replace(
        settings,
        cache=replace(settings.cache, dtype="auto", scales="auto", free_behind_window=False),
        compile=CompileSettings(mode="none", cudagraph_mode="none"),
    )
    stack = build_stack(plain, clock=time.monotonic)
    with closing(stack.engine) as engine:
        items = checked_items(workload.items(model_facts(stack)), resolved.entry.name)
        planned = plan(items, stack.frontend, stack.frontend.defaults)
        for request in planned:
            if request.error is not None:
                raise UserError(f"workload: request {request.number}: {request.error}")
        watch = RangeWatch(engine)
        log.info("calibrating over %d requests", len(planned))
        generations = [stack.outputs.submit(request.submission) for request in planned]
        while not all(generation.finished for generation in generations):
            stack.outputs.process(engine.step())
        if failed := next((generation.error for generation in generations if generation.error is not None), None):
            raise UserError(f"calibration: a step failed: {failed}")
        ranges = watch.ranges(per_head=per_head)
    ranges.write(path)
    return {"path": str(path), "model": ranges.model, "num_layers": len(ranges.keys), "num_tokens": ranges.num_tokens}
