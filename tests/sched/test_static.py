"""Static batching: nobody joins before the whole batch has ended."""

import pytest

from tests.sched.harness import Harness, make_request


def admissions(harness):
    """Step index by request id, first admissions only."""
    admitted = {}
    for step in harness.steps:
        for row in step.new_rows:
            admitted.setdefault(row.request_id, step.index)
    return admitted


def last_steps(harness):
    return {c.request_id: s.index for s in harness.steps for c in s.chunks}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_next_batch_waits_for_the_last_of_this_one(is_async):
    harness = Harness(settings={"batching": "static", "max_num_seqs": 3, "async_scheduling": is_async})
    harness.add(*(make_request(str(i), range(i, i + 5), i, max_tokens=2 + 7 * (i % 3)) for i in range(7)))
    harness.run()
    harness.check_outputs()
    admitted, last = admissions(harness), last_steps(harness)
    for batch, after in (("012", "345"), ("345", "6")):
        assert len({admitted[r] for r in batch}) == 1
        assert min(admitted[r] for r in after) > max(last[r] for r in batch)
    continuous = Harness(settings={"max_num_seqs": 3, "async_scheduling": is_async})
    continuous.add(*(make_request(str(i), range(i, i + 5), i, max_tokens=2 + 7 * (i % 3)) for i in range(7)))
    continuous.run()
    assert continuous.runner.num_steps < harness.runner.num_steps


def test_a_batch_may_need_several_steps_to_start_and_late_comers_stay_out():
    harness = Harness(settings={"batching": "static", "max_num_seqs": 4, "max_num_batched_tokens": 8})
    harness.add(*(make_request(str(i), range(i, i + 6), i, max_tokens=9) for i in range(3)))
    harness.step()
    harness.add(make_request("late", range(3), 0, max_tokens=1))
    harness.run()
    harness.check_outputs()
    admitted, last = admissions(harness), last_steps(harness)
    assert admitted["2"] > admitted["0"]
    assert admitted["late"] > max(last[r] for r in "012")


def test_one_that_the_cache_has_no_room_for_goes_to_the_next_batch():
    harness = Harness(num_blocks=6, caching=False, max_model_len=24, settings={"batching": "static", "max_num_seqs": 4})
    harness.add(*(make_request(str(i), range(i, i + 8), i, max_tokens=1 + 2 * i) for i in range(4)))
    harness.run()
    harness.check_outputs()
    admitted, last = admissions(harness), last_steps(harness)
    assert admitted["3"] > last["2"] and admitted["2"] == admitted["0"]


def test_a_preempted_member_comes_back_to_its_batch():
    harness = Harness(preempt_every=4, settings={"batching": "static", "max_num_seqs": 2})
    harness.add(*(make_request(str(i), range(i, i + 5), i, max_tokens=8) for i in range(3)))
    harness.run()
    harness.check_outputs()
    assert harness.requests["1"].num_preemptions > 0
    assert admissions(harness)["2"] > max(last_steps(harness)[r] for r in "01")
