"""KV groups: how layers are grouped, what each group keeps of a row, and which prefixes are hits."""

import random

import pytest

from lab.kv.grouped import NO_BLOCK, GroupedBlockManager
from lab.kv.groups import Full, Grouping, LayerCache, Sliding, group_layers, need_of
from lab.sampling_params import SamplingParams
from lab.types import Request

PAGE = ("flash", (1, 4, 2, 16, 64), "bfloat16")


def layers(*windows, max_len=8192, page=PAGE):
    return [LayerCache(need_of(window, max_len), page) for window in windows]


def make_request(request_id, token_ids, **kwargs):
    return Request(request_id, list(token_ids), SamplingParams(), 0.0, 0, **kwargs)


def columns(request, blocks):
    """The block table of each group, as strings of what is kept."""
    width = len(blocks.needs)
    return ["".join("." if i == NO_BLOCK else "x" for i in request.block_ids[group::width]) for group in range(width)]


def compute(blocks, request, chunk):
    """What the scheduler does for the next `chunk` tokens of a running request."""
    assert blocks.extend(request, request.num_computed + chunk) is not None
    request.num_computed += chunk
    blocks.register(request)


class TestGrouping:
    def test_one_kind_of_layers_is_one_group_in_which_every_layer_has_its_tensor(self):
        grouping = group_layers(layers(None, None, None), 8192)
        assert grouping == Grouping((Full(),), (0, 0, 0), (0, 1, 2)) and grouping.is_plain
        grouping = group_layers(layers(100, 100), 8192)
        assert grouping == Grouping((Sliding(100),), (0, 0), (0, 1)) and not grouping.is_plain

    def test_a_window_that_no_row_outgrows_is_none(self):
        assert need_of(8192, 8192) == Full() and need_of(8191, 8192) == Sliding(8191)
        assert group_layers(layers(8192, None), 8192).is_plain

    def test_every_other_layer(self):
        """Gemma-2: 13 layers of each kind, which share 13 tensors."""
        grouping = group_layers(layers(*[4096, None] * 13), 8192)
        assert grouping.needs == (Sliding(4096), Full())
        assert grouping.group_of == (0, 1) * 13
        assert grouping.place_of == tuple(place for place in range(13) for _ in (0, 1))

    def test_five_of_six_layers(self):
        """Gemma-3 1B: four full layers of 26, and the 22 others in groups of four."""
        windows = [None if (layer + 1) % 6 == 0 else 512 for layer in range(26)]
        grouping = group_layers(layers(*windows, max_len=32768), 32768)
        assert sorted(grouping.needs, key=str) == [Full()] + [Sliding(512)] * 6
        assert max(grouping.place_of) == 3
        places = list(zip(grouping.group_of, grouping.place_of, strict=True))
        assert len(set(places)) == 26, "two layers of one group in one place"
        for window, group in zip(windows, grouping.group_of, strict=True):
            assert grouping.needs[group] == need_of(window, 32768)

    def test_a_group_has_the_size_that_costs_a_long_row_least(self):
        """14 full and 13 sliding layers: of 13 a group, one full layer would need a second group of all tokens."""
        grouping = group_layers(layers(*[None] * 14, *[100] * 13), 8192)
        assert grouping.needs == (Full(), Sliding(100)) and max(grouping.place_of) == 13

    def test_pages_that_differ_keep_all(self):
        both = [*layers(None), *layers(100, page=("flash", (1, 8, 2, 16, 64), "bfloat16"))]
        assert group_layers(both, 8192) == Grouping((Full(),), (0, 0), (0, 1))
        windows = [*layers(100), *layers(200, page=("flash", (1, 8, 2, 16, 64), "bfloat16"))]
        assert group_layers(windows, 8192).needs == (Sliding(200),)


class TestWhatIsKept:
    def test_blocks_behind_the_window_are_given_back(self):
        blocks = GroupedBlockManager(100, 4, (Full(), Sliding(6)), reach=8)
        request = make_request("r", range(40))
        blocks.admit(request, [], 8)
        request.num_computed = 8
        blocks.register(request)
        seen = []
        while request.num_computed < 40:
            compute(blocks, request, 4)
            seen.append(columns(request, blocks)[1])
            blocks.check_integrity([request])
        assert columns(request, blocks)[0] == "x" * 10
        # the chunk from 8 on reads from 3 on, the one from 12 on from 7 on, ...
        assert seen == ["x" * 3, ".xxx", "..xxx", "...xxx", "....xxx", ".....xxx", "......xxx", ".......xxx"]
        assert blocks.num_used == 10 + 3

    @pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17])
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    def test_a_long_row_that_decodes_holds_its_window_and_no_more(self, window, block_size):
        blocks = GroupedBlockManager(2000, block_size, (Sliding(window),), reach=2)
        request = make_request("r", range(3))
        blocks.admit(request, [], 3)
        request.num_computed = 3
        blocks.register(request)
        for token in range(300):
            request.token_ids.append(token)
            compute(blocks, request, 1)
            most = (window + 1 + block_size - 2) // block_size + 1
            assert blocks.num_used <= min(most, blocks.blocks_for(len(request.token_ids)))
            assert all(
                request.block_ids[position // block_size] != NO_BLOCK
                for position in range(max(0, request.num_computed - window), request.num_computed)
            )
        blocks.free(request)
        assert blocks.num_used == 0 and blocks.peak_used <= window // block_size + 3

    def test_blocks_that_drafts_in_flight_may_need_again_are_kept(self):
        """Five drafts are planned as accepted: if none is, the next step begins right after the last token that is known."""
        blocks = GroupedBlockManager(100, 1, (Sliding(3),), reach=12)
        request = make_request("r", range(20))
        blocks.admit(request, [], 20)
        request.num_computed = 20 + 5
        assert blocks.extend(request, 31) is not None
        assert columns(request, blocks) == ["." * 17 + "x" * 14]  # position 19 reads 17, 18 and itself

    def test_what_is_given_back_can_be_hit_and_is_reused_last(self):
        blocks = GroupedBlockManager(100, 4, (Sliding(4),), reach=40)
        request = make_request("r", range(40))
        blocks.admit(request, [], 40)
        request.num_computed = 40
        blocks.register(request)
        request.token_ids.append(7)
        compute(blocks, request, 1)
        assert blocks.num_used == 2 and blocks.num_cached == 10
        other = make_request("o", range(13))
        assert blocks.tokens_in(blocks.match(other)) == 12
        assert blocks.match(other).count(NO_BLOCK) == 2

    def test_the_most_that_a_request_holds(self):
        blocks = GroupedBlockManager(100, 16, (Full(), Sliding(64), Sliding(64)), reach=32)
        assert blocks.blocks_for(16) == 3
        assert blocks.blocks_for(1600) == 100 + 2 * 7  # 95 tokens touch at most 7 blocks
        assert blocks.wanted(1600, [1, 2, 3, 4, NO_BLOCK, NO_BLOCK]) == 110


class TestHits:
    def make(self, *needs, num_tokens=32, size=4):
        """A manager in which all of range(num_tokens) is cached, for every group."""
        blocks = GroupedBlockManager(200, size, needs, reach=num_tokens)
        first = make_request("first", range(num_tokens))
        blocks.admit(first, [], num_tokens)
        first.num_computed = num_tokens
        blocks.register(first)
        table = list(first.block_ids)
        blocks.free(first)
        return blocks, table

    def forget(self, blocks, block_id):
        block = blocks._blocks[block_id]
        del blocks._cached[block.digest]
        block.digest = None

    def test_a_sliding_group_needs_its_last_window_only(self):
        blocks, table = self.make(Full(), Sliding(6))
        request = make_request("r", [*range(32), 99])
        hit = blocks.match(request)
        assert blocks.tokens_in(hit) == 32
        assert hit[0::2] == table[0::2] and hit[1::2] == [NO_BLOCK] * 6 + table[13::2]
        blocks.admit(request, hit, 33)
        assert blocks.num_used == 8 + 2 + 2 and request.kept_from == [0, 6]
        blocks.check_integrity([request])

    def test_a_hole_in_the_window_shortens_the_hit_to_where_no_group_misses_anything(self):
        blocks, table = self.make(Full(), Sliding(6))
        self.forget(blocks, table[7 * 2 + 1])  # the sliding group's last block
        request = make_request("r", [*range(32), 99])
        assert blocks.tokens_in(blocks.match(request)) == 28
        self.forget(blocks, table[5 * 2 + 1])  # 24 tokens need it, 28 do too: 20 is the longest that does not
        assert blocks.tokens_in(blocks.match(request)) == 20
        self.forget(blocks, table[3 * 2])  # of the full group
        assert blocks.tokens_in(blocks.match(request)) == 12

    def test_a_hit_of_several_windows_is_a_fixed_point(self):
        """What one window leaves, another takes from, and then the first again."""
        blocks, table = self.make(Sliding(5), Sliding(9), size=4, num_tokens=40)
        self.forget(blocks, table[9 * 2])  # the near window: not 40
        self.forget(blocks, table[8 * 2 + 1])  # the far one: not 36
        self.forget(blocks, table[7 * 2])  # the near one again: not 32
        request = make_request("r", [*range(40), 99])
        assert blocks.tokens_in(blocks.match(request)) == 28

    def test_groups_do_not_find_each_others_blocks(self):
        blocks, table = self.make(Full(), Full())
        for entry in range(0, len(table), 2):
            self.forget(blocks, table[entry])
        assert blocks.match(make_request("r", [*range(32), 99])) == []

    def test_siblings_share_their_prompt_without_prefix_caching(self):
        blocks = GroupedBlockManager(100, 4, (Full(), Sliding(6)), reach=32, enable_prefix_caching=False)
        first, second, stranger = (make_request(i, range(18), fork_group=g) for i, g in (("a", "g"), ("b", "g"), ("c", None)))
        blocks.admit(first, [], 18)
        first.num_computed = 18
        blocks.register(first)
        assert blocks.tokens_in(blocks.match(second)) == 16
        assert blocks.match(stranger) == []

    def test_reset_forgets_every_group(self):
        blocks, _ = self.make(Full(), Sliding(6))
        assert blocks.num_cached == 16 and blocks.reset_prefix_cache() and blocks.num_cached == 0
        assert blocks.match(make_request("r", [*range(32), 99])) == []


def longest_by_trying(cached, needs, digests, size):
    """The longest prefix after which every group finds what the next token reads: by trying each."""
    for length in range(len(digests), 0, -1):
        first = [need.first_needed(length * size) // size for need in needs]
        if all((digests[i], group) in cached for group in range(len(needs)) for i in range(first[group], length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(30))
def test_hits_equal_those_found_by_trying_every_length(seed):
    chooser = random.Random(seed)
    size, num_blocks = chooser.choice([1, 2, 4]), 24
    for _ in range(20):
        needs = tuple(chooser.choice([Full(), Sliding(chooser.randint(1, 30))]) for _ in range(chooser.randint(1, 4)))
        blocks = GroupedBlockManager((num_blocks + 1) * len(needs), size, needs, reach=num_blocks * size + 1)
        request = make_request("r", [chooser.randrange(9) for _ in range(num_blocks * size)])
        blocks.admit(request, [], num_blocks * size)
        request.num_computed = num_blocks * size
        blocks.register(request)
        table, digests = list(request.block_ids), list(request.block_hashes)
        blocks.free(request)
        cached = {(digest, group) for digest in digests for group in range(len(needs))}
        for entry in chooser.sample(range(len(table)), chooser.choice([0, 1, 2, 5, len(table) // 2])):
            TestHits().forget(blocks, table[entry])
            cached.discard((digests[entry // len(needs)], entry % len(needs)))
        again = make_request("again", [*request.token_ids, 1])
        hit = blocks.match(again)
        assert blocks.tokens_in(hit) == longest_by_trying(cached, needs, digests, size) * size
        assert all(b in (NO_BLOCK, table[entry]) for entry, b in enumerate(hit))
        blocks.admit(again, hit, len(again.token_ids))
        blocks.check_integrity([again])
        blocks.free(again)
        assert blocks.num_used == 0


@pytest.mark.parametrize("damage", ["behind its window", "lacks a block", "keeps too much", "of another group"])
def test_integrity_names_what_is_wrong(damage):
    blocks = GroupedBlockManager(60, 4, (Full(), Sliding(6)), reach=8)
    request = make_request("r", range(40))
    blocks.admit(request, [], 40 if damage == "keeps too much" else 4)
    if damage != "keeps too much":
        request.num_computed = 4
        while request.num_computed < 40:
            compute(blocks, request, 4)
        blocks.check_integrity([request])
    table = request.block_ids
    if damage == "behind its window":
        table[1] = table[-1]
        table[-1] = NO_BLOCK
    elif damage == "lacks a block":
        request.kept_from[1] -= 1
    elif damage == "of another group":
        table[-1], table[-2] = table[-2], table[-1]
    with pytest.raises(AssertionError, match=damage):
        blocks.check_integrity([request])
