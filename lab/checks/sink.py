"""Contract checks of tracking sinks: they take every course that a run can take, and change nothing in it."""

import copy
import tempfile
from pathlib import Path
from typing import Any

from lab.checks import CheckFailed
from lab.contracts.sink import RunInfo
from lab.registry import Entry

CONFIG = {"seed": 0, "model": {"path": "tiny", "max_model_len": None}, "tracking": {"wandb": {"tags": ["a", "b"]}}}
RESOLVED = {"attention": {"name": "x", "passed_over": {"y": ["it has no gqa"]}}}
REQUEST = {
    "id": "0",
    "index": 0,
    "prompt_tokens": 3,
    "cached_tokens": 0,
    "output_token_ids": [4, 5],
    "text": "caf\u00e9\n",
    "finish_reason": "length",
    "stop_reason": None,
    "arrival_s": 0.0,
    "ttft_ms": 2.0,
    "itl_ms": [1.0],
    "e2e_ms": 3.0,
    "num_preemptions": 0,
    "accepted_per_step": [0, 0],
    "drafts_per_step": [0, 0],
    "draft_depth_per_step": [0, 0],
    "error": None,
}
METRICS = {"num_requests": 1, "num_failed": 0, "ttft_ms": {"mean": 2.0, "p50": 2.0}, "spec": {"acceptance_per_position": [0.5]}}


def check_takes_a_whole_run(entry: Entry, options: Any) -> None:
    """A run of many steps and some requests goes through, with the records that a run really makes."""
    with tempfile.TemporaryDirectory() as name:
        sink = _started(entry, options, Path(name))
        for index in range(300):
            sink.step(_step(index))
        for index in range(5):
            sink.request({**REQUEST, "id": str(index)})
        sink.finish(METRICS, 0)


def check_takes_a_run_that_fails(entry: Entry, options: Any) -> None:
    """`finish` works after a run that was interrupted or failed before its first step, without any latency to report."""
    for exit_code in (1, 130):
        with tempfile.TemporaryDirectory() as name:
            _started(entry, options, Path(name)).finish({"num_requests": 0, "num_failed": 0, "interrupted": True}, exit_code)


def check_leaves_records_alone(entry: Entry, options: Any) -> None:
    """The records belong to the run and to the other sinks: none is changed."""
    config, resolved, step, request, metrics = (copy.deepcopy(x) for x in (CONFIG, RESOLVED, _step(0), REQUEST, METRICS))
    with tempfile.TemporaryDirectory() as name:
        sink = entry.load()(options)
        sink.start(RunInfo(Path(name), config, resolved))
        sink.step(step)
        sink.request(request)
        sink.finish(metrics, 0)
    if (config, resolved, step, request, metrics) != (CONFIG, RESOLVED, _step(0), REQUEST, METRICS):
        raise CheckFailed("it changes a record that it was given; copy what it needs to change")


def _started(entry: Entry, options: Any, folder: Path) -> Any:
    sink = entry.load()(options)
    sink.start(RunInfo(folder, copy.deepcopy(CONFIG), copy.deepcopy(RESOLVED)))
    return sink


def _step(index: int) -> dict[str, Any]:
    return {
        "step": index,
        "t_s": index * 0.01,
        "ms": 9.5,
        "num_tokens": 4,
        "num_requests": 4,
        "num_drafts": 0,
        "draft_depth": 0,
        "num_drafting": 0,
        "num_accepted": 0,
        "padded_to": 4,
        "mode": "none",
        "kv_used_blocks": 8,
        "waiting": 0,
        "running": 4,
        "preempted": 0,
        "draft_ms": 0.0,
    }
