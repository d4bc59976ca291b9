"""Runs a scheduler against the fake runner, and holds it to what must be true of every run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.kv.blocks import BlockManager
from lab.kv.grouped import GroupedBlockManager
from lab.kv.groups import Full, Need
from lab.sampling_params import SamplingParams
from lab.sched.limits import reach
from lab.sched.policies.fcfs import FirstComeFirstServed
from lab.sched.policies.priority import ByPriority
from lab.sched.scheduler import Scheduler
from lab.settings import DebugSettings, SchedulerSettings
from lab.types import FinishReason, Request, Step, StepResult, Update
from tests.sched.fake_runner import FakeRunner, solo_output

POLICIES = {"fcfs": FirstComeFirstServed, "priority": ByPriority}


def make_request(request_id: str, prompt_ids: Sequence[int], index: int = 0, **kwargs: Any) -> Request:
    """A request; sampling parameters and fields of the request go by their names."""
    own = {k: kwargs.pop(k) for k in ("eos_ids", "priority", "cache_salt", "fork_group", "arrival_s") if k in kwargs}
    params = SamplingParams(temperature=0.0, **kwargs)
    return Request(request_id, list(prompt_ids), params, own.pop("arrival_s", float(index)), 0, arrival_index=index, **own)


@dataclass
class Harness:
    """One engine without a model. `run` steps it until nothing is left to do."""

    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 256
    num_drafts: int = 0
    draft_depth: int | None = None
    policy: str = "fcfs"
    caching: bool = True
    preempt_every: int = 0
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[Need, ...] = (Full(),)

    def __post_init__(self) -> None:
        settings = SchedulerSettings(**{"async_scheduling": False, "max_num_batched_tokens": 64, **self.settings})
        options = {"enable_prefix_caching": self.caching}
        if self.needs == (Full(),):
            self.blocks = BlockManager(self.num_blocks, self.block_size, **options)
        else:
            most = reach(settings, self.num_drafts)
            self.blocks = GroupedBlockManager(self.num_blocks, self.block_size, self.needs, reach=most, **options)
        policy = POLICIES[self.policy]
        self.scheduler = Scheduler(
            settings,
            self.blocks,
            policy(policy.Options()),
            max_model_len=self.max_model_len,
            num_drafts=self.num_drafts,
            draft_depth=self.draft_depth,
            debug=DebugSettings(preempt_every=self.preempt_every, check_integrity=True),
        )
        self.runner = FakeRunner(
            self.num_blocks,
            self.block_size,
            max_model_len=self.max_model_len,
            num_drafts=self.num_drafts,
            is_async=settings.async_scheduling,
            seed=self.seed,
            needs=self.needs,
        )
        self.is_async = settings.async_scheduling
        self.budget = settings.max_num_batched_tokens
        self.max_num_seqs = settings.max_num_seqs
        self.steps: list[Step] = []
        self.updates: list[Update] = []
        self.requests: dict[str, Request] = {}
        self.now = 0.0
        self._in_flight: tuple[Step, StepResult] | None = None

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.id] = request

    def step(self) -> list[Update]:
        """Plan and execute one step; take in its results, or under async scheduling those of the step before."""
        self.now += 1.0
        step = self.scheduler.schedule(self.now)
        assert step.num_tokens <= self.budget
        assert self.scheduler.num_running <= self.max_num_seqs
        assert not (step.preempted and step.new_rows), "admitted in a step that preempted"
        if not self.is_async and step.num_tokens < self.budget:  # else a row may be waiting for what is in flight
            served = {c.request_id for c in step.chunks}
            assert served == {r.id for r in self.scheduler._running}, "a row was passed over with budget left"
        self.steps.append(step)
        result = self.runner.execute(step)
        finished: tuple[Step, StepResult] | None = (step, result)
        if self.is_async:
            finished, self._in_flight = self._in_flight, (step, result)
        updates = self.scheduler.update(*finished) if finished else []
        self.updates += updates
        return updates

    def run(self, each_step: Callable[[int], None] | None = None, most_steps: int = 20_000) -> None:
        for i in range(most_steps):
            if each_step is not None:
                each_step(i)
            if not self.scheduler.has_work:
                break
            self.step()
        else:
            raise AssertionError(f"still not done after {most_steps} steps")
        self.check_idle()

    def output(self, request_id: str) -> list[int]:
        """The tokens as the front got them, update by update."""
        return [t for u in self.updates if u.request_id == request_id for t in u.token_ids]

    def check_idle(self) -> None:
        """Nothing is left behind once all is done."""
        assert not self.runner.rows, "rows left in the runner"
        assert self.blocks.num_used == 0 and self.blocks.num_free == self.num_blocks
        self.blocks.check_integrity([])
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def check_outputs(self) -> None:
        """Every request that was not aborted has exactly the output it has alone; an aborted one has the beginning of it."""
        for request in self.requests.values():
            params, updates = request.params, [u for u in self.updates if u.request_id == request.id]
            eos_ids = frozenset() if params.ignore_eos else request.eos_ids
            right = solo_output(request.prompt_ids, request.max_len, eos_ids, params.stop_token_ids, params.min_tokens)
            got = self.output(request.id)
            assert got == request.output_ids
            for update in updates:
                assert update.num_accepted <= min(update.num_drafts, len(update.token_ids))
                assert [p.token_ids[0] for p in update.logprobs or []] == update.token_ids
            told = [p.token_ids[0] for u in updates for p in u.prompt_logprobs or []]
            right_told = request.prompt_ids[1:] if params.prompt_logprobs is not None else []
            finals = [u for u in updates if u.finish_reason is not None]
            if request.finish_reason is FinishReason.ABORT:
                assert got == right[: len(got)] and told == right_told[: len(told)] and not finals
            else:
                assert got == right, f"{request.id}: {got} instead of {right}"
                assert told == right_told, f"{request.id}: prompt log-probabilities of {told}"
                assert finals == updates[-1:] and finals[0].finish_reason is request.finish_reason
