"""The batch gathered from the rows, against a plain loop."""

import random

import numpy as np
import pytest
import torch

from lab.runner.batch import BatchBuilder, Share
from lab.runner.buffers import InputBuffers
from lab.runner.rows import Rows
from lab.sampling_params import SamplingParams
from lab.types import Chunk, NewRow


def new_row(request_id, token_ids, block_ids, num_computed=0):
    return NewRow(request_id, token_ids, len(token_ids), SamplingParams(), 0, frozenset(), block_ids, num_computed)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(5))
def test_batch_equals_a_loop_over_tokens(block_size, seed):
    rng = random.Random(seed)
    rows = Rows(8, 100, block_size)
    free_blocks = list(range(1000))
    rng.shuffle(free_blocks)
    tables, tokens, shares = {}, {}, []
    for name in rng.sample("abcdefgh", rng.randint(1, 8)):
        length = rng.randint(1, 90)
        tokens[name] = [rng.randrange(500) for _ in range(length)]
        tables[name] = [free_blocks.pop() for _ in range(-(-(length + 5) // block_size))]
        row = rows.add(new_row(name, tokens[name], tables[name]))
        drafts = [rng.randrange(500) for _ in range(rng.randint(0, 4))]
        rows.set_drafts(row, drafts)
        samples = rng.random() < 0.7
        start = rng.randrange(length)
        count = length - start + len(drafts) if samples else rng.randint(1, length - start)
        shares.append((name, drafts, Share(row, start, count, len(drafts) if samples else 0, samples)))
    batch = BatchBuilder(rows, block_size, torch.device("cpu")).build([s for _, _, s in shares])

    ids, positions, slots, logits, q_start = [], [], [], [], [0]
    for name, drafts, share in shares:
        history = tokens[name] + drafts
        for position in range(share.start, share.start + share.num_tokens):
            ids.append(history[position])
            positions.append(position)
            slots.append(tables[name][position // block_size] * block_size + position % block_size)
        q_start.append(len(ids))
        if share.samples:
            logits += range(len(ids) - 1 - share.num_drafts, len(ids))
    assert batch.input_ids_T.tolist() == ids
    assert batch.positions_T.tolist() == positions
    assert batch.slots_T.tolist() == slots
    assert batch.logits_idx_L.tolist() == logits
    assert batch.q_start_R1.tolist() == q_start == batch.q_start_R1_cpu.tolist()
    assert batch.ctx_len_R.tolist() == [s.start + s.num_tokens for _, _, s in shares]
    assert (batch.num_tokens, batch.num_rows) == (len(ids), len(shares))
    for index, (name, _, share) in enumerate(shares):
        needed = -(-(share.start + share.num_tokens) // block_size)
        assert batch.blocks_RM[index, :needed].tolist() == tables[name][:needed]


def test_rows_keep_their_place_and_are_reused():
    rows = Rows(2, 20, 4)
    first, second = rows.add(new_row("a", [1, 2, 3], [5])), rows.add(new_row("b", [4], [6]))
    assert {first, second} == {0, 1}
    assert rows.free("a") == first
    assert rows.free("a") is None
    assert rows.add(new_row("c", [7, 8], [9, 10])) == first
    assert rows["b"] == second
    assert rows.lengths_R[first] == 2
    assert rows.num_drafts_R[first] == 0


def test_append_and_drafts():
    rows = Rows(1, 20, 4)
    row = rows.add(new_row("a", [1, 2, 3], [5]))
    rows.apply(Chunk("a", 2, 3, 2, True, [7], [8, 9]))
    assert rows.drafts(row, 2) == [8, 9]
    assert rows.blocks_RM[row, :2].tolist() == [5, 7]
    rows.append(row, [8, 4])  # one draft accepted, then another token
    assert rows.tokens_RC[row, : rows.lengths_R[row]].tolist() == [1, 2, 3, 8, 4]
    assert rows.num_drafts_R[row] == 0
    assert rows.tokens_RC.dtype == np.int32


class TestGroups:
    """Three KV groups: the tables stand side by side in what the scheduler sends."""

    def rows(self):
        rows = Rows(4, 40, 4, num_groups=3)
        row = rows.add(new_row("a", list(range(10)), [1, 2, 3, 4, -1, 6, 7, 8, 9]))
        rows.apply(Chunk("a", 9, 4, 3, True, [10, 11, 12], [5, 6, 7]))
        return rows, row

    def check(self, batch):
        tables = [[1, 4, 7, 10], [2, 0, 8, 11], [3, 6, 9, 12]]  # -1: a block that the group does not keep, any will do
        for group, table in enumerate(tables):
            own = batch.of_group(group)
            assert own.blocks_RM[0, :4].tolist() == own.blocks_RM_cpu[0, :4].tolist() == table
            assert own.slots_T.tolist()[:4] == [4 * table[2] + 1, 4 * table[2] + 2, 4 * table[2] + 3, 4 * table[3]]
            assert own.input_ids_T is batch.input_ids_T and own.q_start_R1_cpu is batch.q_start_R1_cpu

    def test_each_sees_its_own_table_and_slots(self):
        rows, row = self.rows()
        self.check(BatchBuilder(rows, 4, torch.device("cpu")).build([Share(row, 9, 4, 3, True)]))

    def test_in_persistent_buffers(self):
        """Padded to 8 tokens and 2 rows, at the same addresses after a batch that was larger."""
        rows, row = self.rows()
        builder = BatchBuilder(rows, 4, torch.device("cpu"), InputBuffers(64, 4, 10, torch.device("cpu"), 3), 40)
        sample = builder.build_sample(16, 4, is_uniform=True)
        places = [(sample.of_group(g).slots_T.data_ptr(), sample.of_group(g).blocks_RM.data_ptr()) for g in range(3)]
        assert len({place for both in places for place in both}) == 6
        batch = builder.build([Share(row, 9, 4, 3, True)], 8, 2)
        self.check(batch)
        for group, place in enumerate(places):
            own = batch.of_group(group)
            assert (own.slots_T.data_ptr(), own.blocks_RM.data_ptr()) == place
            assert own.slots_T.tolist()[4:] == [-1] * 4 and own.blocks_RM.shape == (2, 10) and not own.blocks_RM[1].any()


class TestSamples:
    """Batches to try a shape with: those that graphs are captured with must stand for every later one of the shape."""

    MAX_LEN = 40

    def builder(self, max_rows=8):
        rows = Rows(max_rows, self.MAX_LEN + 3, 4)
        buffers = InputBuffers(512, max_rows, rows.blocks_RM.shape[1], torch.device("cpu"))
        return BatchBuilder(rows, 4, torch.device("cpu"), buffers, self.MAX_LEN)

    def test_uniform_rows(self):
        batch = self.builder().build_sample(24, 8, is_uniform=True)
        assert batch.q_start_R1.tolist() == list(range(0, 25, 3)) and batch.ctx_len_R.tolist() == [3] * 8
        assert (batch.num_tokens, batch.num_rows, batch.max_q) == (24, 8, 3)

    @pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (2, 2), (7, 7), (8, 8), (41, 8), (42, 8), (200, 8), (512, 0)])
    def test_mixed_rows(self, num_tokens, num_rows):
        batch = self.builder(16).build_sample(num_tokens, num_rows, is_uniform=False)
        counts = np.diff(batch.q_start_R1_cpu)
        assert counts.sum() == num_tokens == batch.num_tokens and counts.min() > 0 and counts.max() <= self.MAX_LEN
        assert batch.max_q == min(num_tokens, self.MAX_LEN)
        assert len(batch.ctx_len_R) == max(num_rows, len(counts)) and (num_tokens == 1 or counts[-1] == 1)

    def test_they_write_nowhere_and_stay_within_the_longest_row(self):
        for num_tokens, num_rows, max_rows in ((300, 8, 8), (300, 1, 1), (512, 0, 2)):
            batch = self.builder(max_rows).build_sample(num_tokens, num_rows, is_uniform=False)
            assert (batch.slots_T == -1).all() and batch.positions_T.max() < self.MAX_LEN
            assert batch.ctx_len_R.max() <= self.MAX_LEN and len(batch.ctx_len_R) <= max_rows
