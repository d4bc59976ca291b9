"""Contract checks of scheduling policies: orders and choices that the scheduler can rely on. Torch-free."""

import copy
import random
from dataclasses import fields
from typing import Any

from lab.checks import CheckFailed
from lab.contracts.policy import Policy
from lab.kv.blocks import BlockManager
from lab.registry import Entry
from lab.sampling_params import SamplingParams
from lab.sched.scheduler import Scheduler
from lab.settings import DebugSettings, SchedulerSettings
from lab.types import Request, RowResult, Status, Step, StepResult


def check_key_is_a_total_order(entry: Entry, options: Any) -> None:
    """Any two requests have different keys that can be compared, those that arrived at the same moment included."""
    policy = _make(entry, options)
    requests = _requests(seed=1)
    keys = [policy.key(r) for r in requests]
    for request, key in zip(requests, keys, strict=True):
        if not isinstance(key, tuple):
            raise CheckFailed(f"key({request.id}) is {key!r}; it must be a tuple.")
    try:
        ordered = sorted(zip(keys, range(len(keys)), strict=True))
    except TypeError as error:
        raise CheckFailed(f"keys cannot be compared with each other: {error}.") from error
    for (key, i), (other, j) in zip(ordered, ordered[1:], strict=False):
        if key == other:
            raise CheckFailed(
                f"requests {requests[i].id} and {requests[j].id} have the same key {key}; "
                "end it with arrival_index, which is unique."
            )


def check_key_is_stable(entry: Entry, options: Any) -> None:
    """A key stays the same while its request waits, and is the same for two instances of the policy."""
    first, second = _make(entry, options), _make(entry, options)
    for request in _requests(seed=2):
        key = first.key(request)
        if first.key(request) != key or second.key(request) != key:
            raise CheckFailed(f"key({request.id}) differs from call to call; it must depend on the request only.")
        request.status = Status.PREEMPTED
        key = first.key(request)
        request.token_ids += [1, 2, 3]  # tokens that were in flight when it was preempted
        request.num_in_flight = 0
        request.block_hashes.append(b"")
        if first.key(request) != key:
            raise CheckFailed(
                f"key({request.id}) changed from {key} to {first.key(request)} while the request waited; it must not depend on "
                "token_ids, num_in_flight or block_hashes."
            )


def check_victim_is_running(entry: Entry, options: Any) -> None:
    """The victim is one of the running requests, whichever and however many they are, and the same when asked again."""
    policy = _make(entry, options)
    chooser = random.Random(3)
    requests = _requests(seed=3)
    for size in [1, 1, 2, 3, *chooser.choices(range(1, len(requests)), k=20)]:
        running = chooser.sample(requests, size)
        victim = policy.victim(running)
        if not any(victim is r for r in running):
            raise CheckFailed(f"victim of {[r.id for r in running]} is {victim!r}; it must be one of them, the object itself.")
        if policy.victim(running) is not victim:
            raise CheckFailed(f"victim of {[r.id for r in running]} differs from call to call.")


def check_nothing_is_changed(entry: Entry, options: Any) -> None:
    """Neither `key` nor `victim` changes a request or the list that it is given."""
    policy = _make(entry, options)
    requests = _requests(seed=4)
    before = [_state(r) for r in requests]
    given = list(requests)
    for request in requests:
        policy.key(request)
    policy.victim(given)
    if len(given) != len(requests) or any(a is not b for a, b in zip(given, requests, strict=True)):
        raise CheckFailed("victim changed the list of running requests; it may only read it.")
    for request, state in zip(requests, before, strict=True):
        if _state(request) != state:
            changed = [f.name for f in fields(request) if state[f.name] != getattr(request, f.name)]
            raise CheckFailed(f"request {request.id} was changed ({', '.join(changed)}); only the scheduler writes it.")


def check_everyone_is_served(entry: Entry, options: Any) -> None:
    """All of a finite number of requests end, in a cache so small that they preempt each other all the time."""
    scheduler = Scheduler(
        SchedulerSettings(max_num_batched_tokens=16, max_num_seqs=8, async_scheduling=False),
        BlockManager(16, 4, enable_prefix_caching=False),
        _make(entry, options),
        max_model_len=64,
        debug=DebugSettings(check_integrity=True),
    )
    requests = _requests(seed=5)
    for request in requests:
        scheduler.add(request)
    most_steps = 20 * sum(request.max_len for request in requests)
    for _ in range(most_steps):
        if not scheduler.has_work:
            break
        step = scheduler.schedule(0.0)
        scheduler.update(step, _one_token_each(step))
    late = [r.id for r in requests if r.status is not Status.FINISHED]
    if late:
        raise CheckFailed(f"requests {late} have not ended after {most_steps} steps: their turn never comes, or never lasts.")
    if scheduler.num_preemptions == 0:
        raise CheckFailed("no request was ever preempted, in a cache that is too small for all of them.")


def _make(entry: Entry, options: Any) -> Policy:
    return entry.load()(options)


def _requests(seed: int, count: int = 24) -> list[Request]:
    """Requests that differ in all that a policy may look at; some arrive at the same moment with the same priority."""
    chooser = random.Random(seed)
    requests = []
    for i in range(count):
        params = SamplingParams(max_tokens=chooser.choice([1, 8, 30]), ignore_eos=True)
        prompt_ids = [chooser.randrange(1000) for _ in range(chooser.randint(1, 30))]
        arrival_s = float(chooser.randrange(4))
        requests.append(Request(f"r{i}", prompt_ids, params, arrival_s, 0, priority=chooser.randrange(3), arrival_index=i))
    return requests


def _state(request: Request) -> dict[str, Any]:
    return {f.name: copy.copy(getattr(request, f.name)) for f in fields(request)}


def _one_token_each(step: Step) -> StepResult:
    return StepResult(step.index, [RowResult(c.request_id, [0] if c.samples else []) for c in step.chunks], ms=0.0)
