"""Random traces under every mix of settings: each request's output must be what it gets alone.

The fake runner fails on the first position that would read a wrong, stale or missing block, and the harness checks the
books after every step.
"""

import random
from collections import Counter

import pytest

from lab.kv.grouped import NO_BLOCK, GroupedBlockManager
from lab.kv.groups import Full, Need, Sliding
from lab.sched.limits import reach
from lab.settings import SchedulerSettings
from lab.types import FinishReason
from tests.sched.fake_runner import VOCAB
from tests.sched.harness import Harness, make_request

SEEDS_PER_TEST = 30


def random_needs(chooser: random.Random) -> tuple[Need, ...]:
    """Groups of full and sliding layers, in any order; one of them alone too."""
    window = chooser.choice([1, 2, 3, 5, 8, 13])
    full, near, far = Full(), Sliding(window), Sliding(window + 4)
    return chooser.choice([(near,), (full, near), (near, full), (near, full, near, near), (near, full, far, full)])


def random_harness(chooser: random.Random, seed: int, **fixed) -> Harness:
    block_size, max_model_len = chooser.choice([1, 2, 4, 8]), chooser.choice([24, 40, 64])
    settings = {
        "async_scheduling": fixed["is_async"],
        "max_num_batched_tokens": chooser.choice([1, 3, 8, 24, 64]),
        "max_num_seqs": chooser.choice([1, 3, 8]),
        "long_prefill_token_threshold": chooser.choice([0, 0, 5]),
        "batching": fixed["batching"],
    }
    if chooser.random() < 0.15:
        settings |= {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0, "max_num_batched_tokens": 48}
    num_drafts = chooser.choice([1, 3, 5]) if fixed["drafts"] else 0
    needs: tuple[Need, ...] = (Full(),)
    least = -(-max_model_len // block_size)
    if fixed.get("groups"):
        needs = random_needs(chooser)
        most = reach(SchedulerSettings(**settings), num_drafts)
        least = GroupedBlockManager(1, block_size, needs, reach=most).blocks_for(max_model_len)
    return Harness(
        num_blocks=least + chooser.randint(0, 12),
        block_size=block_size,
        max_model_len=max_model_len,
        num_drafts=num_drafts,
        policy=fixed["policy"],
        caching=chooser.random() < 0.7,
        preempt_every=chooser.choice([0, 0, 1, 3, 7]),
        seed=seed,
        settings=settings,
        needs=needs,
    )


def random_requests(chooser: random.Random, most_tokens: int) -> list:
    prefixes = [[chooser.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    requests = []
    for i in range(chooser.randint(1, 10)):
        prompt = chooser.choice(prefixes)[: chooser.randint(0, 20)] + [
            chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 8))
        ]
        max_tokens = chooser.choice([None, 1, 2, 5, 12, 30])
        requests.append(
            make_request(
                f"r{i}",
                prompt[:most_tokens],
                i,
                max_tokens=max_tokens,
                min_tokens=min(chooser.choice([0, 0, 3]), max_tokens or 3),
                eos_ids=frozenset(chooser.sample(range(VOCAB), chooser.choice([0, 3]))),
                stop_token_ids=tuple(chooser.sample(range(VOCAB), chooser.choice([0, 3]))),
                ignore_eos=chooser.random() < 0.2,
                priority=chooser.randint(0, 2),
                cache_salt=chooser.choice([None, None, "salt"]),
                fork_group=chooser.choice([None, "group"]),
                prompt_logprobs=chooser.choice([None, None, 2]),
                logprobs=1,
            )
        )
    return requests


def run_trace(seed: int, **fixed) -> tuple[Harness, Counter]:
    chooser = random.Random(seed)
    harness = random_harness(chooser, seed, **fixed)
    requests = random_requests(chooser, harness.max_model_len - 1)
    arrivals: dict[int, list] = {}
    for request in requests:
        arrivals.setdefault(chooser.randint(0, 15), []).append(request)
    aborts = {chooser.randint(0, 40): request.id for request in requests if chooser.random() < 0.2}
    seen: Counter = Counter()
    number = 0
    while arrivals or harness.scheduler.has_work:
        harness.add(*arrivals.pop(number, []))
        if number in aborts and harness.scheduler.finish(aborts[number], FinishReason.ABORT):
            seen["aborts"] += 1
        harness.step()
        number += 1
        assert number < 5_000, "it does not end"
        seen["given back"] += sum(NO_BLOCK in request.block_ids for request in requests)
    harness.check_idle()
    harness.check_outputs()
    seen["preemptions"] += harness.scheduler.num_preemptions
    seen["hits"] += sum(r.num_cached for r in requests)
    seen["short hits"] += sum(NO_BLOCK in row.block_ids for step in harness.steps for row in step.new_rows)
    seen["accepted"] += harness.runner.num_accepted
    seen["rejected"] += harness.runner.num_rejected
    seen["chunked"] += sum(not c.samples for s in harness.steps for c in s.chunks)
    delivered = sum(len(u.token_ids) > 0 for u in harness.updates)
    seen["void"] += sum(c.samples for s in harness.steps for c in s.chunks) - delivered
    return harness, seen


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_outputs_equal_those_of_each_request_alone(batching, is_async, drafts, policy):
    seen: Counter = Counter()
    for seed in range(SEEDS_PER_TEST):
        seen += run_trace(seed, batching=batching, is_async=is_async, drafts=drafts, policy=policy)[1]
    must = ["preemptions", "hits", "chunked", "aborts"]
    must += ["accepted", "rejected"] if drafts else []
    must += ["void"] if is_async else []
    assert all(seen[name] > 0 for name in must), seen
    assert drafts or not seen["accepted"] + seen["rejected"]
    assert is_async or not seen["void"]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_outputs_equal_those_of_each_request_alone_with_groups(is_async, drafts):
    """`given back`: behind a window while a row runs; `short hits`: of a prefix of which a group took only its window."""
    seen: Counter = Counter()
    for seed in range(2 * SEEDS_PER_TEST):
        policy = ("fcfs", "priority")[seed % 2]
        seen += run_trace(seed, batching="continuous", is_async=is_async, drafts=drafts, policy=policy, groups=True)[1]
    must = ["preemptions", "hits", "chunked", "aborts", "given back", "short hits"]
    must += ["accepted", "rejected"] if drafts else []
    assert all(seen[name] > 0 for name in must), seen


def test_a_run_is_the_same_when_it_is_run_again():
    fixed = {"batching": "continuous", "is_async": True, "drafts": True, "policy": "priority"}
    for seed in range(5):
        assert run_trace(seed, **fixed)[0].steps == run_trace(seed, **fixed)[0].steps
