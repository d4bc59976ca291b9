"""Preemption by recompute: who gives way, what is kept, and that everybody gets to the end."""

import random

import pytest

from lab.types import FinishReason, Status
from tests.sched.fake_runner import solo_output
from tests.sched.harness import Harness, make_request


def six_requests():
    return [make_request(str(i), range(20 * i, 20 * i + 9 + i), i, max_tokens=40) for i in range(6)]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_outputs_survive_a_pool_that_is_much_too_small(policy, is_async, num_drafts):
    harness = Harness(
        num_blocks=16,
        max_model_len=64,
        policy=policy,
        num_drafts=num_drafts,
        settings={"max_num_batched_tokens": 8, "async_scheduling": is_async},
    )
    harness.add(*six_requests())
    harness.run()
    harness.check_outputs()
    counts = [r.num_preemptions for r in harness.requests.values()]
    assert sum(n >= 2 for n in counts) >= 3, counts
    assert sum(counts) == harness.scheduler.num_preemptions == sum(s.preempted for s in harness.steps)
    for request in harness.requests.values():
        assert (request.num_prompt, request.num_output) == (9 + int(request.id), 40)
        assert request.scheduled_s is not None and request.num_cached == 0


def test_little_is_computed_twice():
    """A request is admitted only when all that it has fits, so a prefill is not thrown away half way again and again."""
    harness = Harness(num_blocks=16, max_model_len=64, settings={"max_num_batched_tokens": 8})
    harness.add(*six_requests())
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    assert sum(harness.runner.num_computed.values()) < 3 * sum(r.max_len for r in harness.requests.values())


def test_a_prefill_under_way_keeps_the_blocks_it_will_need():
    harness = Harness(num_blocks=10, settings={"max_num_batched_tokens": 8, "long_prefill_token_threshold": 4})
    harness.add(make_request("a", range(24), 0, max_tokens=1), make_request("b", range(50, 70), 1, max_tokens=1))
    harness.step()
    assert harness.scheduler.num_running == 1, "b would fit now, but not beside all of a"
    harness.run()
    assert harness.scheduler.num_preemptions == 0


def test_the_last_admitted_gives_way():
    harness = Harness(num_blocks=7, max_model_len=28, caching=False)
    harness.add(*(make_request(str(i), range(20 * i, 20 * i + 7), i, max_tokens=12) for i in range(3)))
    harness.run()
    harness.check_outputs()
    assert [r.num_preemptions > 0 for r in harness.requests.values()] == [False, True, True]
    assert [u.request_id for u in harness.updates if u.finish_reason] == ["0", "1", "2"]


def test_the_worst_priority_gives_way_then_the_latest():
    harness = Harness(num_blocks=8, max_model_len=28, caching=False, policy="priority")
    harness.add(
        *(make_request(str(i), range(20 * i, 20 * i + 7), i, max_tokens=12, priority=p) for i, p in enumerate((1, 1, 0)))
    )
    harness.run()
    harness.check_outputs()
    first = next(s for s in harness.steps if s.preempted)
    assert first.freed == ["1"]
    assert harness.requests["2"].num_preemptions == 0
    assert harness.requests["1"].num_preemptions >= harness.requests["0"].num_preemptions


def test_a_preempted_row_is_freed_and_comes_back_with_all_its_tokens():
    harness = Harness(preempt_every=4)
    request = make_request("a", range(10), max_tokens=8)
    harness.add(request)
    harness.run()
    harness.check_outputs()
    assert request.num_preemptions == 2
    rows = [(i, n) for i, s in enumerate(harness.steps) for n in s.new_rows]
    freed = [i for i, s in enumerate(harness.steps) if "a" in s.freed]
    assert [len(n.token_ids) for _, n in rows] == [10, 13, 16]
    assert freed[0] < rows[1][0] < freed[1] < rows[2][0] < freed[2]
    assert all(n.num_prompt == 10 for _, n in rows)
    assert [n.num_computed for _, n in rows] == [0, 12, 12], "its own blocks are still cached"
    assert request.num_cached == 0 and harness.blocks.stats.hits == 0, "coming back is not counted as a hit"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_forced_preemption_always_lets_something_be_gained(every, is_async):
    harness = Harness(
        preempt_every=every, caching=False, settings={"max_num_batched_tokens": 3, "async_scheduling": is_async}, num_drafts=2
    )
    harness.add(*(make_request(str(i), range(9), i, max_tokens=6) for i in range(2)))
    harness.run(most_steps=400)
    harness.check_outputs()
    assert all(r.num_preemptions > 0 for r in harness.requests.values())


def test_an_abort_while_preempted():
    harness = Harness(preempt_every=3)
    harness.add(*(make_request(str(i), range(9), i, max_tokens=20) for i in range(2)))
    while not harness.scheduler.num_preemptions:
        harness.step()
    victim = next(r for r in harness.requests.values() if r.status is Status.PREEMPTED)
    assert harness.scheduler.finish(victim.id, FinishReason.ABORT)
    harness.run()
    harness.check_outputs()
    assert sum(victim.id in s.freed for s in harness.steps) == 1, "its row was freed when it was preempted"


def test_blocks_of_a_chunk_that_was_taken_back_are_never_hit():
    """One that was planned earlier in the same step is preempted: its tokens are not computed, so nobody may find them."""
    taken_back = 0
    for seed in range(60):
        chooser = random.Random(seed)
        harness = Harness(
            num_blocks=14, block_size=2, max_model_len=28, policy="priority", settings={"max_num_batched_tokens": 3 + seed % 4}
        )
        prompt = [chooser.randrange(9) for _ in range(12)]
        number = 0
        while number < 12 or harness.scheduler.has_work:
            if number < 12 and number % 2 == 0:  # the more urgent ones come later, so that the first to be planned gives way
                prompt_ids = [*prompt[: chooser.randint(0, 10)], chooser.randrange(9)]
                harness.add(make_request(str(number), prompt_ids, number, max_tokens=chooser.randint(8, 16), priority=-number))
            number += 1
            running = [r.id for r in harness.scheduler._running]
            harness.step()
            step = harness.steps[-1]
            behind = [running.index(c.request_id) for c in step.chunks if c.request_id in running]
            lost = [running.index(r) for r in step.freed if r in running and harness.requests[r].status is Status.PREEMPTED]
            taken_back += bool(behind and lost and min(lost) < max(behind))
        harness.check_idle()
        harness.check_outputs()
    assert taken_back > 0


def test_nobody_is_preempted_for_the_sake_of_drafts():
    """Each has room for its next token, and one block is left: whoever comes second goes without drafts."""
    took_the_last = 0
    for seed in range(10):
        harness = Harness(num_drafts=5, num_blocks=7, max_model_len=32, caching=False, seed=seed)
        for i in range(2):
            prompt = range(20 * i, 20 * i + 11)
            stop = solo_output(prompt, 20)[1]
            harness.add(make_request(str(i), prompt, i, max_tokens=12, stop_token_ids=(stop,)))
        harness.run()
        harness.check_outputs()
        assert harness.scheduler.num_preemptions == 0
        took_the_last += harness.blocks.peak_used == 7
    assert took_the_last > 0
