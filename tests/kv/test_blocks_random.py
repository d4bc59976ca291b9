"""Random traces: the block manager against a model of it that is too simple to be wrong."""

import random
from collections import Counter

import pytest

from lab.kv.blocks import BlockManager
from lab.sampling_params import SamplingParams
from lab.types import Request


class NaiveBlocks:
    """The same rules with plain lists and tuples: a block's identity is the whole prefix that it ends."""

    def __init__(self, num_blocks, block_size):
        self.size = block_size
        self.free = list(range(num_blocks))  # next to be reused first
        self.holders = Counter()
        self.contents = {}  # block id -> the tokens of the prefix that it ends

    def find(self, prefix):
        return next((b for b, held in self.contents.items() if held == prefix), None)

    def match(self, key, tokens):
        found = []
        for end in range(self.size, len(tokens), self.size):
            block = self.find((key, *tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, block):
        if self.holders[block] == 0:
            self.free.remove(block)
        self.holders[block] += 1

    def new(self):
        block = self.free[0]
        self.contents.pop(block, None)
        self.take(block)
        return block

    def register(self, key, tokens, table, since):
        for i in range(since, len(tokens) // self.size):
            prefix = (key, *tokens[: (i + 1) * self.size])
            if self.find(prefix) is None:
                self.contents[table[i]] = prefix

    def release(self, table):
        for block in reversed(table):
            self.holders[block] -= 1
            if self.holders[block] == 0:
                self.free.insert(len(self.free) if block in self.contents else 0, block)


@pytest.mark.parametrize("seed", range(40))
def test_random_traces_equal_the_naive_model(seed):
    chooser = random.Random(seed)
    num_blocks, size = chooser.randint(6, 24), chooser.choice([1, 2, 4, 16])
    blocks, naive = BlockManager(num_blocks, size), NaiveBlocks(num_blocks, size)
    prompts = [[chooser.randrange(2) for _ in range(num_blocks * size)] for _ in range(3)]
    live, seen = {}, Counter()
    queries = hits = peak = 0
    for number in range(300):
        action = chooser.random()
        if action < 0.4:
            length = chooser.randint(1, max(1, num_blocks * size // 2))
            prompt = chooser.choice(prompts)
            tokens = prompt[: max(1, length - 1)] + [chooser.randrange(3)]
            salt = chooser.choice([None, None, "s"])
            length = len(tokens)
            request = Request(str(number), tokens, SamplingParams(), 0.0, 0, cache_salt=salt)
            hit_ids = blocks.match(request)
            assert hit_ids == naive.match(salt, tokens)
            room = blocks.num_free_without(hit_ids)
            assert room == len(set(naive.free) - set(hit_ids))
            if blocks.blocks_for(length) - len(hit_ids) > room:
                seen["full"] += 1
                continue
            evictable = len(naive.contents)
            blocks.admit(request, hit_ids, length)
            for block in hit_ids:
                naive.take(block)
            table = hit_ids + [naive.new() for _ in range(blocks.blocks_for(length) - len(hit_ids))]
            seen["hit"] += len(hit_ids)
            seen["evicted"] += evictable - len(naive.contents)
            queries, hits = queries + length, hits + len(hit_ids) * size
            live[request] = table
            request.num_computed = length
        elif action < 0.7 and live:
            request = chooser.choice(list(live))
            tokens = [chooser.choice((0, 1)) for _ in range(chooser.randint(1, 2 * size))]
            num_tokens = len(request.token_ids) + len(tokens)
            new_ids = blocks.extend(request, num_tokens)
            num_new = blocks.blocks_for(num_tokens) - len(live[request])
            if new_ids is None:
                assert num_new > len(naive.free)
                continue
            assert new_ids == [naive.new() for _ in range(num_new)]
            live[request] += new_ids
            request.token_ids += tokens
            request.num_computed = num_tokens
            seen["extended"] += 1
        elif live:
            request = chooser.choice(list(live))
            naive.release(live.pop(request))
            blocks.free(request)
            seen["freed"] += 1
            continue
        else:
            continue
        naive.register(request.cache_salt, request.token_ids, live[request], request.num_registered)
        blocks.register(request)
        assert request.block_ids == live[request]
        peak = max(peak, num_blocks - len(naive.free))
        blocks.check_integrity(live)
        assert blocks.num_free == len(naive.free) and blocks.num_cached == len(naive.contents)
    assert (blocks.stats.queries, blocks.stats.hits, blocks.peak_used) == (queries, hits, peak)
    for request in live:
        blocks.free(request)
    blocks.check_integrity([])
    assert blocks.num_free == num_blocks
    assert seen["hit"] and seen["evicted"] and seen["extended"] and seen["freed"], seen
