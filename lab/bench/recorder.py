"""Takes in what happens in a run, passes it to the sinks, and adds it up to metrics.json."""

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from lab.bench.records import refused_line, request_lines
from lab.bench.sender import Planned
from lab.contracts.sink import RunInfo, Sink
from lab.engine.engine import Engine
from lab.engine.generation import Generation
from lab.engine.kv_cache import row_slack
from lab.engine.request_output import RequestOutput
from lab.metrics.environment import peak_device_bytes, peak_rss_bytes
from lab.metrics.quiet import SHORTEST_WATCH_S, CpuWatch
from lab.metrics.roofline import DeviceFacts, Floors
from lab.metrics.spec import RequestDrafts, SpecTimes
from lab.metrics.summary import RequestTotals, StepTotals

log = logging.getLogger("lab")


class Sinks:
    """The run folder's own sink, whose errors end the run, and further ones, whose errors only end them."""

    def __init__(self, own: Sink, further: Sequence[Sink]) -> None:
        self._own = own
        self._further = list(further)

    def start(self, run: RunInfo) -> None:
        self._own.start(run)
        self._guarded(lambda sink: sink.start(run))

    def step(self, line: dict[str, Any]) -> None:
        self._own.step(line)
        self._guarded(lambda sink: sink.step(line))

    def request(self, line: dict[str, Any]) -> None:
        self._own.request(line)
        self._guarded(lambda sink: sink.request(line))

    def finish(self, metrics: dict[str, Any], exit_code: int) -> None:
        self._own.finish(metrics, exit_code)
        self._guarded(lambda sink: sink.finish(metrics, exit_code))

    def _guarded(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._further):
            try:
                call(sink)
            except Exception:  # noqa: BLE001 - tracking may fail in any way and never fails the run; the log has it all
                self._further.remove(sink)
                log.warning("sink '%s' failed and gets no more records:\n%s", sink.name, traceback.format_exc().rstrip())


class Recorder:
    """The listener of a run: totals, the first outputs to show, and the sinks.

    Args:
        startup_s: seconds that loading, warming up and all of the start took.
        floors: what the model could reach on this device.
    """

    NUM_SHOWN = 3  # of the outputs, and of the refusals

    def __init__(
        self,
        engine: Engine,
        sinks: Sinks,
        goodput: dict[str, float],
        startup_s: dict[str, float],
        device: DeviceFacts,
        floors: Floors,
    ) -> None:
        self.requests = RequestTotals(engine.blocks.block_size, goodput)
        block_tokens = engine.facts.block_tokens
        self.steps = StepTotals(block_tokens, row_slack(engine.blocks, block_tokens), floors.step_s)
        self.drafts = RequestDrafts()
        self.spec_times = SpecTimes()
        self.shown: list[tuple[Planned, RequestOutput]] = []  # of the first requests, as they end
        self.first_refusal: str | None = None
        self.num_refused = 0
        self.num_faults = 0  # requests that ended because a step failed
        self.start_s = 0.0  # on the engine's clock; set when the run starts
        self.last_s = 0.0  # the end of the last request so far
        self._engine = engine
        self._sinks = sinks
        self._startup_s = startup_s
        self._device = device
        self._floors = floors
        self._first_token_s: set[float] = set()  # when steps brought first tokens: those of one step have one time
        self._cpu = CpuWatch()  # from the run's start

    def start(self, now_s: float) -> None:
        self.start_s = self.last_s = now_s
        self._cpu = CpuWatch()
        self._engine.on_step = self._step

    @property
    def num_ended(self) -> int:
        return self.requests.num_requests

    def refused(self, planned: Planned, error: str) -> None:
        prompt_tokens = len(planned.submission.prompt_ids) if planned.submission is not None else None
        if self.first_refusal is None:
            self.first_refusal = error
        self.num_refused += 1
        if self.num_refused <= self.NUM_SHOWN:
            log.warning("request %s was refused: %s", planned.id, error)
        self._take([refused_line(planned.id, planned.item.arrival_s, error, prompt_tokens)])

    def finished(self, generation: Generation, planned: Planned) -> None:
        output = generation.output()
        self.num_faults += output.error is not None
        if planned.number < self.NUM_SHOWN and output.error is None:
            self.shown.append((planned, output))
        self._take(self._lines(output, planned))

    def aborted(self, generation: Generation, planned: Planned) -> None:
        """The run ends before this request does: what it had is kept."""
        lines = self._lines(generation.output(), planned)
        self.requests.add_unfinished(lines)
        self.drafts.add(lines)
        self._write(lines)

    def close(self) -> None:
        """Say at the end what was not said for every request."""
        if self.num_refused > self.NUM_SHOWN:
            log.warning("further requests refused: %d, see requests.jsonl", self.num_refused - self.NUM_SHOWN)

    def _lines(self, output: RequestOutput, planned: Planned) -> list[dict[str, Any]]:
        self.last_s = self._engine.clock()
        lines = request_lines(output, self.start_s)
        self._first_token_s.update(times[0] for sample in output.outputs if (times := sample.timeline.token_times_s))
        if planned.item.reference is not None:
            lines[0]["reference"] = planned.item.reference
        if planned.item.category is not None:
            for line in lines:
                line["category"] = planned.item.category
        return lines

    def _take(self, lines: list[dict[str, Any]]) -> None:
        self.requests.add(lines)
        self.drafts.add(lines)
        self._write(lines)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            self._sinks.request(line)

    def _step(self, line: dict[str, Any]) -> None:
        self.steps.add(line)
        self.spec_times.add(line)
        self._sinks.step(line)

    def metrics(self) -> dict[str, Any]:
        """metrics.json, of what has ended so far."""
        blocks, facts = self._engine.blocks, self._engine.facts
        found = self.requests.metrics(self.last_s - self.start_s)
        found["num_steps"] = self.steps.num_steps
        found["num_first_token_steps"] = len(self._first_token_s)
        if self._cpu.seconds >= SHORTEST_WATCH_S and (share := self._cpu.busy_share()) is not None:
            found["others_cpu_share"] = share
        if blocks.enable_prefix_caching:
            stats = blocks.stats
            found["prefix_cache"] = {"queries": stats.queries, "hits": stats.hits, "hit_rate": stats.hit_rate}
        if (drafts := self.drafts.metrics()) is not None:
            found["spec"] = drafts | self.spec_times.metrics(self.drafts.all.alpha)
        if categories := self.drafts.category_metrics():
            found["categories"] = categories
        found["kv"] = {
            "num_blocks": blocks.num_blocks,
            "block_size": blocks.block_size,
            "bytes_per_token": facts.kv_bytes_per_token,
            "bytes_per_block": facts.kv_bytes_per_block,
            "peak_used_blocks": blocks.peak_used,
            "waste_fraction": self.requests.waste_fraction,
        }
        dispatch = {mode: self.steps.dispatch[mode] for mode in ("none", "piecewise", "full")}
        found["compile"] = {**self._engine.compile_metrics, "dispatch": dispatch}
        found["memory"] = {
            "peak_rss_bytes": peak_rss_bytes(),
            "weights_bytes": facts.weights_bytes,  # as they lie in memory: packed, perhaps twice
            "parameter_bytes": self._floors.weights_bytes,
        }
        if facts.device != "cpu":
            found["memory"]["peak_device_bytes"] = peak_device_bytes()
        found["roofline"] = {
            "bandwidth_gb_s": self._device.bandwidth / 1e9,
            "peak_gflop_s": self._floors.peak_flops / 1e9,
            "threads": self._device.threads,
            "measured": self._device.measured,
            "quiet": self._device.quiet,
            "busy_share": self._device.busy_share,
            "spread": self._device.spread,
            "disturbance": self._device.disturbance,
            "shortfall": self._device.shortfall,
            **self.steps.decode_metrics(),
        }
        if found["roofline"].get("floor_ratio", 1.0) < 1.0:
            log.warning(
                "decode steps were faster than their floor: the model fits into a cache of the processor, or the device was "
                "measured while something else kept it busy"
            )
        found["startup_s"] = self._startup_s
        return found
