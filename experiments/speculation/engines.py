"""Engines that differ in how they draft, side by side in one process, so that a change of the machine's speed meets all."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lab import LLM, SamplingParams
from lab.engine.request_output import RequestOutput
from lab.metrics.spec import DraftTotals

BASE = ["cache.num_blocks=1400", "model.max_model_len=4096"]


def parse(method: str) -> tuple[str, list[str]]:
    """A method as the command line has it, NAME or "NAME:OVERRIDE;OVERRIDE": its label and its overrides."""
    name, _, rest = method.partition(":")
    return method, [f"+spec={name}", *(part.strip() for part in rest.split(";") if part.strip())]


@contextmanager
def engines(
    methods: Sequence[str], overrides: Sequence[str], model: str = "smollm2", *, cpu_time: bool = False
) -> Iterator[dict[str, LLM]]:
    """An engine for each method, all on the same settings otherwise.

    With `cpu_time` they go by the CPU time of the process and compute on one thread: figures that a busy machine hardly
    disturbs, of compute alone.
    """
    if cpu_time:
        overrides = [*overrides, "num_threads=1"]
    with ExitStack() as stack:
        found = {}
        for method in methods:
            label, own = parse(method)
            found[label] = stack.enter_context(LLM(model, overrides=[*BASE, *overrides, *own]))
            if cpu_time:
                found[label].engine.clock = time.process_time
        yield found


@dataclass
class Tally:
    """What one method came to on one set of prompts."""

    tokens: int = 0  # after each request's first step
    steps: int = 0
    seconds: float = 0.0
    drafts: DraftTotals = field(default_factory=DraftTotals)

    def add(self, output: RequestOutput) -> None:
        """A request that ran alone."""
        timeline = output.outputs[0].timeline
        self.tokens += sum(timeline.token_counts[1:])
        self.steps += len(timeline.token_counts[1:])
        self.seconds += timeline.decode_s or 0.0
        self.add_drafts(output)

    def add_drafts(self, output: RequestOutput) -> None:
        timeline = output.outputs[0].timeline
        self.drafts.add_line(
            {
                "tokens_per_step": timeline.token_counts,
                "drafts_per_step": timeline.draft_counts,
                "accepted_per_step": timeline.accepted_counts,
                "draft_depth_per_step": timeline.draft_depths,
            }
        )

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def decode_speed(llm: LLM, prompts: Sequence[dict[str, Any]], params: SamplingParams) -> float:
    """Tokens per second of requests sent at once, while all of them decode: from the last first token to the first last one."""
    outputs = llm.generate(list(prompts), params)
    timelines = [output.outputs[0].timeline for output in outputs]
    begin = max(timeline.token_times_s[0] for timeline in timelines)
    end = min(timeline.token_times_s[-1] for timeline in timelines)
    later = (
        count
        for timeline in timelines
        for when, count in zip(timeline.token_times_s, timeline.token_counts, strict=True)
        if begin < when <= end
    )
    return sum(later) / (end - begin)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)])
