"""The lines of requests.jsonl: how a request that ended becomes one for each of its samples. Torch-free."""

from collections.abc import Sequence
from typing import Any

from lab.engine.request_output import Logprob, RequestOutput
from lab.metrics.timeline import Timeline


def request_lines(output: RequestOutput, start_s: float) -> list[dict[str, Any]]:
    """The lines of a request that ran. `start_s` is the start of the run on the engine's clock."""
    lines = []
    for sample in output.outputs:
        line = {
            "id": output.request_id,
            "index": sample.index,
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens,
            "output_token_ids": sample.token_ids,
            "text": sample.text,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            **latencies(sample.timeline, start_s),
            "num_preemptions": sample.num_preemptions,
            "error": output.error,
        }
        if sample.logprobs is not None:
            line["logprobs"] = _logprobs(sample.logprobs)
        if sample.index == 0 and output.prompt_logprobs is not None:
            line["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
        lines.append(line)
    return lines


def refused_line(request_id: str, arrival_s: float, error: str, prompt_tokens: int | None) -> dict[str, Any]:
    """The line of a request that never ran. `arrival_s` is from the start of the run."""
    return {
        "id": request_id,
        "index": 0,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": 0,
        "output_token_ids": [],
        "text": "",
        "finish_reason": None,
        "stop_reason": None,
        **latencies(Timeline(arrival_s), 0.0),
        "num_preemptions": 0,
        "error": error,
    }


def latencies(timeline: Timeline, start_s: float) -> dict[str, Any]:
    """The time fields of a line, in ms to the microsecond; None or empty where the request did not get that far."""
    return {
        "arrival_s": round(timeline.arrival_s - start_s, 6),
        "ttft_ms": _ms(timeline.ttft_s),
        "itl_ms": [round(gap * 1e3, 3) for gap in timeline.itl_s],
        "tpot_ms": _ms(timeline.tpot_s),
        "e2e_ms": _ms(timeline.e2e_s),
        "queue_ms": _ms(timeline.queue_s),
        "prefill_ms": _ms(timeline.prefill_s),
        "decode_ms": _ms(timeline.decode_s),
        "tokens_per_step": timeline.token_counts,
        "accepted_per_step": timeline.accepted_counts,
        "drafts_per_step": timeline.draft_counts,
        "draft_depth_per_step": timeline.draft_depths,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _logprobs(entries: Sequence[dict[int, Logprob] | None]) -> list[dict[str, Any] | None]:
    """Per token: the chosen one, and the most likely ones as {token id: logprob}; null for the first prompt token."""
    records: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            records.append(None)
            continue
        token_id, chosen = next(iter(entry.items()))
        top = {str(other): round(logprob.logprob, 6) for other, logprob in entry.items()}
        records.append({"token_id": token_id, "logprob": round(chosen.logprob, 6), "rank": chosen.rank, "top": top})
    return records
