"""Temperature, top_k, top_p, min_p: which tokens stay, what they weigh, and that each row is on its own."""

import math

import numpy as np
import pytest
import torch

from lab.sample import filters as module
from lab.sample.filters import Filters, probabilities, sample
from tests.sample.reference import chi_square_p

PROBS = [0.5, 0.25, 0.15, 0.1]
ALL = {0, 1, 2, 3}


def filters(num=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Filters(np.full(num, temperature), np.full(num, top_k, np.int64), np.full(num, top_p), np.full(num, min_p))


def uniforms(num, seed=0):
    return np.random.default_rng(seed).random(num)


KEPT = [
    ({"top_p": 1e-9}, {0}),
    ({"top_p": 0.4}, {0}),
    ({"top_p": 0.6}, {0, 1}),
    ({"top_p": 0.74}, {0, 1}),
    ({"top_p": 0.76}, {0, 1, 2}),
    ({"top_p": 0.91}, ALL),
    ({"top_p": 1.0}, ALL),
    ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # renormalised over the three
    ({"min_p": 0.4}, {0, 1}),
    ({"top_k": 0}, ALL),
    ({"top_k": -1}, ALL),
    ({"top_k": 1}, {0}),
    ({"top_k": 100}, ALL),
    ({"temperature": 0.5, "min_p": 0.19}, {0, 1}),  # temperature comes first
    ({"top_p": 0.76, "min_p": 0.4}, {0, 1}),
]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=["sorted", "shuffled"])
@pytest.mark.parametrize(("given", "kept"), KEPT, ids=str)
def test_kept_sets_and_draws(given, kept, order):
    x = torch.tensor([[math.log(PROBS[i]) for i in order]])
    probs = probabilities(x, filters(**given))[0]
    assert {order[i] for i in probs.nonzero().flatten().tolist()} == kept
    temperature = given.get("temperature", 1.0)
    total = sum(PROBS[i] ** (1 / temperature) for i in kept)
    wanted = [PROBS[i] ** (1 / temperature) / total if i in kept else 0.0 for i in order]
    assert probs.tolist() == pytest.approx(wanted, rel=1e-6)
    drawn = sample(x.expand(20_000, 4), filters(20_000, **given), uniforms(20_000))
    assert chi_square_p(np.bincount(drawn, minlength=4).tolist(), wanted) > 1e-4


@pytest.mark.parametrize("size", [32000, 49152, 128256])
def test_top_p_close_to_one_keeps_everything(size):
    x = torch.randn(64, size, generator=torch.Generator().manual_seed(size))
    u = np.concatenate([uniforms(61), [1 - 2.0**-53, 1 - 2.0**-24, 0.0]])
    close = sample(x, filters(64, top_p=0.9999999), u)
    assert ((close >= 0) & (close < size)).all()
    assert np.array_equal(close, sample(x, filters(64), u))
    support = probabilities(x[:2], filters(2, top_p=0.9999999)) > 0
    assert support.all()


@pytest.mark.parametrize("top_p", [0.999999, 0.99999])
def test_top_p_just_below_never_leaves_the_vocabulary(top_p):
    x = torch.randn(8, 49152, generator=torch.Generator().manual_seed(1))
    drawn = sample(x, filters(8, top_p=top_p), np.full(8, 1 - 2.0**-53))
    assert (probabilities(x, filters(8, top_p=top_p))[torch.arange(8), torch.from_numpy(drawn)] > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("temperature", [1e-4, 1e-5])
@pytest.mark.parametrize("given", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}], ids=str)
def test_small_temperatures(dtype, temperature, given):
    x = torch.tensor([50, 49.9, 0], dtype=dtype).float().expand(2000, 3)
    probs = probabilities(x[:1], filters(temperature=temperature, **given))
    assert probs.isfinite().all()
    assert (sample(x, filters(2000, temperature, **given), uniforms(2000)) == 0).all()


def test_huge_logits_and_minus_infinity_give_no_nan():
    x = torch.tensor([[3e38, -3e38, 0, -math.inf], [-math.inf, 1, 1, -math.inf], [-math.inf] * 4])
    for given in ({}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}):
        assert probabilities(x[:2], filters(2, 1e-5, **given)).isfinite().all()
        drawn = sample(x, filters(3, 1e-5, **given), np.full(3, 0.999))
        assert drawn[0] == 0 and drawn[1] in (1, 2) and 0 <= drawn[2] < 4


def test_ties_at_the_edge_of_top_k_go_to_lower_ids():
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0] * 100])
    kept = probabilities(x, filters(top_k=4))[0].nonzero().flatten().tolist()
    assert kept == [1, 2, 3, 6]


@pytest.mark.parametrize("scale", [1.5, 2.5])
def test_wide_nucleus_is_the_same_however_many_candidates(monkeypatch, scale):
    """A nucleus wider than the first candidates takes more, or the whole row; the outcome may not tell."""
    x = torch.randn(6, 8000, generator=torch.Generator().manual_seed(3)) * scale
    given, u = filters(6, top_p=0.9), uniforms(6)
    probs, drawn = probabilities(x, given), sample(x, given, u)
    sizes = (probs > 0).sum(-1)
    assert (sizes > module.CANDIDATES[0]).all()
    assert (sizes > module.CANDIDATES[1]).all() == (scale == 1.5)
    for candidates in ((), (4000,), (1, 7, 500)):
        monkeypatch.setattr(module, "CANDIDATES", candidates)
        assert torch.equal(probabilities(x, given), probs)
        assert np.array_equal(sample(x, given, u), drawn)


def test_rows_do_not_depend_on_each_other():
    """Any row alone gives the token that it gives in a mixed batch, bit for bit, with one thread or two."""
    rng = np.random.default_rng(7)
    num, size = 48, 5000
    x = torch.randn(num, size, generator=torch.Generator().manual_seed(8)) * torch.linspace(0.5, 8, num).unsqueeze(1)
    mixed = Filters(
        rng.uniform(0.3, 1.5, num),
        rng.choice([0, 0, 5, 50, 3000], num),
        rng.choice([1.0, 0.5, 0.95], num),
        rng.choice([0, 0.1], num),
    )
    u = rng.random(num)
    together, probs = sample(x, mixed, u), probabilities(x, mixed)
    for row in range(num):
        assert sample(x[row : row + 1], mixed[row : row + 1], u[row : row + 1])[0] == together[row]
        assert torch.equal(probabilities(x[row : row + 1], mixed[row : row + 1])[0], probs[row])
    order = rng.permutation(num)
    assert np.array_equal(sample(x[torch.from_numpy(order)], mixed[order], u[order]), together[order])


def test_logits_are_left_as_they_are():
    x = torch.randn(4, 600, generator=torch.Generator().manual_seed(9))
    before = x.clone()
    mixed = Filters(np.array([0.5, 1, 1, 2]), np.array([0, 3, 0, 0]), np.array([1, 1, 0.9, 1]), np.array([0, 0, 0, 0.1]))
    sample(x, mixed, uniforms(4))
    probabilities(x, mixed)
    assert torch.equal(x, before)
