"""The Triton kernels of debug.batch_invariant in Triton's interpreter, on the CPU: run by test_rows.py in a process of its own.

Float32 and float16 alone: the interpreter computes wrongly in bfloat16.
"""

import os

import pytest
import torch

from lab import registry
from lab.model.layers import rows
from lab.model.layers.fused import Formulas

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/model/test_rows.py"
registry.discover()
from plugins.quant import _triton_linear  # noqa: E402

torch.set_num_threads(1)
DTYPES = (torch.float32, torch.float16)
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3}
SPANS = ((0, 1), (69, 70), (5, 69), (63, 65), (3, 70))  # of 70 rows


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (200, 50), (72, 33), (20, 2816)])
def test_a_linear_layer_gives_a_row_its_bits_beside_any_others(in_features, out_features, dtype):
    x_TI, w_OI = random(70, in_features, dtype=dtype), random(out_features, in_features, dtype=dtype, seed=1)
    y_TO = _triton_linear.multiply(x_TI, w_OI)
    wanted = x_TI.double() @ w_OI.double().T
    assert y_TO.dtype == dtype and (y_TO.double() - wanted).abs().max() <= ROUNDING[dtype] * wanted.abs().max()
    for first, last in SPANS if out_features < 100 else SPANS[1:3]:
        assert torch.equal(_triton_linear.multiply(x_TI[first:last], w_OI), y_TO[first:last]), (first, last)


def test_a_linear_layer_of_no_rows_and_of_rows_that_lie_anywhere():
    w_OI = random(32, 24, dtype=torch.float32, seed=1)
    assert _triton_linear.multiply(torch.empty(0, 24), w_OI).shape == (0, 32)
    x_TI = random(9, 24, dtype=torch.float32)
    wanted = _triton_linear.multiply(x_TI, w_OI)
    wide = torch.full((9, 40), torch.nan)
    wide[:, 7:31] = x_TI
    odd = torch.empty(9 * 24 + 1)[1:].view(9, 24).copy_(x_TI)
    for other in (wide[:, 7:31], odd):
        assert torch.equal(_triton_linear.multiply(other, w_OI), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 40, 2048])
@pytest.mark.parametrize("offset", [False, True])
def test_norms_are_those_of_the_formula_and_give_a_row_its_bits_beside_any_others(size, dtype, offset):
    weight = random(size, dtype=torch.float32 if offset else dtype, seed=2)
    x, delta = random(12, size, dtype=dtype), random(12, size, dtype=dtype, seed=3)
    normed, (summed, total) = rows.rms_norm(x, weight, 1e-5), rows.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta) and normed.dtype == summed.dtype == dtype
    for found, of in ((normed, x), (summed, total)):
        wanted = Formulas().rms_norm(of, weight, 1e-5)
        assert (found.double() - wanted.double()).abs().max() <= ROUNDING[dtype] * wanted.abs().max()
    for first, last in ((0, 1), (11, 12), (3, 9)):
        assert torch.equal(rows.rms_norm(x[first:last], weight, 1e-5), normed[first:last])
        found, its_total = rows.add_rms_norm(x[first:last], delta[first:last], weight, 1e-5)
        assert torch.equal(found, summed[first:last]) and torch.equal(its_total, total[first:last])


def test_norms_of_heads_that_lie_within_wider_rows():
    heads = random(5, 9, 16, dtype=torch.float32)[:, 2:6]
    weight = random(16, dtype=torch.float32, seed=1)
    assert torch.equal(rows.rms_norm(heads, weight, 1e-6), rows.rms_norm(heads.contiguous(), weight, 1e-6))
    assert rows.rms_norm(heads[:0], weight, 1e-6).shape == (0, 4, 16)
