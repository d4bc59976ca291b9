"""The kernels between linear layers against the formulas, run eagerly: the same roundings, every size and stride."""

import pytest
import torch

from lab.model.layers.fused import Formulas, Kernels, fused_for

SIZES = (1, 3, 16, 33, 576, 1001)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def kernels():
    return Kernels()


def assert_same(ours, theirs):
    """float32: a few units in the last place. bfloat16: next to none differ, and those by a rounding or two."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)
    else:
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=1e-6)
        assert (ours != theirs).float().mean() < 0.01 or ours.numel() < 200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", (1, 5, 300))
def test_norms(kernels, rows, size, dtype):
    x, delta, weight = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    assert_same(kernels.rms_norm(x, weight, 1e-5), Formulas().rms_norm(x, weight, 1e-5))
    ours, theirs = kernels.add_rms_norm(x, delta, weight, 1e-6), Formulas().add_rms_norm(x, delta, weight, 1e-6)
    assert_same(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_a_float32_weight_meets_what_is_not_rounded_yet(kernels):
    """Gemma's norms: to round before the weight gives other values."""
    x, weight = torch.randn(30, 576).bfloat16(), 1 + 0.1 * torch.randn(576)
    expected = Formulas().rms_norm(x, weight, 1e-6)
    assert_same(kernels.rms_norm(x, weight, 1e-6), expected)
    assert_same(kernels.add_rms_norm(x, x, weight, 1e-6)[0], Formulas().rms_norm(x + x, weight, 1e-6))
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    assert (expected != exact.bfloat16()).float().mean() < 0.01
    assert (Formulas().rms_norm(x, weight.bfloat16(), 1e-6) != exact.bfloat16()).float().mean() > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_a_wider_row(kernels, dtype):
    """Queries of a fused projection: rows in two dimensions, with a gap after each token."""
    heads = torch.randn(7, 5, 48).to(dtype)
    weight = torch.randn(48).to(dtype)
    assert_same(kernels.rms_norm(heads[:, :3], weight, 1e-5), Formulas().rms_norm(heads[:, :3], weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "half"), [(64, 32), (96, 48), (80, 16), (10, 5), (128, 64)])
@pytest.mark.parametrize("tokens", (1, 4, 200))
def test_rotation(kernels, tokens, size, half, dtype):
    x = torch.randn(tokens, 6, size).to(dtype)[:, 1:5]
    angles = torch.randn(tokens, 1, half)
    assert_same(kernels.rotate(x, angles.cos(), angles.sin()), Formulas().rotate(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", (1, 300))
def test_gated_activation(kernels, rows, size, dtype):
    x = (torch.randn(rows, 2 * size) * 4).to(dtype)
    assert_same(kernels.silu_mul(x), Formulas().silu_mul(x))
    x /= 2
    gate, up = x.double().chunk(2, 1)  # 1 + tanh would leave nothing of gates far below zero
    activated = gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    assert_same(kernels.gelu_mul(x), activated.to(dtype) * up.to(dtype))
    torch.testing.assert_close(kernels.gelu_mul(x), Formulas().gelu_mul(x), rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16))
@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64))
@pytest.mark.parametrize("rows", (0, 1, 300))
def test_rows_of_a_table(kernels, rows, index_dtype, dtype):
    table, index = torch.randn(50, 33).to(dtype), torch.randint(0, 50, (rows,)).to(index_dtype)
    assert torch.equal(kernels.take_rows(table, index), Formulas().take_rows(table, index))


@pytest.mark.parametrize("row", (-1, 50))
def test_a_row_that_a_table_has_not_is_an_error(kernels, row):
    with pytest.raises(IndexError, match=f"no row {row} of 50"):
        kernels.take_rows(torch.zeros(50, 4), torch.tensor([0, row]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "k"), [(1, 1), (7, 7), (16, 3), (4096, 8), (4099, 20)])
@pytest.mark.parametrize("rows", (1, 9))
def test_likeliest_entries(kernels, rows, size, k, dtype):
    logits = (torch.randn(rows, size) * 3).to(dtype)
    (ours, our_ids), (theirs, _) = kernels.top(logits, k), Formulas().top(logits, k)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-5)
    assert our_ids.dtype == torch.int64 and torch.equal(logits.gather(1, our_ids).float(), logits.topk(k).values.float())
    expected = [sorted(range(size), key=lambda i: (-row[i], i))[:k] for row in logits.float().tolist()]
    assert our_ids.tolist() == expected, "of equal entries the first"


def test_likeliest_of_what_is_no_number(kernels):
    """Nothing is right there, but the ids are of the vocabulary and differ."""
    logits = torch.full((2, 40), torch.nan)
    logits[1, 5], logits[1, 30] = 1.0, torch.inf
    _, ids = kernels.top(logits, 4)
    assert all(len(set(row)) == 4 and set(row) <= set(range(40)) for row in ids.tolist()) and ids[1, :2].tolist() == [30, 5]


def test_activation_of_extreme_values(kernels):
    x = torch.tensor([[0.0, -0.0, 1e4, -1e4, 90.0, -90.0, 1e30, torch.nan] + [1.0] * 8])
    ours, theirs = kernels.silu_mul(x), Formulas().silu_mul(x)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-30, equal_nan=True)
    ours, theirs = kernels.gelu_mul(x), Formulas().gelu_mul(x)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-30, equal_nan=True)


def test_no_rows(kernels):
    assert kernels.silu_mul(torch.empty(0, 8)).shape == (0, 4)
    assert kernels.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)


def test_other_dtypes_take_the_formulas():
    assert not fused_for(torch.device("cpu"), torch.float16).is_native
    assert fused_for(torch.device("cpu"), torch.bfloat16).is_native
