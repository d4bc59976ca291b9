"""Between the engine and its users: hands over requests, takes in updates, ends what meets a stop string."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from lab.engine.detokenizer import Vocabulary
from lab.engine.frontend import Submission
from lab.engine.generation import Generation
from lab.errors import UserError
from lab.types import FinishReason, Request, Update


class EngineCore(Protocol):
    """What the output side uses of the engine."""

    clock: Callable[[], float]

    def add(self, request: Request) -> None: ...

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool: ...


@dataclass(slots=True)
class Totals:
    """What an engine's users asked for and got since its start."""

    num_requests: int = 0
    num_failed: int = 0  # ended by an error of the engine
    prompt_tokens: int = 0  # a prompt with several samples counts once
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class OutputProcessor:
    """Turns the engine's updates into the state of the generations that users look at."""

    def __init__(self, engine: EngineCore, vocabulary: Vocabulary | None) -> None:
        self.totals = Totals()
        self._engine = engine
        self._vocabulary = vocabulary
        self._by_request_id: dict[str, Generation] = {}  # the engine's ids of all open samples
        self._active: dict[str, Generation] = {}  # by the user's id

    @property
    def active(self) -> list[Generation]:
        """The generations that have not finished, oldest first."""
        return list(self._active.values())

    def submit(self, submission: Submission) -> Generation:
        """Hand all samples of a request to the engine, or none. Raises UserError when it refuses one."""
        if submission.id in self._active:
            raise UserError(f"request id '{submission.id}' belongs to a request that has not finished: give another one.")
        added: list[str] = []
        try:
            for request in submission.requests:
                self._engine.add(request)
                added.append(request.id)
        except UserError:
            for request_id in added:
                self._engine.finish(request_id, FinishReason.ABORT)
            raise
        generation = Generation(submission, self._vocabulary)
        self._active[submission.id] = generation
        self.totals.num_requests += 1
        self.totals.prompt_tokens += len(submission.prompt_ids)
        self._by_request_id.update((request_id, generation) for request_id in added)
        return generation

    def process(self, updates: list[Update]) -> list[Generation]:
        """Take in a step's updates. Returns the generations with news, in the order of the updates.

        News of a sample that is over here already, stopped or aborted while the step was in flight, is dropped.
        """
        now_s = self._engine.clock()
        changed: dict[str, Generation] = {}
        for update in updates:
            generation = self._by_request_id.get(update.request_id)
            if generation is None:
                continue
            changed[generation.id] = generation
            num_before = generation.num_output
            stop = generation.update(update, now_s)
            self._count(update, generation.num_output - num_before)
            if stop is not None and update.finish_reason is None:
                self._engine.finish(update.request_id, FinishReason.STOP, stop)
            if stop is not None or update.finish_reason is not None:
                del self._by_request_id[update.request_id]
                if generation.finished:
                    del self._active[generation.id]
                    self.totals.num_failed += generation.error is not None
        return list(changed.values())

    def abort(self, generation: Generation) -> None:
        """End a generation, in the engine too. One that has finished stays as it is."""
        if generation.finished:
            return
        for request_id in generation.open_ids:
            self._engine.finish(request_id, FinishReason.ABORT)
            del self._by_request_id[request_id]
        generation.abort(self._engine.clock())
        del self._active[generation.id]

    def _count(self, update: Update, num_output: int) -> None:
        self.totals.output_tokens += num_output
        self.totals.draft_tokens += update.num_drafts
        self.totals.accepted_tokens += update.num_accepted
