"""When things happened to one request, and the latencies that follow from it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Timeline:
    """The times of one request on the engine's clock, in seconds. The output processor writes it."""

    arrival_s: float
    scheduled_s: float | None = None  # first admission into a step
    token_times_s: list[float] = field(default_factory=list)  # one entry per step that brought tokens
    token_counts: list[int] = field(default_factory=list)  # how many it brought
    accepted_counts: list[int] = field(default_factory=list)  # drafts accepted among them
    finish_s: float | None = None

    def add_tokens(self, now_s: float, count: int, accepted: int = 0) -> None:
        self.token_times_s.append(now_s)
        self.token_counts.append(count)
        self.accepted_counts.append(accepted)
