"""Which rows of a step share which keys: the search of `flash` on CUDA, against the nodes of the rows' prefix tree."""

import numpy as np
import pytest

from plugins.attention.flash.cascade import PrefixSearch

SIZE = 16  # tokens of a block


def random_step(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables that branch off from earlier ones, and how many blocks each row may share."""
    rng = np.random.default_rng(seed)
    num_rows, width = int(rng.integers(1, 30)), 12
    blocks_RM = 1 + rng.permutation(num_rows * width).reshape(num_rows, width).astype(np.int32)
    for row in range(1, num_rows):
        if rng.random() < 0.8:
            depth = int(rng.integers(0, width + 1))
            blocks_RM[row, :depth] = blocks_RM[rng.integers(0, row), :depth]
    return blocks_RM, rng.integers(0, width + 1, num_rows)


def search(blocks_RM, limits_R, pays=lambda rows, num_keys: True):
    return PrefixSearch(blocks_RM, limits_R, SIZE, pays).found


@pytest.mark.parametrize("seed", range(40))
def test_every_shared_block_is_found_once(seed):
    blocks_RM, limits_R = random_step(seed)
    covered_R = np.zeros(len(limits_R), int)  # keys in the prefixes found so far
    num_reads = limits_R.sum()
    for prefix in search(blocks_RM, limits_R):
        first, last = prefix.key_first // SIZE, prefix.key_last // SIZE
        assert len(prefix.rows) > 1 and (limits_R[prefix.rows] >= last).all()
        assert (blocks_RM[prefix.rows, :last] == blocks_RM[prefix.rows[0], :last]).all()
        assert (covered_R[prefix.rows] == prefix.key_first).all(), "a gap, or keys that are in two prefixes"
        covered_R[prefix.rows] = prefix.key_last
        num_reads -= (len(prefix.rows) - 1) * (last - first)
    tree = {tuple(blocks[:depth]) for blocks, limit in zip(blocks_RM, limits_R, strict=True) for depth in range(1, limit + 1)}
    assert num_reads == len(tree)


def test_what_does_not_pay_is_left_to_those_that_share_more():
    blocks_RM = np.array([[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 5, 6], [7, 8, 9]], np.int32)
    found = search(blocks_RM, np.full(5, 3), lambda rows, num_keys: num_keys >= 2 * SIZE)
    assert [(sorted(prefix.rows), prefix.key_first, prefix.key_last) for prefix in found] == [([0, 1, 2], 0, 2 * SIZE)]
    found = search(blocks_RM, np.full(5, 3), lambda rows, num_keys: len(rows) < 3)
    assert [(sorted(prefix.rows), prefix.key_first, prefix.key_last) for prefix in found] == [([1, 2], 0, 3 * SIZE)]
