"""Sends a workload's requests at their arrival times and steps the engine until all are done (open loop)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lab.contracts.workload import WorkItem
from lab.engine.frontend import Frontend, Submission
from lab.engine.generation import Generation
from lab.engine.stack import Stack
from lab.errors import UserError
from lab.sampling_params import SamplingParams

LONGEST_SLEEP_S = 0.05  # so that Ctrl-C is answered at once


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the workload, tokenised, or the reason why it was refused."""

    item: WorkItem
    number: int  # in the workload
    submission: Submission | None
    error: str | None = None

    @property
    def id(self) -> str:
        return str(self.number)


class Listener(Protocol):
    """Who is told what happens."""

    def refused(self, planned: Planned, error: str) -> None: ...

    def finished(self, generation: Generation, planned: Planned) -> None: ...

    def aborted(self, generation: Generation, planned: Planned) -> None: ...


def plan(items: Sequence[WorkItem], frontend: Frontend, defaults: SamplingParams) -> list[Planned]:
    """Check and tokenise every request before the clock starts.

    A request that this model cannot take (its prompt is too long, say) is planned with its error. Raises UserError for
    sampling parameters that no model could take.
    """
    planned = []
    for number, item in enumerate(items):
        try:
            params = SamplingParams.from_mapping(item.sampling, base=defaults)
        except UserError as error:
            raise UserError(f"workload: request {number}: {error}") from None
        prompt = {
            "prompt": item.prompt,
            "prompt_token_ids": item.prompt_token_ids,
            "messages": item.messages,
            "priority": item.priority,
            "cache_salt": item.cache_salt,
        }
        try:
            submission = frontend.prepare(prompt, params, request_id=str(number))
        except UserError as error:
            planned.append(Planned(item, number, None, str(error)))
        else:
            planned.append(Planned(item, number, submission))
    return planned


class Sender:
    """The loop of a run.

    Args:
        planned: by arrival time.
        stop: asked between steps whether to end early.
        sleep: waits so many seconds, or less.
        progress: told after each step how many requests have ended, and the output tokens so far.
    """

    def __init__(
        self,
        stack: Stack,
        planned: Sequence[Planned],
        listener: Listener,
        stop: Callable[[], bool],
        sleep: Callable[[float], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self._stack = stack
        self._planned = planned
        self._listener = listener
        self._stop = stop
        self._sleep = sleep
        self._progress = progress
        self._running: dict[str, Planned] = {}
        self._num_sent = 0
        self._num_tokens = 0

    def run(self, start_s: float) -> None:
        """Send and step until every request has ended, or `stop` says so; what still runs then is aborted.

        `start_s` is the moment, on the engine's clock, that arrival times count from.
        """
        engine, outputs = self._stack.engine, self._stack.outputs
        while not self._stop():
            self._send_due(start_s)
            if engine.has_work:
                updates = engine.step()
                self._report(outputs.process(updates))
                self._num_tokens += sum(len(update.token_ids) for update in updates)
                self._progress(self._num_sent - len(self._running), self._num_tokens)
            elif self._num_sent < len(self._planned):
                self._wait(start_s + self._planned[self._num_sent].item.arrival_s - engine.clock())
            else:
                return
        for generation in outputs.active:
            outputs.abort(generation)
            self._listener.aborted(generation, self._running.pop(generation.id))

    def _send_due(self, start_s: float) -> None:
        """Hand over the requests whose time has come.

        A request's arrival is its time in the workload, not this moment: that a long step kept it waiting here is part of
        its latency.
        """
        now_s = self._stack.engine.clock()
        while self._num_sent < len(self._planned):
            planned = self._planned[self._num_sent]
            arrival_s = start_s + planned.item.arrival_s
            if arrival_s > now_s:
                return
            self._num_sent += 1
            error = planned.error or self._submit(planned, arrival_s)
            if error:
                self._listener.refused(planned, error)

    def _submit(self, planned: Planned, arrival_s: float) -> str | None:
        """Hand one request to the engine. Returns why it was refused, if it was."""
        for request in planned.submission.requests:
            request.arrival_s = arrival_s
        try:
            self._stack.outputs.submit(planned.submission)
        except UserError as error:
            message = str(error)
            for request in planned.submission.requests:  # whoever shows it says which request it was
                message = message.removeprefix(f"request {request.id}: ")
            return message
        self._running[planned.id] = planned
        return None

    def _report(self, changed: Sequence[Generation]) -> None:
        for generation in changed:
            if generation.finished:
                self._listener.finished(generation, self._running.pop(generation.id))

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(min(seconds, LONGEST_SLEEP_S))
