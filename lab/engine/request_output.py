"""What a user gets for a prompt."""

from dataclasses import dataclass

from lab.metrics.timeline import Timeline
from lab.types import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position, under the model's unchanged logits."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str | None  # None without a tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request; in a delta, what is new of it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None  # per token, by token id: the chosen one first, then the most likely by rank
    cumulative_logprob: float | None  # of all tokens so far, in a delta too; None unless logprobs were asked for
    finish_reason: FinishReason | None
    stop_reason: int | str | None  # the stop token id or stop string that ended it
    timeline: Timeline
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What came of one prompt: all samples, or in a delta those with news."""

    request_id: str
    prompt: str | None  # None for a prompt given as ids
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # None first: nothing precedes the first token
    outputs: list[CompletionOutput]
    finished: bool
    error: str | None  # why the engine could not go on with it; the finish_reason is `error`

    @property
    def metrics(self) -> Timeline:
        """When things happened, the steps of all samples merged: from arrival to the end of the last one."""
        timelines = [output.timeline for output in self.outputs]
        if len(timelines) == 1:
            return timelines[0]
        merged = Timeline(timelines[0].arrival_s)
        merged.scheduled_s = min((t.scheduled_s for t in timelines if t.scheduled_s is not None), default=None)
        names = ("token_times_s", "token_counts", "accepted_counts", "draft_counts", "draft_depths")
        steps = (zip(*(getattr(timeline, name) for name in names), strict=True) for timeline in timelines)
        for now_s, *counts in sorted(step for of_sample in steps for step in of_sample):
            merged.add_tokens(now_s, *counts)
        ends = [t.finish_s for t in timelines if t.finish_s is not None]
        merged.finish_s = max(ends) if len(ends) == len(timelines) else None
        return merged
