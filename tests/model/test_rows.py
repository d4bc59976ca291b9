"""The Triton kernels of debug.batch_invariant: run in Triton's interpreter, and compiled for GPUs that need not be there."""

import re
from pathlib import Path

import pytest
import torch

from lab import registry
from lab.model.layers import rows
from lab.model.layers.fused import Formulas, fused_for
from tests.attention.compiling import Recorder
from tests.interpreter import run_interpreted

registry.discover()
from plugins.quant import _triton_linear  # noqa: E402

CASES = Path(__file__).with_name("interpreted_rows.py")
LEAST = 22  # tests that must have run
SHARED_BYTES = {80: 166_912, 90: 232_448}  # of one program on an A100 and an H100
LAYERS = ((576, 960), (576, 49152), (4096, 4096), (4096, 28672))  # (in, out)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def test_every_kernel_in_the_interpreter():
    run_interpreted(CASES, LEAST)


def launch_of(module, kernel, call, monkeypatch):
    """What the call launches of a module's kernel."""
    recorder = Recorder(module)
    with monkeypatch.context() as patch:
        patch.setattr(module, kernel, getattr(recorder, kernel))
        call()
    (launch,) = recorder.launches
    return launch


def linear_launch(shape, dtype, num_rows, monkeypatch):
    in_features, out_features = shape
    x_TI, w_OI = torch.empty(num_rows, in_features, dtype=dtype), torch.empty(out_features, in_features, dtype=dtype)
    return launch_of(_triton_linear, "linear_kernel", lambda: _triton_linear.multiply(x_TI, w_OI), monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_layer_is_one_kernel_for_any_number_of_rows(dtype, monkeypatch):
    """Neither a constant nor what Triton compiles separately for follows from it."""
    for shape in LAYERS[:3]:
        launches = [linear_launch(shape, dtype, num_rows, monkeypatch) for num_rows in (1, 7, 16, 64, 65, 1024)]
        assert all(launch.options == launches[0].options for launch in launches)
        codes = {launch.compile(90).asm["ptx"] for launch in (launches[0], launches[2])}
        assert len(codes) == 1


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_layers_become_machine_code(dtype, capability, monkeypatch):
    """On tensor cores but for float32, which is not rounded to tf32; loads are asynchronous, nothing is in local memory."""
    for shape in LAYERS:
        compiled = linear_launch(shape, dtype, 64, monkeypatch).compile(capability)
        ptx = compiled.asm["ptx"]
        assert compiled.asm["cubin"] and compiled.metadata.shared <= SHARED_BYTES[capability]
        assert "cp.async" in ptx and "atom" not in ptx and "tf32" not in ptx and not re.search(r"[ls][dt]\.local", ptx)
        if dtype == torch.float32:
            assert "fma.rn.f32" in ptx and "mma" not in ptx
        else:
            assert ("wgmma.mma_async.sync.aligned" if capability == 90 else "mma.sync.aligned.m16n8k16") in ptx


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_become_machine_code(dtype, capability, monkeypatch):
    for size, weight_dtype in ((64, dtype), (576, torch.float32), (8192, dtype)):
        x, weight = torch.empty(3, size, dtype=dtype), torch.empty(size, dtype=weight_dtype)
        for call in (lambda: rows.rms_norm(x, weight, 1e-5), lambda: rows.add_rms_norm(x, x, weight, 1e-5)):  # noqa: B023
            launch = launch_of(rows, "rms_norm_kernel", call, monkeypatch)
            assert launch.grid == (3,)
            compiled = launch.compile(capability)
            assert compiled.asm["cubin"] and "atom" not in compiled.asm["ptx"]


def test_they_are_taken_in_that_mode_alone():
    cuda = torch.device("cuda")
    assert type(fused_for(cuda, torch.bfloat16)) is Formulas and not Formulas.is_invariant
    assert isinstance(fused_for(cuda, torch.float16, batch_invariant=True), rows.RowKernels)
    assert fused_for(cuda, torch.float16, batch_invariant=True).is_invariant
