"""When things happened to one request, and the latencies that follow from it. Torch-free.

All latencies start at the arrival of the request, so waiting in the queue is never left out. They are differences of the
times as recorded, with no rounding, and None (or empty) where the request did not get that far.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """The times of one request on the engine's clock, in seconds. The output processor writes it."""

    arrival_s: float
    scheduled_s: float | None = None  # first admission into a step
    token_times_s: list[float] = field(default_factory=list)  # one entry per step that brought tokens
    token_counts: list[int] = field(default_factory=list)  # how many it brought
    accepted_counts: list[int] = field(default_factory=list)  # drafts accepted among them
    draft_counts: list[int] = field(default_factory=list)  # drafts that were verified
    draft_depths: list[int] = field(default_factory=list)  # the most of them that could be accepted: of a tree, its depth
    finish_s: float | None = None

    def add_tokens(self, now_s: float, count: int, accepted: int = 0, drafts: int = 0, depth: int | None = None) -> None:
        """A step that brought tokens. `depth`: of its drafts, None for a chain of them."""
        self.token_times_s.append(now_s)
        self.token_counts.append(count)
        self.accepted_counts.append(accepted)
        self.draft_counts.append(drafts)
        self.draft_depths.append(drafts if depth is None else depth)

    @property
    def num_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival to the first step that brought a token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: one sample per step that brought tokens after the first such step.

        A step that accepted drafts brings several tokens and is still one sample: it is the gap a reader sees. The gap
        that a preemption leaves is a sample like any other. `token_counts[1:]` holds the tokens of each.
        """
        times = self.token_times_s
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (tokens - 1); None for fewer than two tokens."""
        tokens = self.num_tokens
        return (self.token_times_s[-1] - self.token_times_s[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """From arrival to the end of the request."""
        return self.finish_s - self.arrival_s if self.finish_s is not None else None

    @property
    def queue_s(self) -> float | None:
        """From arrival to the first admission into a step."""
        return self.scheduled_s - self.arrival_s if self.scheduled_s is not None else None

    @property
    def prefill_s(self) -> float | None:
        """From the first admission to the first token."""
        if self.scheduled_s is None or not self.token_times_s:
            return None
        return self.token_times_s[0] - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last: queue + prefill + decode is the whole of a request that ended by itself."""
        return self.token_times_s[-1] - self.token_times_s[0] if self.token_times_s else None
