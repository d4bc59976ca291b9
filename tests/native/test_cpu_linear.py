"""The CPU kernels of linear layers against float64, on every path that this machine can take."""

import platform
from contextlib import contextmanager

import pytest
import torch

from lab import native
from lab.sample.ordering import first_argmax
from plugins.quant import _cpu_linear
from tests.native.tiles import EMULATED

ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 49, 100)
SHAPES = ((72, 50), (100, 33), (1, 7), (31, 1), (64, 64), (576, 192), (1536, 576), (512, 2050))  # (in, out)
ERROR = {torch.float32: 3e-6, torch.bfloat16: 8e-3}  # of the largest output; bfloat16 rounds it to 8 bits
X86 = platform.machine() in ("x86_64", "AMD64")
BUILDS = {"native": ()}
if X86:
    BUILDS |= {"avx2": ("-march=haswell",), "portable": ("-march=x86-64",), "emulated": EMULATED}
NEVER = 1 << 30
FROM_ROWS = {"all by tiles": (1, NEVER), "all by floats": (NEVER, 1), "all by vectors": (NEVER, NEVER)}  # tiles, floats
PATHS = (*(f"native, {path}" for path in FROM_ROWS), *(["emulated, all by tiles"] if X86 else []))

pytestmark = pytest.mark.skipif(native.available() is not None, reason=f"cannot build here: {native.available()}")


def operators(build: str):
    """The kernels compiled for the named instruction set; the native ones are those that the plugin uses."""
    name = _cpu_linear.NAMESPACE + ("" if build == "native" else f"_{build}")
    native.load(name, _cpu_linear.SOURCES, flags=BUILDS[build])
    return getattr(torch.ops, name)


@contextmanager
def forced(build: str, path: str):
    """The kernels of a build, all rows taking the one path; no path leaves the choice to them."""
    ops = operators(build)
    tiles, floats = FROM_ROWS.get(path, (None, None))
    before = ops.set_amx_from_rows(tiles or 2), ops.set_floats_from_rows(floats or 7)
    try:
        yield ops
    finally:
        ops.set_amx_from_rows(before[0])
        ops.set_floats_from_rows(before[1])


@pytest.fixture(params=[*BUILDS, *PATHS])
def ops(request):
    build, _, path = request.param.partition(", ")
    with forced(build, path) as ops:
        yield ops


@pytest.fixture
def linear(ops):
    return ops.linear


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(y_TO: torch.Tensor, x_TI: torch.Tensor, w_OI: torch.Tensor) -> None:
    expected = x_TI.double() @ w_OI.double().T
    assert y_TO.shape == expected.shape and y_TO.dtype == x_TI.dtype
    if y_TO.numel():
        assert (y_TO.double() - expected).abs().max() <= ERROR[x_TI.dtype] * max(expected.abs().max(), 1)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_for_any_number_of_rows(linear, shape, dtype):
    inputs, outputs = shape
    w_OI = random(outputs, inputs, dtype=dtype)
    packed = _cpu_linear.pack(w_OI)
    for rows in ROWS:
        x_TI = random(rows, inputs, dtype=dtype, seed=rows)
        check(linear(x_TI, packed, outputs), x_TI, w_OI)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_more_outputs_than_a_panel_and_many_rows(linear, dtype):
    w_OI, x_TI = random(1000, 1536, dtype=dtype), random(300, 1536, dtype=dtype, seed=1)
    check(linear(x_TI, _cpu_linear.pack(w_OI), 1000), x_TI, w_OI)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(linear, threads):
    w_OI, x_TI = random(336, 64, dtype=torch.bfloat16), random(7, 64, dtype=torch.bfloat16, seed=1)
    packed = _cpu_linear.pack(w_OI)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x_TI, packed, 336)
        torch.set_num_threads(threads)
        assert torch.equal(linear(x_TI, packed, 336), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_rows_divided_among_threads_and_inputs_in_slices(linear, dtype):
    """Enough rows for each thread to get some of its own, also where their stride is one that caches take badly."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for inputs in (64, 1184, 2048):
            w_OI, x_TI = random(79, inputs, dtype=dtype), random(521, inputs, dtype=dtype, seed=1)
            check(linear(x_TI, _cpu_linear.pack(w_OI), 79), x_TI, w_OI)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("path", ["all by tiles", "all by floats"])
def test_a_row_gets_the_same_bits_among_any_number_of_rows_of_one_path(path):
    w_OI, x_TI = random(1000, 1536, dtype=torch.bfloat16), random(300, 1536, dtype=torch.bfloat16, seed=1)
    packed = _cpu_linear.pack(w_OI)
    with forced("native", path) as ops:
        whole = ops.linear(x_TI, packed, 1000)
        for rows in (2, 5, 9, 16, 33, 70):
            assert torch.equal(ops.linear(x_TI[:rows], packed, 1000), whole[:rows])


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", ((64, 32), (100, 96), (576, 3072)), ids=str)
def test_gated_is_the_activation_of_the_product(ops, shape, dtype):
    """Gate and up in turns of a block, in both orders of rows and blocks that kernels hand sums over in."""
    inputs, outputs = shape
    w_OI = random(outputs, inputs, dtype=dtype)
    assert torch.equal(_cpu_linear.deinterleave(_cpu_linear.interleave(w_OI)), w_OI)
    packed = _cpu_linear.pack(_cpu_linear.interleave(w_OI))
    for rows in (*ROWS, 521):
        x_TI = random(rows, inputs, dtype=dtype, seed=rows) / 8
        gate_TF, up_TF = ops.linear(x_TI, _cpu_linear.pack(w_OI), outputs).chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate_TF) * up_TF
        torch.testing.assert_close(ops.gated(x_TI, packed, outputs), expected, rtol=2 * ERROR[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_argmax_is_that_of_the_product(ops, shape, dtype):
    inputs, outputs = shape
    packed = _cpu_linear.pack(random(outputs, inputs, dtype=dtype))
    for rows in ROWS:
        x_TI = random(rows, inputs, dtype=dtype, seed=rows)
        expected = first_argmax(ops.linear(x_TI, packed, outputs).float()).tolist()
        assert ops.argmax(x_TI, packed, outputs).tolist() == expected


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_argmax_among_equals_is_the_lowest(ops, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for dtype in ERROR:
            # Few distinct values, and in bfloat16 sums that differ only before they are rounded; row 0 is all zeros.
            w_OI = random(3, 64, dtype=torch.float32).sign().repeat(170, 1)[:501]
            w_OI[200:] *= 1 + 2**-10
            x_TI = random(40, 64, dtype=dtype, seed=1).sign()
            x_TI[0] = 0
            packed, w_OI = _cpu_linear.pack(w_OI.to(dtype)), w_OI.to(dtype)
            y_TO = ops.linear(x_TI, packed, 501)
            assert ((y_TO == y_TO.amax(-1, keepdim=True)).sum(-1) > 1).all()
            for rows in (1, 5, 40):
                found = ops.argmax(x_TI[:rows], packed, 501).tolist()
                assert found == first_argmax(y_TO[:rows].float()).tolist() and found[0] == 0
    finally:
        torch.set_num_threads(before)


def test_argmax_of_sums_that_are_equal_only_when_rounded(ops):
    """257/256 and 258/256 are both 1.0078125 in bfloat16: the first of them wins, though its sum is the lower."""
    w_OI = torch.zeros(40, 64, dtype=torch.bfloat16)
    w_OI[:, 0], w_OI[7, 1], w_OI[23, 1] = 1.0, 257 / 32768, 258 / 32768
    x_TI = torch.ones(20, 64, dtype=torch.bfloat16)
    for rows in (1, 20):
        y_TO = ops.linear(x_TI[:rows], _cpu_linear.pack(w_OI), 40)
        assert y_TO[0, 7] == y_TO[0, 23] and y_TO[0, 7] > y_TO[0, 0]
        assert ops.argmax(x_TI[:rows], _cpu_linear.pack(w_OI), 40).tolist() == [7] * rows


def test_argmax_of_what_is_not_finite(ops):
    for dtype in ERROR:
        w_OI, x_TI = random(300, 64, dtype=dtype), random(20, 64, dtype=dtype, seed=1)
        w_OI[150, 0] = float("nan")
        w_OI[220, 3] = float("nan")
        x_TI[2, 5] = float("inf")
        x_TI[3] = float("-inf")
        x_TI[4, 9] = float("nan")
        for without_nan in (False, True):
            if without_nan:
                w_OI = w_OI.nan_to_num(0.5).abs()
            packed = _cpu_linear.pack(w_OI)
            for rows in (20, 5):
                expected = first_argmax(ops.linear(x_TI[:rows], packed, 300).float()).tolist()
                assert ops.argmax(x_TI[:rows], packed, 300).tolist() == expected
                assert expected[0] == 150 or without_nan
                assert expected[4] == 0


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_a_row_has_the_same_bits_beside_any_number_of_others_if_asked(build, dtype):
    ops = operators(build)
    w_OI, x_TI = random(352, 608, dtype=dtype), random(700, 608, dtype=dtype, seed=1)
    packed = _cpu_linear.pack(w_OI)
    for product in (ops.linear, ops.gated):
        wanted = product(x_TI, packed, 352, True)
        for first, last in ((0, 1), (699, 700), (3, 5), (8, 24), (90, 123), (0, 512), (41, 700)):
            assert torch.equal(product(x_TI[first:last], packed, 352, True), wanted[first:last]), (first, last)
    assert torch.equal(ops.argmax(x_TI[:1], packed, 352, True), ops.argmax(x_TI, packed, 352, True)[:1])
    alone, among = ops.linear(x_TI[:1], packed, 352), ops.linear(x_TI, packed, 352)[:1]
    assert not torch.equal(alone, among) or (build, dtype) != ("native", torch.float32)  # else there was nothing to ask for


@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_inputs_that_are_not_contiguous(linear, dtype):
    w_OI = random(48, 64, dtype=dtype)
    packed = _cpu_linear.pack(w_OI)
    wide = random(20, 128, dtype=dtype, seed=1)
    for x_TI in (wide[:, 64:], wide[::2, :64], wide.T[:64, :].T, wide[:1, :64].expand(5, 64), wide.T.contiguous().T[:, 64:]):
        check(linear(x_TI, packed, 48), x_TI, w_OI)


def test_what_is_not_finite_stays_so_in_its_own_row_and_output(linear):
    for dtype in ERROR:
        w_OI, x_TI = random(40, 64, dtype=dtype), random(5, 64, dtype=dtype, seed=1)
        x_TI[2, 3] = float("nan")
        x_TI[4] = float("inf")
        w_OI[:, :] = w_OI.abs()
        y_TO = linear(x_TI, _cpu_linear.pack(w_OI), 40)
        assert y_TO[2].isnan().all() and (y_TO[4] == float("inf")).all() and y_TO[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_gives_the_weight_back(shape, dtype):
    w_OI = random(*shape, dtype=dtype)
    assert torch.equal(_cpu_linear.unpack(_cpu_linear.pack(w_OI), *shape), w_OI)


@pytest.mark.parametrize(
    ("x", "packed", "outputs"),
    [((2, 65), (1, 64, 16), 16), ((2, 64), (1, 64, 16), 17), ((2, 2, 64), (1, 64, 16), 16), ((2, 64), (64, 16), 16)],
)
def test_sizes_that_do_not_fit_are_refused(linear, x, packed, outputs):
    with pytest.raises(RuntimeError):
        linear(torch.zeros(x), torch.zeros(packed), outputs)


def test_dtypes_that_do_not_fit_are_refused(linear):
    with pytest.raises(RuntimeError, match="one dtype"):
        linear(torch.zeros(2, 64), torch.zeros(1, 64, 16, dtype=torch.bfloat16), 16)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        linear(torch.zeros(2, 64).half(), torch.zeros(1, 64, 16).half(), 16)


def test_a_missing_compiler_is_said_and_served_without(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    _cpu_linear.ready.cache_clear()
    try:
        assert not _cpu_linear.serves(torch.zeros(1))
        assert not _cpu_linear.serves(torch.zeros(1))
    finally:
        _cpu_linear.ready.cache_clear()
    assert capsys.readouterr().err.count("install g++") == 1


def test_a_compiled_layer_takes_any_number_of_rows_in_one_graph():
    assert _cpu_linear.serves(torch.zeros(1))
    w_OI = random(368, 64, dtype=torch.float32)  # no size equals a number of rows, or torch would take them for one
    packed = _cpu_linear.pack(w_OI)
    compiled = torch.compile(lambda x, w: _cpu_linear.linear(x, w, 368) + 1, dynamic=True, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for rows in (5, 9, 40):
        x_TI = random(rows, 64, dtype=torch.float32, seed=rows)
        check(compiled(x_TI, packed) - 1, x_TI, w_OI)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
