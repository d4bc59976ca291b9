"""Prefix sharing through the scheduler: within a step, between steps, among siblings, and never wrongly."""

import pytest

from tests.sched.harness import Harness, make_request

ASYNC = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


@ASYNC
def test_requests_added_together_share_their_prefix_in_the_first_step(is_async):
    harness = Harness(
        num_blocks=512,
        block_size=16,
        max_model_len=2048,
        settings={"max_num_batched_tokens": 4096, "async_scheduling": is_async},
    )
    prefix = [i % 90 for i in range(1024)]
    harness.add(*(make_request(str(i), [*prefix, i, i + 1], i, max_tokens=3) for i in range(64)))
    harness.step()
    first = harness.steps[0]
    assert len(first.chunks) == 64
    assert first.num_tokens == 1026 + 63 * 2
    harness.run()
    harness.check_outputs()
    assert [r.num_cached for r in harness.requests.values()] == [0] + [1024] * 63
    assert harness.blocks.peak_used < 64 + 64 + 2


def test_half_a_prefix_is_shared_as_soon_as_it_is_planned():
    harness = Harness(num_blocks=32, settings={"max_num_batched_tokens": 12, "long_prefill_token_threshold": 8})
    prefix = list(range(16))
    harness.add(make_request("1", [*prefix, 50], 0, max_tokens=2), make_request("2", [*prefix, 60], 1, max_tokens=2))
    harness.run()
    harness.check_outputs()
    assert [(c.request_id, c.start, c.num_tokens) for c in harness.steps[0].chunks] == [("1", 0, 8), ("2", 8, 4)]
    assert harness.requests["2"].num_cached == 8


def test_a_running_row_of_the_same_step_is_shared_too():
    harness = Harness(num_blocks=32, settings={"max_num_batched_tokens": 12})
    prefix = list(range(16))
    harness.add(make_request("1", [*prefix, 50], 0, max_tokens=2))
    harness.step()
    harness.add(make_request("2", [*prefix, 60], 1, max_tokens=2))
    harness.run()
    harness.check_outputs()
    assert [(c.request_id, c.start, c.num_tokens) for c in harness.steps[1].chunks] == [("1", 12, 5), ("2", 16, 1)]


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(16, 0), (17, 16), (32, 16), (33, 32)])
@ASYNC
def test_a_prompt_sent_again_hits_but_for_its_last_token(is_async, num_prompt, num_cached):
    harness = Harness(block_size=16, settings={"async_scheduling": is_async})
    for name in ("first", "again"):
        harness.add(make_request(name, range(num_prompt), max_tokens=8))
        harness.run()
    harness.check_outputs()
    assert harness.requests["again"].num_cached == num_cached
    assert harness.runner.num_computed["first"] - harness.runner.num_computed["again"] == num_cached


@ASYNC
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_a_second_turn_hits_the_output_of_the_first(is_async, num_drafts):
    harness = Harness(num_drafts=num_drafts, settings={"async_scheduling": is_async})
    harness.add(make_request("1", range(10), max_tokens=15))
    harness.run()
    turn = [*range(10), *harness.output("1"), 70, 71]
    harness.add(make_request("2", turn, 1, max_tokens=4))
    harness.run()
    harness.check_outputs()
    assert harness.requests["2"].num_cached == 24  # 25 tokens of the first turn, the last of which was never computed


def test_what_was_evicted_is_not_hit():
    harness = Harness(num_blocks=4)
    x, y = range(8), range(100, 115)
    harness.add(make_request("x", x, 0, max_tokens=1))
    harness.run()
    harness.add(make_request("y", y, 1, max_tokens=1))
    harness.run()
    harness.add(make_request("x again", x, 2, max_tokens=1))
    harness.run()
    harness.check_outputs()
    assert harness.requests["x again"].num_cached == 0


def test_one_who_asks_for_prompt_logprobs_computes_all_and_fills_the_cache():
    harness = Harness(block_size=16)
    harness.add(make_request("0", range(33), 0, max_tokens=2, prompt_logprobs=0))
    harness.run()
    for i in (1, 2):
        harness.add(make_request(str(i), range(33), i, max_tokens=2))
        harness.run()
    harness.add(make_request("3", range(33), 3, max_tokens=2, prompt_logprobs=0))
    harness.run()
    harness.check_outputs()
    assert [r.num_cached for r in harness.requests.values()] == [0, 32, 32, 0]
    assert (harness.blocks.stats.queries, harness.blocks.stats.hits) == (66, 64)


@pytest.mark.parametrize("caching", [False, True])
def test_siblings_share_their_prompt(caching):
    harness = Harness(caching=caching)
    harness.add(*(make_request(f"a{i}", range(21), i, max_tokens=6, fork_group="a") for i in range(4)))
    harness.step()
    assert harness.blocks.num_used == 5 + 4 * 1
    harness.add(make_request("alone", range(21), 9, max_tokens=6))
    harness.run()
    harness.check_outputs()
    assert [r.num_cached for r in harness.requests.values()] == [0, 20, 20, 20, 20 if caching else 0]
    harness.add(make_request("b", range(21), 10, max_tokens=6, fork_group="b"))
    harness.run()
    assert harness.requests["b"].num_cached == (20 if caching else 0)


def test_salts_part_requests_of_the_same_step():
    harness = Harness()
    for i, salt in enumerate((None, "a", "b", "a", None)):
        harness.add(make_request(str(i), range(9), i, max_tokens=2, cache_salt=salt))
    harness.run()
    harness.check_outputs()
    assert [r.num_cached for r in harness.requests.values()] == [0, 0, 0, 8, 8]


def test_the_cache_can_be_reset_between_runs_only():
    harness = Harness()
    harness.add(make_request("1", range(9), 0, max_tokens=3))
    harness.step()
    assert not harness.blocks.reset_prefix_cache()
    harness.run()
    assert harness.blocks.reset_prefix_cache()
    harness.add(make_request("2", range(9), 1, max_tokens=3))
    harness.run()
    harness.check_outputs()
    assert harness.requests["2"].num_cached == 0
