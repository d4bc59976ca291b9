"""One request while it is generated: the text, ids and logprobs of its samples, and views of them."""

from lab.engine.detokenizer import Vocabulary
from lab.engine.frontend import Submission
from lab.engine.request_output import CompletionOutput, Logprob, RequestOutput
from lab.engine.stop_strings import StopStrings
from lab.metrics.timeline import Timeline
from lab.types import FinishReason, Request, TokenLogprobs, Update


class Generation:
    """One request of the user, with its n samples.

    `output` and `delta` take views: all there is so far, or what is new since the last delta. A slow reader loses nothing
    and holds nothing up: whatever came between two deltas is merged in the second.
    """

    def __init__(self, submission: Submission, vocabulary: Vocabulary | None) -> None:
        self.submission = submission
        self.error: str | None = None
        self._vocabulary = vocabulary
        self._samples = {r.id: _Sample(r, i, vocabulary) for i, r in enumerate(submission.requests)}
        wants_prompt = submission.requests[0].params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wants_prompt else None

    @property
    def id(self) -> str:
        return self.submission.id

    @property
    def finished(self) -> bool:
        return not self.open_ids

    @property
    def open_ids(self) -> list[str]:
        """The engine's ids of the samples that have not ended."""
        return [request_id for request_id, sample in self._samples.items() if sample.finish_reason is None]

    @property
    def num_output(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.num_tokens for sample in self._samples.values())

    def output(self) -> RequestOutput:
        """All there is so far, without the text that is held back because a stop string may begin in it."""
        return self._output([sample.view() for sample in self._samples.values()])

    def delta(self) -> RequestOutput | None:
        """What is new since the last call, or None; each sample's finish_reason comes in exactly one of them."""
        news = [delta for sample in self._samples.values() if (delta := sample.delta()) is not None]
        return self._output(news) if news else None

    def update(self, update: Update, now_s: float) -> str | None:
        """Take in what a step did for one sample. Returns the stop string that ended it, if one did."""
        sample = self._samples[update.request_id]
        if self._prompt_logprobs is not None and update.prompt_logprobs is not None:
            self._prompt_logprobs += [user_logprobs(entry, self._vocabulary) for entry in update.prompt_logprobs]
        if update.error is not None:
            self.error = update.error
        return sample.update(update, now_s)

    def abort(self, now_s: float) -> None:
        """End every sample that is still open."""
        for request_id in self.open_ids:
            self._samples[request_id].end(FinishReason.ABORT, None, now_s)

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        first = next(iter(self._samples.values()))
        return RequestOutput(
            request_id=self.submission.id,
            prompt=self.submission.prompt,
            prompt_token_ids=self.submission.prompt_ids,
            num_cached_tokens=first.num_cached,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            outputs=outputs,
            finished=self.finished,
            error=self.error,
        )


class _Sample:
    """One sample while it is generated."""

    def __init__(self, request: Request, index: int, vocabulary: Vocabulary | None) -> None:
        params = request.params
        self.index = index
        self.num_cached = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._params = params
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(params.skip_special_tokens) if vocabulary is not None else None
        self._stop = StopStrings(params.stop)
        self._timeline = Timeline(request.arrival_s)
        self._text = ""
        self._num_held = 0  # characters at the end of the text in which a stop string may begin
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self._num_text_given = 0  # what earlier deltas held: characters, tokens, the end
        self._num_tokens_given = 0
        self._end_given = False

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def update(self, update: Update, now_s: float) -> str | None:
        """Take in what a step did. Returns the stop string that ended the sample, if one did."""
        self.num_cached = max(self.num_cached, update.num_cached)
        self.num_preemptions = max(self.num_preemptions, update.num_preemptions)
        self._timeline.scheduled_s = update.scheduled_s if update.scheduled_s is not None else self._timeline.scheduled_s
        num_before = len(self._token_ids)
        stop = self._add_tokens(update)
        if added := len(self._token_ids) - num_before:
            accepted = min(update.num_accepted, added)
            self._timeline.add_tokens(now_s, added, accepted, update.num_drafts, update.draft_depth)
        if stop is not None:
            self._close(FinishReason.STOP, stop, now_s)
        elif update.finish_reason is not None:
            stop = self.end(update.finish_reason, update.stop_reason, now_s)
        else:
            self._num_held = self._stop.num_held(self._text)
        return stop

    def end(self, reason: FinishReason, stop_reason: int | str | None, now_s: float) -> str | None:
        """End the sample, showing what was held back. If that completes a stop string, it ends by it: returns the string."""
        stop = self._add_text(self._detokenizer.flush()) if self._detokenizer is not None else None
        if stop is not None:
            reason, stop_reason = FinishReason.STOP, stop
        self._close(reason, stop_reason, now_s)
        return stop

    def view(self) -> CompletionOutput:
        return self._completion(0, 0)

    def delta(self) -> CompletionOutput | None:
        """What is new since the last delta, or None."""
        num_shown, num_tokens = len(self._text) - self._num_held, len(self._token_ids)
        ends = self.finish_reason is not None and not self._end_given
        if num_shown == self._num_text_given and num_tokens == self._num_tokens_given and not ends:
            return None
        output = self._completion(self._num_text_given, self._num_tokens_given)
        self._num_text_given, self._num_tokens_given = num_shown, num_tokens
        self._end_given = self.finish_reason is not None
        return output

    def _completion(self, from_char: int, from_token: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._text[from_char : len(self._text) - self._num_held],
            token_ids=self._token_ids[from_token:],
            logprobs=None if self._logprobs is None else self._logprobs[from_token:],
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            timeline=self._timeline,
            num_preemptions=self.num_preemptions,
        )

    def _close(self, reason: FinishReason, stop_reason: int | str | None, now_s: float) -> None:
        self.finish_reason, self._stop_reason = reason, stop_reason
        self._num_held = 0
        self._timeline.finish_s = now_s

    def _add_tokens(self, update: Update) -> str | None:
        """Append tokens with their text and logprobs, up to the one that completes a stop string: returns the string."""
        silent = self._silent_token(update)
        for i, token_id in enumerate(update.token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None:
                assert update.logprobs is not None, f"the engine gave no logprobs for {update.request_id}"
                self._logprobs.append(user_logprobs(update.logprobs[i], self._vocabulary))
                self._cumulative_logprob += update.logprobs[i].logprobs[0]
            if self._detokenizer is None or i == silent:
                continue
            stop = self._add_text(self._detokenizer.push(token_id))
            if stop is not None:
                return stop
        return None

    def _add_text(self, piece: str) -> str | None:
        """Append text. If it completes a stop string, cut the text there: returns the string."""
        self._text += piece
        if not piece or len(self._token_ids) < self._params.min_tokens:
            return None
        match = self._stop.find(self._text, len(piece))
        if match is None:
            return None
        self._text = self._text[: match.end if self._params.include_stop_str_in_output else match.start]
        return match.string

    def _silent_token(self, update: Update) -> int | None:
        """The index of the token that is not shown as text: the EOS or stop token that ended the sample."""
        is_stop_token = update.finish_reason is FinishReason.STOP and bool(update.token_ids)
        return len(update.token_ids) - 1 if is_stop_token and not self._params.include_stop_str_in_output else None


def user_logprobs(entry: TokenLogprobs, vocabulary: Vocabulary | None) -> dict[int, Logprob]:
    """One position's log-probabilities by token id: the chosen token first, then the most likely ones by rank."""

    def logprob(token_id: int, value: float, rank: int) -> Logprob:
        return Logprob(value, rank, None if vocabulary is None else vocabulary.token_text(token_id))

    chosen, *others = entry.token_ids
    found = {chosen: logprob(chosen, entry.logprobs[0], entry.rank)}
    for rank, (token_id, value) in enumerate(zip(others, entry.logprobs[1:], strict=True), start=1):
        if token_id not in found:
            found[token_id] = logprob(token_id, value, rank)
    return found
