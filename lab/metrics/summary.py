"""metrics.json: what a run's requests and steps add up to. Torch-free.

Percentiles are of the raw samples with linear interpolation. A section that does not apply to a run is absent.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.metrics.goodput import is_good

LATENCIES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")
LATENCIES_SO_FAR = ("ttft_ms", "itl_ms", "queue_ms", "prefill_ms")  # which a request has in full before it ends


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted, non-empty samples lie, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(samples: Iterable[float]) -> dict[str, float] | None:
    """{mean, p50, p90, p99, max} of the samples; None when there are none."""
    ordered = sorted(samples)
    if not ordered:
        return None
    return {
        "mean": math.fsum(ordered) / len(ordered),
        "p50": percentile(ordered, 0.50),
        "p90": percentile(ordered, 0.90),
        "p99": percentile(ordered, 0.99),
        "max": ordered[-1],
    }


@dataclass(slots=True)
class RequestTotals:
    """Adds up the lines of requests.jsonl; a failed request counts as one and adds nothing else.

    `num_requests` is of those that ended by themselves.
    """

    block_size: int
    goodput_limits: Mapping[str, float] = field(default_factory=dict)
    num_requests: int = 0
    num_failed: int = 0
    num_good: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    held_tokens: int = 0  # that requests had in the cache at their end
    held_slots: int = 0  # in the blocks that it took
    tokens_by_second: Counter[int] = field(default_factory=Counter)  # whole second of the run -> output tokens
    samples: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in LATENCIES})

    def add(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """One request: a line for each of its n samples. The prompt counts once."""
        self.num_requests += 1
        self.num_good += all(is_good(line, self.goodput_limits) for line in lines)
        if any(line["error"] for line in lines):
            self.num_failed += 1
            return
        self.prompt_tokens += lines[0]["prompt_tokens"]
        for line in lines:
            self._add_progress(line, LATENCIES)
            held = line["prompt_tokens"] + len(line["output_token_ids"]) - 1  # the last token is never computed
            self.held_tokens += held
            self.held_slots += -(-held // self.block_size) * self.block_size

    def add_unfinished(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """One request that the end of the run cut off: its tokens count, and the latencies it had by then; it does not."""
        if any(line["queue_ms"] is not None for line in lines):  # else its prompt was not even begun
            self.prompt_tokens += lines[0]["prompt_tokens"]
        for line in lines:
            self._add_progress(line, LATENCIES_SO_FAR)

    def _add_progress(self, line: Mapping[str, Any], latencies: Sequence[str]) -> None:
        self.output_tokens += len(line["output_token_ids"])
        self.preemptions += line["num_preemptions"]
        for name in latencies:
            value = line[name]
            self.samples[name].extend(value if isinstance(value, list) else [] if value is None else [value])
        self._add_token_times(line)

    def _add_token_times(self, line: Mapping[str, Any]) -> None:
        if line["ttft_ms"] is None:
            return
        at_ms = line["arrival_s"] * 1e3 + line["ttft_ms"]
        for gap_ms, count in zip((0.0, *line["itl_ms"]), line["tokens_per_step"], strict=True):
            at_ms += gap_ms
            self.tokens_by_second[int(at_ms // 1e3)] += count

    @property
    def waste_fraction(self) -> float:
        """Share of the slots in the blocks of finished requests that held no token: the unfilled ends of last blocks."""
        return 1 - self.held_tokens / self.held_slots if self.held_slots else 0.0

    def metrics(self, duration_s: float) -> dict[str, Any]:
        """The part of metrics.json that follows from the requests; rates are over `duration_s`."""
        found: dict[str, Any] = {
            "num_requests": self.num_requests,
            "num_failed": self.num_failed,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "duration_s": duration_s,
        }
        if duration_s > 0:
            rate = self.output_tokens / duration_s
            found["output_tok_per_s"] = rate
            # in a run of a second or less, or with a short last second, the busiest second can lie under the mean
            found["peak_output_tok_per_s"] = max(rate, *self.tokens_by_second.values(), 0.0)
            found["total_tok_per_s"] = (self.prompt_tokens + self.output_tokens) / duration_s
            found["requests_per_s"] = (self.num_requests - self.num_failed) / duration_s
            if self.goodput_limits:
                found["goodput_req_per_s"] = self.num_good / duration_s
        for name in LATENCIES:
            summary = distribution(self.samples[name])
            if summary is not None:
                found[name] = summary
        found["preemptions"] = self.preemptions
        return found


@dataclass(slots=True)
class StepTotals:
    """Adds up the lines of steps.jsonl.

    `floor_s(num_tokens, kv_tokens)`, where given, is the least time that a step can take; it is compared with the steps
    that only decoded. A request's last block may hold as little as one token, so the floor counts the others of it as empty.
    With KV groups a block is of some layers only: it stands for `block_tokens` tokens of all layers, of which those of
    `row_slack` a request may be empty or out of sight.
    """

    block_tokens: float
    row_slack: float
    floor_s: Callable[[int, float], float] | None = None
    num_steps: int = 0
    dispatch: Counter[str] = field(default_factory=Counter)
    num_decode_steps: int = 0
    decode_ms: float = 0.0
    decode_floor_ms: float = 0.0

    def add(self, line: Mapping[str, Any]) -> None:
        self.num_steps += 1
        self.dispatch[line["mode"]] += 1
        if line["num_tokens"] == line["num_requests"] + line["num_drafts"] and self.floor_s is not None:
            kv_tokens = line["kv_used_blocks"] * self.block_tokens - line["running"] * self.row_slack
            self.num_decode_steps += 1
            self.decode_ms += line["ms"]
            self.decode_floor_ms += self.floor_s(line["num_tokens"], max(kv_tokens, 0)) * 1e3

    def decode_metrics(self) -> dict[str, float]:
        """Mean floor and mean time of the steps that only decoded, and their ratio; empty when there were none."""
        if not self.num_decode_steps:
            return {}
        return {
            "decode_floor_ms": self.decode_floor_ms / self.num_decode_steps,
            "decode_step_ms": self.decode_ms / self.num_decode_steps,
            "floor_ratio": self.decode_ms / self.decode_floor_ms,
        }
