"""Planning a step before the last one's results: upper bounds, void chunks, and what arrives late."""

import pytest

from lab.types import FinishReason, RowResult, Status, StepResult
from tests.sched.fake_runner import solo_output
from tests.sched.harness import Harness, make_request


def make_harness(**kwargs):
    settings = {"async_scheduling": True, **kwargs.pop("settings", {})}
    return Harness(settings=settings, **kwargs)


def test_a_token_in_flight_is_planned_on():
    harness = make_harness()
    request = make_request("a", range(6), max_tokens=3)
    harness.add(request)
    harness.step()
    assert (request.num_computed, request.num_in_flight, request.num_output) == (6, 1, 0)
    harness.step()
    assert (request.num_computed, request.num_in_flight, request.num_output) == (7, 1, 1)
    harness.step()
    assert (request.num_computed, request.num_in_flight, request.num_output) == (8, 1, 2)
    harness.step()
    assert [len(s.chunks) for s in harness.steps] == [1, 1, 1, 0], "the last token's step has none after it"
    harness.run()
    harness.check_outputs()


def test_only_one_step_ahead():
    harness = make_harness()
    harness.add(make_request("a", range(6), max_tokens=30))
    harness.scheduler.schedule(0.0)
    harness.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="next but one"):
        harness.scheduler.schedule(0.0)
    sync = Harness()
    sync.add(make_request("a", range(6), max_tokens=30))
    sync.scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="next but one"):
        sync.scheduler.schedule(0.0)


def test_drafts_are_upper_bounds_until_the_results_are_in():
    harness = make_harness(num_drafts=3)
    request = make_request("a", range(6), max_tokens=20)
    harness.add(request)
    scheduler = harness.scheduler
    first = scheduler.schedule(0.0)
    assert (first.chunks[0].num_tokens, first.chunks[0].num_drafts) == (6, 0), "nothing is drafted for a prompt"
    second = scheduler.schedule(0.0)
    assert (second.chunks[0].start, second.chunks[0].num_tokens, second.chunks[0].num_drafts) == (6, 4, 3)
    assert second.chunks[0].draft_ids == []
    scheduler.update(first, StepResult(0, [RowResult("a", [11])], 0.0))
    third = scheduler.schedule(0.0)
    assert (third.chunks[0].start, third.chunks[0].num_tokens) == (10, 4)
    assert (request.num_computed, request.num_in_flight) == (14, 8)
    scheduler.update(second, StepResult(1, [RowResult("a", [12, 13], num_drafts=2)], 0.0))  # 2 of 3 drafted, 1 accepted
    assert (len(request.token_ids), request.num_computed, request.num_in_flight) == (9, 12, 4)
    scheduler.update(third, StepResult(2, [RowResult("a", [14], num_drafts=0)], 0.0))
    assert (len(request.token_ids), request.num_computed, request.num_in_flight) == (10, 9, 0)
    fourth = scheduler.schedule(0.0)
    assert (fourth.chunks[0].start, fourth.chunks[0].num_drafts) == (9, 3)


def test_of_a_tree_in_flight_no_more_is_expected_than_its_depth():
    """Its nodes take positions until it is verified; near the end of a request the next step is planned all the same."""
    harness = make_harness(num_drafts=8, draft_depth=2)
    request = make_request("a", range(6), max_tokens=6)
    harness.add(request)
    scheduler = harness.scheduler
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert (second.chunks[0].start, second.chunks[0].num_tokens, second.chunks[0].num_drafts) == (6, 9, 8)
    scheduler.update(first, StepResult(0, [RowResult("a", [11])], 0.0))
    third = scheduler.schedule(0.0)
    assert (third.chunks[0].start, third.chunks[0].num_drafts) == (15, 8), "of 12 tokens 10 may be there by then"
    scheduler.update(second, StepResult(1, [RowResult("a", [12, 13], num_drafts=8)], 0.0))
    assert (len(request.token_ids), request.num_computed, request.num_in_flight) == (9, 17, 9)
    assert not scheduler.schedule(0.0).chunks, "it may end in the step before"
    scheduler.update(third, StepResult(2, [RowResult("a", [14], num_drafts=8)], 0.0))
    assert (len(request.token_ids), request.num_computed) == (10, 9)
    assert scheduler.schedule(0.0).chunks[0].num_drafts == 8


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_positions_never_pass_the_end(max_tokens, num_drafts):
    """The fake runner asserts that no position is past the context; the plan itself must stay within max_tokens."""
    harness = make_harness(num_drafts=num_drafts, max_model_len=14, num_blocks=4, seed=max_tokens)
    request = make_request("a", range(6), max_tokens=max_tokens)
    harness.add(request)
    harness.run()
    harness.check_outputs()
    ends = [c.start + c.num_tokens for s in harness.steps for c in s.chunks]
    assert max(ends) <= request.max_len - 1
    assert request.num_output == min(max_tokens, 8)


def test_the_chunk_after_a_stop_is_void_and_its_blocks_are_given_away_at_once():
    harness = make_harness(num_blocks=4, caching=False)
    output = solo_output(range(10), 20)
    stops = make_request("stops", range(10), 0, max_tokens=6, eos_ids=frozenset({output[2]}))
    waits = make_request("waits", range(40, 52), 1, max_tokens=4)
    harness.add(stops, waits)
    while stops.status is not Status.FINISHED:
        harness.step()
    assert harness.steps[-1].chunks[0].request_id == "stops", "the void chunk has been submitted"
    assert harness.blocks.num_free == 4
    harness.step()
    (chunk,), (new_row,) = harness.steps[-1].chunks, harness.steps[-1].new_rows
    assert chunk.request_id == new_row.request_id == "waits" and harness.steps[-1].freed == ["stops"]
    harness.run()
    harness.check_outputs()
    assert stops.num_output == output.index(output[2]) + 1
    assert [u.finish_reason for u in harness.updates if u.request_id == "stops"][-1] is FinishReason.STOP


def test_an_id_used_again_does_not_get_the_void_result_of_its_forerunner():
    harness = make_harness()
    harness.add(make_request("a", range(5), max_tokens=20))
    harness.step()
    harness.step()
    assert harness.scheduler.finish("a", FinishReason.ABORT)
    harness.updates.clear()
    again = make_request("a", range(60, 75), 1, max_tokens=5)
    harness.add(again)
    harness.run()
    harness.check_outputs()
    assert again.num_output == 5


def test_an_abort_in_flight_frees_at_once_and_says_no_more():
    harness = make_harness()
    request = make_request("a", range(9), max_tokens=20)
    harness.add(request)
    for _ in range(4):
        harness.step()
    assert request.num_in_flight == 1
    harness.scheduler.finish("a", FinishReason.ABORT)
    assert harness.blocks.num_used == 0
    num_updates = len(harness.updates)
    harness.run()
    assert len(harness.updates) == num_updates
    harness.check_outputs()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tokens_in_flight_of_a_preempted_request_are_kept_and_waited_for(num_drafts):
    harness = make_harness(preempt_every=5, num_drafts=num_drafts)
    harness.add(*(make_request(str(i), range(i, i + 9), i, max_tokens=30) for i in range(2)))
    late = 0
    while harness.scheduler.has_work:
        before = {r.id: (r.status, r.num_output, r.num_in_flight) for r in harness.requests.values()}
        harness.step()
        for request in harness.requests.values():
            status, num_output, num_in_flight = before[request.id]
            late += request.status is Status.PREEMPTED and status is Status.RUNNING and request.num_output > num_output
            if harness.steps[-1].new_rows and harness.steps[-1].new_rows[0].request_id == request.id:
                assert num_in_flight == 0, "admitted while tokens are in flight"
    assert late > 0
    harness.check_idle()
    harness.check_outputs()


def test_tokens_in_flight_may_end_a_preempted_request():
    ended = 0
    for max_tokens in range(2, 12):
        harness = make_harness(preempt_every=4)
        request = make_request("a", range(9), max_tokens=max_tokens)
        harness.add(request)
        while harness.scheduler.has_work:
            before = request.status, harness.scheduler.num_preemptions
            harness.step()
            preempted = before[0] is Status.PREEMPTED or harness.scheduler.num_preemptions > before[1]
            ended += preempted and request.status is Status.FINISHED
        harness.check_idle()
        harness.check_outputs()
    assert ended > 0


def test_drafts_cost_nobody_a_token_nor_a_place():
    harness = make_harness(num_drafts=5, settings={"max_num_batched_tokens": 8})
    harness.add(*(make_request(str(i), range(i, i + 2), i, max_tokens=12) for i in range(4)))
    harness.run()
    harness.check_outputs()
    full = [s for s in harness.steps if len(s.chunks) == 4 and not s.new_rows]
    assert full and all(s.num_tokens == 8 for s in full[:2])
