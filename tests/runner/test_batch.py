"""The batch gathered from the rows, against a plain loop."""

import random

import numpy as np
import pytest
import torch

from lab.runner.batch import BatchBuilder, Share
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
