"""Attention of the unrolled chain: the CPU kernel gives what the formula gives, both ways, and sees nothing it must not."""

import pytest
import torch

from lab.train.chain import Chain, over_chain

SHAPE = (2, 7)  # texts, tokens of each
AT = torch.tensor([3, 4, 5, 9, 10, 11])


def made(at, heads=6, kv_heads=2, size=16, steps=3):
    generator = torch.Generator().manual_seed(0)

    def random(count, num):
        return torch.randn(count, num, size, generator=generator, requires_grad=True)

    counts = [SHAPE[0] * SHAPE[1]] + [SHAPE[0] * SHAPE[1] if at is None else len(at)] * (steps - 1)
    k, v = ([random(count, kv_heads) for count in counts] for _ in range(2))
    return random(counts[-1], heads), k, v


@pytest.mark.parametrize("at", [None, AT], ids=["all", "some"])
def test_the_kernel_gives_what_the_formula_gives(at):
    q, k, v = made(at)
    expected = over_chain(q, SHAPE, at, tuple(k), tuple(v))
    found, longer = Chain(SHAPE, at, tuple(k[:-1]), tuple(v[:-1])).attend(q, k[-1], v[-1])
    assert len(longer.k) == 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    wanted, got = (torch.autograd.grad(y, [q, *k, *v], slope) for y in (expected, found))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_entry_sees_earlier_true_ones_of_its_text_and_its_own_chain():
    q, k, v = made(AT)
    y, _ = Chain(SHAPE, AT, tuple(k[:-1]), tuple(v[:-1])).attend(q, k[-1], v[-1])
    entry = 4  # the second text's place 3
    seen = torch.autograd.grad(y[entry].sum(), v)
    assert (seen[0].abs().sum((1, 2)) > 0).nonzero().flatten().tolist() == [7, 8, 9, 10]
    for own in seen[1:]:
        assert (own.abs().sum((1, 2)) > 0).nonzero().flatten().tolist() == [entry]


def test_the_first_step_gives_what_is_asked_of_it():
    q, k, v = (torch.randn(14, heads, 16, generator=torch.Generator().manual_seed(2)) for heads in (6, 2, 2))
    everything, _ = Chain(SHAPE).attend(q, k, v)
    some, longer = Chain(SHAPE, AT).attend(q, k, v)
    assert torch.equal(some, everything[AT]) and len(longer.k[0]) == 14
