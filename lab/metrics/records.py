"""The lines of requests.jsonl and steps.jsonl: their fields, and how a finished request becomes one. Torch-free."""

from dataclasses import asdict
from typing import Any

from lab.metrics.timeline import Timeline
from lab.types import TokenLogprobs


def milliseconds(seconds: float | None) -> float | None:
    """Seconds to ms, rounded to the microsecond so that lines stay short."""
    return None if seconds is None else round(seconds * 1e3, 3)


def latencies(timeline: Timeline, start_s: float) -> dict[str, Any]:
    """The time fields of a request's line. `start_s` is the start of the run on the engine's clock."""
    return {
        "arrival_s": round(timeline.arrival_s - start_s, 6),
        "ttft_ms": milliseconds(timeline.ttft_s),
        "itl_ms": [round(gap * 1e3, 3) for gap in timeline.itl_s],
        "tpot_ms": milliseconds(timeline.tpot_s),
        "e2e_ms": milliseconds(timeline.e2e_s),
        "queue_ms": milliseconds(timeline.queue_s),
        "prefill_ms": milliseconds(timeline.prefill_s),
        "decode_ms": milliseconds(timeline.decode_s),
        "tokens_per_step": list(timeline.token_counts),
        "accepted_per_step": list(timeline.accepted_counts),
    }


def refused(request_id: str, arrival_s: float, error: str, prompt_tokens: int | None = None) -> dict[str, Any]:
    """The line of a request that never ran. `arrival_s` is from the start of the run."""
    return {
        "id": request_id,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0,
        "output_token_ids": [],
        "text": "",
        "finish_reason": "error",
        "stop_reason": None,
        "arrival_s": round(arrival_s, 6),
        "itl_ms": [],
        "num_preemptions": 0,
        "error": error,
    }


def logprobs_record(entries: list[TokenLogprobs] | None) -> list[dict[str, Any]] | None:
    return None if entries is None else [asdict(entry) for entry in entries]
