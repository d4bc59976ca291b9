"""Order among tokens and the search by inverse CDF, against plain sorting and counting."""

import numpy as np
import pytest
import torch

from lab.sample.ordering import first_argmax, num_larger, pick, top
from tests.sample.reference import chi_square_p

SIZES = [1, 3, 64, 257, 300, 1000, 32000, 50257]


def rows(size, num=5, seed=0):
    """Random rows: one smooth, some with very many ties, some with -inf, signed zeros, all equal."""
    x = torch.randn(num, size, generator=torch.Generator().manual_seed(seed)) * 3
    x[1] = x[1].round()
    x[2] = torch.where(x[2] > 1, x[2], -torch.inf)
    x[3] = torch.where(x[3] > 0, 0.0, -0.0)
    x[4] = -2.5
    return x


@pytest.mark.parametrize("size", SIZES)
def test_argmax_takes_the_lowest_id(size):
    x = rows(size)
    wanted = [min(range(size), key=lambda i: (-row[i], i)) for row in x.tolist()]
    assert first_argmax(x).tolist() == wanted


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num", [1, 2, 5, 50, 300, 2000])
def test_top_is_the_start_of_a_full_sort(size, num):
    num = min(num, size)
    x = rows(size)
    values, ids = top(x, num)
    for row in range(len(x)):
        x_V = x[row].numpy() + 0.0
        wanted = np.lexsort((np.arange(size), -x_V))[:num]
        assert ids[row].tolist() == wanted.tolist()
        assert values[row].tolist() == x_V[wanted].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_num_larger_is_strict(size):
    x = rows(size)
    at = torch.full((len(x), 1), size // 2)
    wanted = [sum(v > row[size // 2] for v in row) for row in x.tolist()]
    assert num_larger(x, x.gather(1, at)).tolist() == wanted


def test_num_larger_counts_past_a_byte():
    x = torch.arange(100_000, 0, -1, dtype=torch.float32).repeat(2, 1)
    assert num_larger(x, torch.tensor([[1.0], [500.0]])).tolist() == [99_999, 99_500]


@pytest.mark.parametrize("size", [5, 256, 257, 50257])
def test_pick_never_chooses_weight_zero_nor_leaves_the_row(size):
    """Only a few entries have weight, the last ones among them; uniforms include both ends of [0, 1)."""
    weights = torch.zeros(1, size)
    positive = sorted({1, size // 2, size - 1})
    weights[0, positive] = torch.tensor([1e-30, 0.3, 1e-7][: len(positive)])
    edges = [0.0, 2.0**-53, 0.5, 1 - 2.0**-24, 1 - 2.0**-30, 1 - 2.0**-53]
    for uniform in edges + torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist():
        assert pick(weights, torch.tensor([uniform], dtype=torch.float64)).item() in positive
    assert pick(weights, torch.tensor([0.0], dtype=torch.float64)).item() == positive[0]
    assert pick(weights, torch.tensor([1 - 2.0**-53], dtype=torch.float64)).item() == positive[-1]


@pytest.mark.parametrize("size", [600, 50257])
def test_pick_at_zero_skips_blocks_without_weight(size):
    weights = torch.zeros(1, size)
    weights[0, size - 1] = 0.5
    assert pick(weights, torch.zeros(1, dtype=torch.float64)).item() == size - 1


def test_pick_where_a_block_sums_to_less_than_its_rounded_sum():
    """At the upper end of such a block the search finds no running sum that is larger; zeros follow the last weight."""
    top_end, rounded_up = torch.tensor([1 - 2.0**-53], dtype=torch.float64), 0
    for seed in range(200):
        weights = torch.zeros(1, 600)
        weights[0, :200] = torch.rand(200, generator=torch.Generator().manual_seed(seed))
        rounded_up += bool(weights.sum().double() > weights.double().sum())
        assert pick(weights, top_end).item() < 200
    assert rounded_up > 20


@pytest.mark.parametrize("size", [7, 600, 49152])
def test_pick_is_monotone_and_inverts_the_running_sum(size):
    weights = torch.rand(1, size, generator=torch.Generator().manual_seed(2))
    cdf = weights[0].double().cumsum(0) / weights[0].double().sum()
    uniforms = torch.rand(2000, generator=torch.Generator().manual_seed(3), dtype=torch.float64).sort().values
    found = torch.cat([pick(weights, u.view(1)) for u in uniforms])
    wanted = torch.searchsorted(cdf, uniforms, right=True)
    assert (found.diff() >= 0).all()
    assert (found != wanted).sum() <= 2 + size // 10000  # block sums are rounded to float32
    assert (found - wanted).abs().max() <= 1


def test_pick_follows_the_weights():
    weights = torch.tensor([0.0, 0.5, 0.1, 0.0, 0.4]).repeat(50_000, 1)
    uniforms = torch.rand(50_000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    counts = torch.bincount(pick(weights, uniforms), minlength=5).tolist()
    assert chi_square_p(counts, [0.0, 0.5, 0.1, 0.0, 0.4]) > 1e-4
