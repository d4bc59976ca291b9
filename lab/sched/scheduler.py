"""What runs in the next step, and what came of the last one. Torch-free.

There are no prefill and decode phases: every request has `num_computed` chasing the tokens it has, and a step gives out
one budget of tokens. Running requests come first, in the order of their admission, then waiting ones in the policy's
order. A long prompt takes what is left of the budget and goes on in the next step (chunked prefill).

When the cache is full, the policy's victim among the running requests is preempted: it gives its blocks back, keeps its
output, waits again at its place in the order, and is computed anew later (what is still cached of it is hit). A step that
preempted admits nobody.

Asynchronous scheduling plans step N + 1 before the results of step N are known. What step N may still add is counted in
`Request.num_in_flight`, all drafts taken as accepted, so `len(token_ids) + num_in_flight` is the most tokens the request
can have when step N + 1 runs, and that and `num_computed` are upper bounds with the same error. `update` takes both back by
the drafts that were not drafted or not accepted. A request that ends in step N leaves a void chunk in step N + 1: it is
computed, its result is ignored, and its blocks can be given away at once because steps execute in order. A preempted
request may have tokens in flight too; they are appended when they come, which is before it can be admitted again: the step
that preempts admits nobody, and the next one is planned with them known.
"""

from lab.contracts.policy import Policy
from lab.errors import UserError
from lab.kv.blocks import BlockManager
from lab.sched.limits import cut_at_stop, max_len, refuse_if_never_fits
from lab.sched.plan import StepPlan
from lab.sched.queue import WaitingQueue
from lab.sched.static import StaticBatch
from lab.settings import DebugSettings, SchedulerSettings
from lab.types import Chunk, FinishReason, NewRow, Request, RowResult, Status, Step, StepResult, TokenLogprobs, Update


class Scheduler:
    """The only writer of the requests' progress.

    Args:
        settings: budgets and modes.
        policy: orders the waiting requests and picks the victims.
        max_model_len: most tokens of a request, prompt and output together.
        num_drafts: most drafts a row may have verified in a step.
        draft_depth: most of them that can be accepted, where drafts are trees; None: all, they are chains.
        debug: `preempt_every` and `check_integrity`.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        blocks: BlockManager,
        policy: Policy,
        *,
        max_model_len: int,
        num_drafts: int = 0,
        draft_depth: int | None = None,
        debug: DebugSettings | None = None,
    ) -> None:
        self.settings = settings
        self.blocks = blocks
        self.policy = policy
        self.max_model_len = max_model_len
        self.num_drafts = num_drafts
        self._has_trees = draft_depth is not None
        self._most_new = 1 + (num_drafts if draft_depth is None else draft_depth)  # tokens that a step adds to a row
        self.num_preemptions = 0
        self._debug = debug or DebugSettings()
        self._max_chunk = settings.long_prefill_token_threshold or settings.max_num_batched_tokens
        self._requests: dict[str, Request] = {}  # that have not ended
        self._running: list[Request] = []  # in the order of admission
        self._waiting = WaitingQueue(policy)
        self._static = StaticBatch(settings.max_num_seqs) if settings.batching == "static" else None
        self._freed: list[str] = []  # whose rows the next step ends
        self._in_flight: dict[int, list[Request]] = {}  # the requests of every submitted step's chunks, by its index
        self._num_steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to schedule, to free in the runner, or to wait for."""
        return bool(self._requests or self._freed or self._in_flight)

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises UserError when it can never fit, or its id is in use."""
        if request.id in self._requests:
            raise UserError(f"request id '{request.id}' is in use by a request that has not ended.")
        refuse_if_never_fits(request, self.settings, self.blocks, self.max_model_len)
        request.max_len = max_len(request, self.max_model_len)
        self._requests[request.id] = request
        self._waiting.push(request)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None) -> bool:
        """End a request from outside (a stop string, an abort). False when there is none of that id any more."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason, stop_reason)
        return True

    def fail_all(self) -> list[str]:
        """End every request, and forget the steps in flight and the cache: a step failed, and its rows are gone.

        Returns:
            The ids of the requests that ended.
        """
        failed = list(self._requests.values())
        for request in failed:
            self._end(request, FinishReason.ERROR, None)
        self._in_flight.clear()
        self._freed.clear()
        emptied = self.blocks.reset_prefix_cache()
        assert emptied, "blocks are in use by nobody"
        return [request.id for request in failed]

    def schedule(self, now: float) -> Step:
        """Plan the next step; `now` is the time on the engine's clock.

        The step may have no chunks: when all that could run is in flight, or only rows are to be freed.
        """
        most = 1 if self.settings.async_scheduling else 0
        assert len(self._in_flight) <= most, "a step must be updated before the next but one is planned"
        plan = StepPlan(self._num_steps, self.settings.max_num_batched_tokens)
        self._num_steps += 1
        self._force_preemption(plan)
        self._plan_running(plan)
        register = self.blocks.register
        for request in plan.requests:  # only now: while others were planned, any of them could still be preempted
            register(request)
        if plan.num_preempted == 0 and self._waiting:
            self._plan_waiting(plan, now)
        freed, self._freed = self._freed, []
        if plan.chunks:
            self._in_flight[plan.index] = plan.requests
        if self._debug.check_integrity:
            self.blocks.check_integrity(self._running)
        return plan.finish(freed)

    def update(self, step: Step, result: StepResult) -> list[Update]:
        """Take in what came of a step: append tokens, end requests. Returns the news for the front."""
        assert result.index == step.index, f"result of step {result.index} for step {step.index}"
        requests = self._in_flight.pop(step.index, [])
        updates = []
        for request, chunk, row in zip(requests, step.chunks, result.rows, strict=True):
            if request.status is not Status.FINISHED:  # else the chunk was void
                update = self._apply(request, chunk, row)
                if update is not None:
                    updates.append(update)
        if self._debug.check_integrity:
            self.blocks.check_integrity(self._running)
        return updates

    def _plan_running(self, plan: StepPlan) -> None:
        running, extend = self._running, self.blocks.extend
        i = 0
        while i < len(running) and plan.budget > 0:
            request = running[i]
            num_tokens, num_drafts = self._share(request, plan.budget, len(running) - i - 1)
            if num_tokens == 0:
                i += 1
                continue
            new_ids = extend(request, request.num_computed + num_tokens)
            if new_ids is None and num_drafts:  # nobody is preempted for the sake of drafts
                num_tokens, num_drafts = num_tokens - num_drafts, 0
                new_ids = extend(request, request.num_computed + num_tokens)
            while new_ids is None:
                victim = self.policy.victim(running)
                i -= running.index(victim) < i
                self._preempt(victim, plan)
                if victim is request:
                    break
                new_ids = extend(request, request.num_computed + num_tokens)
            else:
                plan.add(request, num_tokens, num_drafts, new_ids)
                i += 1

    def _share(self, request: Request, budget: int, num_behind: int) -> tuple[int, int]:
        """How many positions of a running request come next, and how many of them are drafts; (0, 0) when none can.

        A request in its prefill gets what the budget and the threshold allow. One that decodes gets the token it sampled
        last, known or in flight, and drafts within its limits; drafts never take the token of one of the `num_behind` rows.
        """
        if request.num_computed < request.num_prefill:
            return min(request.num_prefill - request.num_computed, budget, self._max_chunk), 0
        most = len(request.token_ids) + min(request.num_in_flight, self._most_new)  # of one step, of which not all nodes stand
        if most >= request.max_len:  # if all in flight is accepted, it ends there
            return 0, 0
        wanted = self.num_drafts if self.settings.async_scheduling else len(request.draft_ids)
        if request.params.max_drafts is not None:
            wanted = min(wanted, request.params.max_drafts)
        if wanted == 0:
            return 1, 0
        room = request.max_len - most - 1
        if self._has_trees and room > 0:  # it bounds their depth, which is the proposer's business
            room = wanted
        num_drafts = max(0, min(wanted, room, budget - 1 - num_behind))
        return 1 + num_drafts, num_drafts

    def _plan_waiting(self, plan: StepPlan, now: float) -> None:
        if self._static is not None and not self._static.open(self._waiting, not self._running):
            return
        plan.num_reserved = sum(self._wanted(r) for r in self._running if r.num_computed < r.num_prefill)
        while plan.budget > 0 and len(self._running) < self.settings.max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                break
            if not self._may_start(request):
                self._waiting.set_aside()
            elif self._admit(request, plan, now):
                self._waiting.pop()
            else:  # nobody overtakes for being small
                if self._static is not None:
                    self._static.close()
                break
        self._waiting.restore()

    def _may_start(self, request: Request) -> bool:
        """Whether a waiting request may start now; one that may not is passed over without losing its place.

        This is the place for what a request may have to wait for beside budget and memory. Today that is its turn under
        static batching.
        """
        return self._static is None or request.id in self._static

    def _admit(self, request: Request, plan: StepPlan, now: float) -> bool:
        """Give a waiting request a row and its first chunk; False, and nothing is changed, when there is no room.

        There must be blocks for all the tokens it has, although only those of the chunk are taken: else its prefill would
        be preempted half way, for lack of blocks that others have been admitted to.
        """
        assert request.num_in_flight == 0, f"request {request.id} has tokens in flight"
        blocks = self.blocks
        hit_ids = blocks.match(request)
        start = blocks.tokens_in(hit_ids)
        num_left = len(request.token_ids) - start
        num_tokens = min(num_left, plan.budget, self._max_chunk)
        # A preempted request may have grown past the budget: it is the one that chunks even when chunking is off.
        if not self.settings.enable_chunked_prefill and num_tokens < num_left <= self.settings.max_num_batched_tokens:
            return False
        if blocks.num_free_without(hit_ids) - plan.num_reserved < blocks.wanted(len(request.token_ids), hit_ids):
            return False
        blocks.admit(request, hit_ids, start + num_tokens)
        request.num_computed = start
        request.num_prefill = len(request.token_ids)
        request.status = Status.RUNNING
        if request.scheduled_s is None:
            request.scheduled_s = now
            request.num_cached = start
        self._running.append(request)
        if self._static is not None:
            self._static.remove(request)
        plan.new_rows.append(_new_row(request))
        plan.add(request, num_tokens, 0, [])
        plan.num_reserved += self._wanted(request)
        blocks.register(request)
        return True

    def _wanted(self, request: Request) -> int:
        """Blocks that a request in its prefill has yet to take."""
        return self.blocks.wanted(request.num_prefill, request.block_ids)

    def _force_preemption(self, plan: StepPlan) -> None:
        """Preempt every so many steps, for tests: only a request that got a token since its admission, so that all end."""
        every = self._debug.preempt_every
        if every and self._num_steps % every == 0:
            fruitful = [r for r in self._running if len(r.token_ids) > r.num_prefill]
            if fruitful:
                self._preempt(self.policy.victim(fruitful), plan)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.drop(request)
        plan.num_preempted += 1
        self._running.remove(request)
        self.blocks.free(request)
        request.num_computed = 0
        request.draft_ids = []
        request.num_preemptions += 1
        request.status = Status.PREEMPTED
        self.num_preemptions += 1
        self._freed.append(request.id)
        self._waiting.push(request)
        if self._static is not None:
            self._static.add(request)

    def _apply(self, request: Request, chunk: Chunk, row: RowResult) -> Update | None:
        prompt_logprobs = None if row.prompt_logprobs is None else _undelivered(request, chunk, row)
        if chunk.samples:
            new_ids = self._append(request, row, chunk.num_drafts)
        else:
            assert not row.token_ids, f"request {request.id}: tokens from a chunk that does not sample"
            if not prompt_logprobs:
                return None
            new_ids = []
        num_new, logprobs = len(new_ids), row.logprobs
        return Update(
            request.id,
            new_ids,
            None if logprobs is None else logprobs[:num_new],
            prompt_logprobs or None,
            min(row.num_accepted, num_new) if row.num_drafts else 0,
            row.num_drafts,
            request.finish_reason,
            request.stop_reason,
            request.num_cached,
            request.num_preemptions,
            request.scheduled_s,
            draft_depth=row.draft_depth,
        )

    def _append(self, request: Request, row: RowResult, num_drafts: int) -> list[int]:
        """Add what a chunk with `num_drafts` planned drafts sampled, and end the request where it must; the tokens kept."""
        new_ids = row.token_ids
        num_lost = 1 + num_drafts - len(new_ids)
        assert 0 <= num_lost <= num_drafts, f"request {request.id}: {len(new_ids)} tokens, {num_drafts} drafts"
        request.num_in_flight -= 1 + num_drafts
        if request.status is Status.RUNNING:
            request.num_computed -= num_lost
            if row.draft_ids and not self.settings.async_scheduling:
                request.draft_ids = row.draft_ids
        num_kept, reason, stop_reason = cut_at_stop(request, new_ids)
        if num_kept < len(new_ids):
            new_ids = new_ids[:num_kept]
        request.token_ids += new_ids
        self.blocks.register(request)  # a void chunk counts: it is computed before anybody can hit what it fills
        if reason is not None:
            self._end(request, reason, stop_reason)
        return new_ids

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
            self.blocks.free(request)
            self._freed.append(request.id)
        else:
            self._waiting.remove(request)
        if self._static is not None:
            self._static.remove(request)
        del self._requests[request.id]
        request.status = Status.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.num_in_flight = 0
        request.draft_ids = []


def _new_row(request: Request) -> NewRow:
    return NewRow(
        request_id=request.id,
        token_ids=list(request.token_ids),
        num_prompt=request.num_prompt,
        params=request.params,
        seed=request.seed,
        eos_ids=request.eos_ids,
        block_ids=list(request.block_ids),
        num_computed=request.num_computed,
    )


def _undelivered(request: Request, chunk: Chunk, row: RowResult) -> list[TokenLogprobs]:
    """The prompt log-probabilities of a chunk without those that an earlier prefill of the request has brought."""
    num_before = request.num_prompt_logprobs - chunk.start
    assert num_before >= 0, f"request {request.id}: prompt log-probabilities with a gap before position {chunk.start + 1}"
    request.num_prompt_logprobs = max(request.num_prompt_logprobs, chunk.start + len(row.prompt_logprobs))
    return row.prompt_logprobs[num_before:]
