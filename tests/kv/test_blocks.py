"""The block manager: who holds what, what can be hit, what is evicted, and the counts."""

import subprocess
import sys

import pytest

from lab.kv.blocks import BlockManager
from lab.sampling_params import SamplingParams
from lab.types import Request


def make_request(request_id, token_ids, **kwargs):
    params = SamplingParams(prompt_logprobs=kwargs.pop("prompt_logprobs", None))
    return Request(request_id, list(token_ids), params, 0.0, 0, **kwargs)


def serve(blocks, token_ids, request_id="r", **kwargs):
    """Admit a request, compute all its tokens, and register them; the request, and its hit in tokens."""
    request = make_request(request_id, token_ids, **kwargs)
    hit_ids = blocks.match(request)
    blocks.admit(request, hit_ids, len(request.token_ids))
    request.num_computed = len(request.token_ids)
    blocks.register(request)
    return request, len(hit_ids) * blocks.block_size


def serve_and_free(blocks, token_ids, **kwargs):
    request, num_hit = serve(blocks, token_ids, **kwargs)
    blocks.free(request)
    blocks.check_integrity([])
    return num_hit


def test_importing_it_imports_neither_torch_nor_numpy():
    program = (
        "import sys, lab.kv.blocks, lab.sched.scheduler, lab.sched.policies.fcfs, lab.checks.policy\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_a_prompt_that_is_wholly_cached_leaves_a_token_to_compute(num_tokens, num_hit):
    blocks = BlockManager(8, 16)
    assert serve_and_free(blocks, range(num_tokens)) == 0
    assert serve_and_free(blocks, range(num_tokens)) == num_hit


def test_a_block_handed_out_again_cannot_be_hit():
    blocks = BlockManager(4, 4)
    x, y = list(range(8)), list(range(100, 115))
    assert serve_and_free(blocks, x) == 0
    request, num_hit = serve(blocks, y)
    assert num_hit == 0 and len(request.block_ids) == 4
    assert blocks.match(make_request("x", x)) == []
    blocks.free(request)
    assert serve_and_free(blocks, x) == 0


def test_with_room_left_the_first_block_outlives_the_last():
    """Blocks that hold nothing go first, then the cached ones, of a sequence the last first."""
    blocks = BlockManager(6, 4)
    x = list(range(12))
    serve_and_free(blocks, x)
    serve_and_free(blocks, range(100, 119))  # takes 3 blocks that hold nothing and 2 of x
    assert len(blocks.match(make_request("x", [*x, 1]))) == 1


def test_what_was_freed_first_is_evicted_first():
    blocks = BlockManager(4, 4)
    for start in (0, 100, 200):
        serve_and_free(blocks, range(start, start + 4))
    serve_and_free(blocks, [0, 1, 2, 3, 9])  # a hit makes it the last to go; 9 takes the block that held nothing
    held, _ = serve(blocks, range(300, 308))  # two blocks: the one of 9, then the one of 100
    hits = [len(blocks.match(make_request("q", [*range(s, s + 4), 1]))) for s in (0, 100, 200)]
    assert hits == [1, 0, 1]
    blocks.free(held)


def test_identity_is_the_whole_prefix():
    blocks = BlockManager(16, 4)
    assert serve_and_free(blocks, [1, 2, 3, 4, 9, 9, 9, 9, 5]) == 0
    assert serve_and_free(blocks, [4, 3, 2, 1, 9, 9, 9, 9, 5]) == 0
    assert serve_and_free(blocks, [1, 2, 3, 4, 9, 9, 9, 8, 5]) == 4
    assert serve_and_free(blocks, [1, 2, 3, 4, 9, 9, 9, 9, 5]) == 8


def test_salted_requests_share_with_their_own_salt_only():
    blocks = BlockManager(16, 4)
    prompt = list(range(9))
    assert serve_and_free(blocks, prompt) == 0
    assert serve_and_free(blocks, prompt, cache_salt="a") == 0
    assert serve_and_free(blocks, prompt, cache_salt="b") == 0
    assert serve_and_free(blocks, prompt, cache_salt="") == 0
    assert [serve_and_free(blocks, prompt, cache_salt=s) for s in ("a", "b", "", None)] == [8, 8, 8, 8]


def test_running_requests_share_blocks_and_each_is_counted_once():
    blocks = BlockManager(8, 4)
    first, _ = serve(blocks, range(9), "1")
    second, num_hit = serve(blocks, range(10), "2")
    assert num_hit == 8
    assert first.block_ids[:2] == second.block_ids[:2] and first.block_ids[2] != second.block_ids[2]
    assert blocks.num_used == 4 and blocks.peak_used == 4
    blocks.check_integrity([first, second])
    blocks.free(first)
    assert blocks.num_used == 3
    blocks.check_integrity([second])
    third, num_hit = serve(blocks, range(12), "3")
    assert num_hit == 8 and blocks.num_used == 4
    blocks.free(second)
    blocks.free(third)
    assert blocks.num_free == 8 and blocks.peak_used == 4


def test_counts_are_of_this_run_and_leave_out_who_may_not_read():
    blocks = BlockManager(8, 16)
    serve_and_free(blocks, range(33))
    serve_and_free(blocks, range(33))
    assert (blocks.stats.queries, blocks.stats.hits) == (66, 32)
    assert blocks.stats.hit_rate == pytest.approx(0.4848, abs=1e-4)
    assert serve_and_free(blocks, range(33), prompt_logprobs=1) == 0
    assert (blocks.stats.queries, blocks.stats.hits) == (66, 32)
    assert blocks.num_free == blocks.num_blocks


def test_who_may_not_read_the_cache_still_fills_it():
    blocks = BlockManager(8, 4)
    assert serve_and_free(blocks, range(9), prompt_logprobs=0) == 0
    assert serve_and_free(blocks, range(9)) == 8


def test_of_two_equal_blocks_the_first_one_is_found():
    blocks = BlockManager(8, 4)
    first, second = make_request("1", range(9)), make_request("2", range(9))
    for request in (first, second):  # both admitted before either is registered
        blocks.admit(request, blocks.match(request), 9)
    for request in (first, second):
        request.num_computed = 9
        blocks.register(request)
    assert blocks.num_cached == 2
    assert blocks.match(make_request("q", range(9))) == first.block_ids[:2]
    blocks.check_integrity([first, second])
    blocks.free(first)
    blocks.free(second)
    blocks.check_integrity([])
    assert serve_and_free(blocks, range(9)) == 8


def test_only_known_and_computed_tokens_are_registered():
    blocks = BlockManager(8, 4)
    request = make_request("1", range(20))
    blocks.admit(request, [], 20)
    for num_computed, num_cached in ((3, 0), (4, 1), (11, 2), (20, 5)):
        request.num_computed = num_computed
        blocks.register(request)
        assert blocks.num_cached == num_cached == request.num_registered
    blocks.extend(request, 28)
    request.num_computed = 27  # drafts and tokens in flight: beyond what is known
    blocks.register(request)
    assert blocks.num_cached == 5
    request.token_ids += [20, 21, 22, 23, 24]
    blocks.register(request)
    assert blocks.num_cached == 6
    blocks.free(request)
    assert serve_and_free(blocks, range(26)) == 24


def test_extend_gives_all_or_nothing():
    blocks = BlockManager(4, 4)
    request, _ = serve(blocks, range(5))
    assert blocks.extend(request, 8) == []
    assert len(blocks.extend(request, 9)) == 1
    before = list(request.block_ids)
    assert blocks.extend(request, 17) is None
    assert request.block_ids == before and blocks.num_free == 1
    assert len(blocks.extend(request, 16)) == 1 and blocks.num_free == 0
    blocks.check_integrity([request])


def test_hits_on_free_blocks_count_against_the_room():
    blocks = BlockManager(4, 4)
    held, _ = serve(blocks, range(5), "held")
    gone, _ = serve(blocks, range(100, 108), "gone")
    blocks.free(gone)
    hit_ids = blocks.match(make_request("q", range(100, 109)))
    assert len(hit_ids) == 2 and blocks.num_free == 2
    assert blocks.num_free_without(hit_ids) == 0
    assert blocks.num_free_without(blocks.match(make_request("q", range(5)))) == 2
    blocks.free(held)


def test_reset_is_refused_while_blocks_are_in_use():
    blocks = BlockManager(8, 4)
    request, _ = serve(blocks, range(9))
    assert not blocks.reset_prefix_cache()
    assert len(blocks.match(make_request("q", range(9)))) == 2
    blocks.free(request)
    assert blocks.reset_prefix_cache()
    blocks.check_integrity([])
    assert serve_and_free(blocks, range(9)) == 0


def test_without_caching_nobody_shares_but_siblings_do():
    blocks = BlockManager(16, 4, enable_prefix_caching=False)
    prompt = list(range(9))
    serve_and_free(blocks, prompt)
    assert serve_and_free(blocks, prompt) == 0
    first, num_hit = serve(blocks, prompt, "1", fork_group="g")
    assert num_hit == 0
    second, num_hit = serve(blocks, prompt, "2", fork_group="g")
    assert num_hit == 8 and second.block_ids[:2] == first.block_ids[:2]
    assert blocks.match(make_request("q", prompt, fork_group="h")) == []
    assert blocks.match(make_request("q", prompt)) == []
    assert blocks.match(make_request("q", prompt, fork_group="g", cache_salt="s")) == []
    assert (blocks.stats.queries, blocks.stats.hits) == (0, 0)
    first.token_ids += range(50, 60)
    blocks.extend(first, 19)
    first.num_computed = 19
    blocks.register(first)
    assert blocks.num_cached == 2, "outputs are not shared while caching is off"
    blocks.free(first)
    blocks.free(second)
    blocks.check_integrity([])


def test_with_caching_siblings_share_with_everybody():
    blocks = BlockManager(16, 4)
    assert serve_and_free(blocks, range(9), fork_group="g") == 0
    assert serve_and_free(blocks, range(9)) == 8
    assert serve_and_free(blocks, range(9), fork_group="h") == 8


def test_extra_keys_part_two_caches():
    digests = []
    for keys in ((), ("float32",), ("bfloat16",)):
        request, _ = serve(BlockManager(8, 4, extra_keys=keys), range(9))
        digests += request.block_hashes
    assert len(set(digests)) == 6


@pytest.mark.parametrize("break_it", ["refs", "count", "link", "table", "digest"])
def test_check_integrity_sees_each_kind_of_damage(break_it):
    blocks = BlockManager(8, 4)
    request, _ = serve(blocks, range(9))
    blocks.check_integrity([request])
    if break_it == "refs":
        blocks._blocks[request.block_ids[0]].num_refs = 2
    elif break_it == "count":
        blocks.num_free -= 1
    elif break_it == "link":
        blocks._free.next.next.prev = blocks._free
    elif break_it == "table":
        blocks._cached.popitem()
    else:
        blocks._blocks[7].digest = b"x"
    with pytest.raises(AssertionError):
        blocks.check_integrity([request])


def test_contents_that_depend_on_the_next_token_are_hit_only_with_that_token_after_them():
    blocks = BlockManager(16, 4, lookahead=1)
    text = list(range(12))
    assert serve_and_free(blocks, text) == 0
    assert serve_and_free(blocks, text) == 8  # the third block's next token was never known
    assert serve_and_free(blocks, [*text[:8], 99, 98]) == 4  # its second block's next token is another one
    assert serve_and_free(blocks, [*text[:8], 99, 98]) == 8  # which is found as well, now that it was computed
    assert serve_and_free(blocks, text) == 8


def test_a_block_is_cached_once_the_token_after_it_is_known():
    blocks = BlockManager(16, 4, lookahead=1)
    request, _ = serve(blocks, range(8))
    assert blocks.num_cached == 1
    request.token_ids.append(8)
    blocks.register(request)
    assert blocks.num_cached == 2
    blocks.free(request)


def test_siblings_share_no_block_whose_next_token_is_their_own():
    blocks = BlockManager(16, 4, enable_prefix_caching=False, lookahead=1)
    first, _ = serve(blocks, range(8), fork_group="g")
    first.token_ids += [50, 51]
    first.num_computed = 10
    blocks.register(first)
    _, num_hit = serve(blocks, range(8), request_id="second", fork_group="g")
    assert num_hit == 4
