"""What goes into a step: the budget, chunks, the order, the rows and their end."""

import pytest

from lab.types import FinishReason, Status
from tests.sched.harness import Harness, make_request


def shape(step):
    """A step as {request id: (start, tokens, samples)}."""
    return {c.request_id: (c.start, c.num_tokens, c.samples) for c in step.chunks}


def shapes(harness):
    return [shape(step) for step in harness.steps if step.chunks]


def test_a_long_prompt_goes_in_chunks_beside_those_that_decode():
    harness = Harness(settings={"max_num_batched_tokens": 8})
    harness.add(make_request("a", range(5), 0, max_tokens=4), make_request("b", range(50, 65), 1, max_tokens=2))
    harness.run()
    harness.check_outputs()
    assert shapes(harness) == [
        {"a": (0, 5, True), "b": (0, 3, False)},
        {"a": (5, 1, True), "b": (3, 7, False)},
        {"a": (6, 1, True), "b": (10, 5, True)},
        {"a": (7, 1, True), "b": (15, 1, True)},
    ]


def test_one_prompt_takes_no_more_of_a_step_than_the_threshold():
    harness = Harness(settings={"max_num_batched_tokens": 16, "long_prefill_token_threshold": 6})
    harness.add(make_request("a", range(14), 0, max_tokens=1), make_request("b", range(50, 60), 1, max_tokens=1))
    harness.run()
    assert shapes(harness) == [
        {"a": (0, 6, False), "b": (0, 6, False)},
        {"a": (6, 6, False), "b": (6, 4, True)},
        {"a": (12, 2, True)},
    ]


def test_without_chunked_prefill_a_prompt_waits_for_a_step_with_room():
    harness = Harness(settings={"max_num_batched_tokens": 10, "enable_chunked_prefill": False})
    harness.add(*(make_request(r, range(s, s + n), s, max_tokens=2) for r, s, n in (("a", 0, 6), ("b", 50, 7), ("c", 90, 1))))
    harness.run()
    assert shapes(harness) == [
        {"a": (0, 6, True)},  # b does not fit, and c does not overtake it
        {"a": (6, 1, True), "b": (0, 7, True), "c": (0, 1, True)},
        {"b": (7, 1, True), "c": (1, 1, True)},
    ]


def test_a_preempted_request_that_outgrew_the_budget_comes_back_in_chunks():
    harness = Harness(
        num_blocks=9, caching=False, settings={"max_num_batched_tokens": 10, "enable_chunked_prefill": False}, max_model_len=36
    )
    harness.add(*(make_request(r, range(s, s + 5), s, max_tokens=20) for r, s in (("a", 0), ("b", 50))))
    harness.run()
    harness.check_outputs()
    assert harness.requests["b"].num_preemptions > 0
    resumed = [n for step in harness.steps for n in step.new_rows if n.request_id == "b"][1:]
    assert any(len(n.token_ids) > 10 for n in resumed)


def test_no_more_than_max_num_seqs_run():
    harness = Harness(settings={"max_num_seqs": 2})
    harness.add(*(make_request(str(i), range(i, i + 3), i, max_tokens=2) for i in range(5)))
    harness.run()
    assert [len(s) for s in shapes(harness)] == [2, 2, 2, 2, 1, 1]


def test_a_budget_of_one_token_serves_everybody_in_turn():
    harness = Harness(settings={"max_num_batched_tokens": 1})
    harness.add(*(make_request(str(i), range(i, i + 3), i, max_tokens=2) for i in range(3)))
    harness.run()
    harness.check_outputs()
    assert all(len(s) == 1 for s in shapes(harness))


def test_priority_comes_before_arrival():
    harness = Harness(policy="priority", settings={"max_num_seqs": 1})
    harness.add(*(make_request(str(i), [i], i, max_tokens=1, priority=p) for i, p in enumerate((2, 1, 0, 1))))
    harness.run()
    assert [u.request_id for u in harness.updates] == ["2", "1", "3", "0"]


def test_a_row_is_told_of_once_and_freed_in_the_step_after_its_end():
    harness = Harness()
    request = make_request("a", range(6), max_tokens=2, eos_ids=frozenset({500}))
    harness.add(request)
    harness.run()
    first, second, last = harness.steps
    (row,) = first.new_rows
    assert (row.token_ids, row.num_prompt, row.num_computed, row.eos_ids) == (list(range(6)), 6, 0, frozenset({500}))
    assert len(row.block_ids) == 2 and first.chunks[0].new_block_ids == []
    assert not second.new_rows and not second.freed
    assert (last.chunks, last.freed, last.num_tokens) == ([], ["a"], 0)
    assert not harness.scheduler.has_work


def test_new_blocks_are_told_of_as_they_come():
    harness = Harness(block_size=4)
    harness.add(make_request("a", range(4), max_tokens=6))
    harness.run()
    assert [len(c.new_block_ids) for step in harness.steps for c in step.chunks] == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_times_and_counts_of_the_first_admission(is_async):
    harness = Harness(settings={"max_num_seqs": 1, "async_scheduling": is_async})
    first, second = make_request("1", range(9), 0, max_tokens=3), make_request("2", range(9), 1, max_tokens=3)
    harness.add(first, second)
    harness.run()
    assert first.scheduled_s == 1.0 and second.scheduled_s > 3.0
    assert (first.num_cached, second.num_cached) == (0, 8)
    final = harness.updates[-1]
    assert (final.request_id, final.num_cached, final.scheduled_s) == ("2", 8, second.scheduled_s)
    assert (harness.blocks.stats.queries, harness.blocks.stats.hits) == (18, 8)


def test_finish_ends_a_waiting_and_a_running_request():
    harness = Harness(settings={"max_num_seqs": 1})
    running, waiting = make_request("1", range(5), 0, max_tokens=50), make_request("2", range(5), 1, max_tokens=2)
    harness.add(running, waiting)
    harness.step()
    assert harness.scheduler.finish("2", FinishReason.ABORT)
    assert harness.scheduler.finish("1", FinishReason.STOP, "text")
    assert not harness.scheduler.finish("1", FinishReason.ABORT)
    assert not harness.scheduler.finish("unheard of", FinishReason.ABORT)
    assert (running.status, running.finish_reason, running.stop_reason) == (Status.FINISHED, FinishReason.STOP, "text")
    assert waiting.finish_reason is FinishReason.ABORT and waiting.scheduled_s is None
    assert harness.scheduler.has_work, "the row of 1 is to be freed"
    harness.run()
    assert harness.steps[-1].freed == ["1"]


def test_a_failed_step_ends_all_and_forgets_the_cache():
    harness = Harness(settings={"max_num_seqs": 1, "async_scheduling": True})
    requests = [make_request(str(i), range(9), i, max_tokens=9) for i in range(3)]
    harness.add(*requests)
    for _ in range(3):
        harness.step()
    assert harness.blocks.num_cached > 0
    assert sorted(harness.scheduler.fail_all()) == ["0", "1", "2"]
    assert all(r.finish_reason is FinishReason.ERROR and r.status is Status.FINISHED for r in requests)
    assert not harness.scheduler.has_work and harness.blocks.num_cached == harness.blocks.num_used == 0
    again = Harness(settings={"max_num_seqs": 1, "async_scheduling": True})
    again.scheduler = harness.scheduler
    again.blocks = harness.blocks
    again.add(make_request("0", range(9), max_tokens=4))  # the scheduler goes on with a runner that was reset
    again.run()
    again.check_outputs()


def test_prompt_logprobs_come_once_under_chunks_and_preemption():
    harness = Harness(preempt_every=4, caching=True, settings={"max_num_batched_tokens": 5})
    harness.add(make_request("a", range(12), max_tokens=8, prompt_logprobs=1), make_request("b", range(12), 1, max_tokens=8))
    harness.run()
    harness.check_outputs()
    assert harness.requests["a"].num_preemptions > 0
    assert harness.requests["a"].num_cached == 0
    told = [u for u in harness.updates if u.prompt_logprobs]
    assert sum(len(u.prompt_logprobs) for u in told) == 11 and len(told) > 1
    assert any(not u.token_ids for u in told)
    assert not any(u.request_id == "b" for u in told)
