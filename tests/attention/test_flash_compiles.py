"""The Triton kernels of `flash`, compiled for GPUs that need not be there: what a step would launch, down to machine code."""

import os
import re
from dataclasses import replace

import pytest
import torch

from lab import registry
from lab.checks.attention_trial import Case, Trial, spec_of
from plugins.attention.flash import cuda
from plugins.attention.flash.configs import Gpu
from tests.attention.compiling import Launch, Recorder, stack_bytes

assert not os.environ.get("TRITON_INTERPRET"), "these tests compile kernels, and the interpreter takes their place"
registry.discover()
OPTIONS = registry.get("attention", "flash").options
CPU = torch.device("cpu")
GPUS = {80: Gpu(108, 166_912), 90: Gpu(132, 232_448)}  # A100 and H100: multiprocessors, shared memory of one program
LLAMA = Case(((0, 300), (900, 1), (40, 1)), num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SMALL = replace(LLAMA, num_heads=9, num_kv_heads=3, head_dim=64)
LARGE = replace(LLAMA, num_heads=8, num_kv_heads=8, head_dim=256, softcap=30.0, sliding_window=128)
ODD = replace(LLAMA, num_heads=16, num_kv_heads=1, head_dim=80, dtype=torch.float16, block_size=24, sinks=True)
EXACT = replace(LLAMA, num_heads=4, num_kv_heads=2, head_dim=256, dtype=torch.float32)
CASES = {"llama": LLAMA, "small": SMALL, "large": LARGE, "odd": ODD, "exact": EXACT}


def launches_of(case: Case, gpu: Gpu, monkeypatch, *, lse: bool = False, **options) -> list[Launch]:
    """What writing and attending launches for the case."""
    recorder = Recorder(cuda.kernels)
    monkeypatch.setattr(cuda, "kernels", recorder)
    spec = spec_of(case, CPU)
    backend = cuda.CudaKernels(OPTIONS(**options), spec, gpu)
    batch = Trial(case, CPU, seed=0).batch
    q = torch.empty(batch.num_tokens, case.num_heads, case.head_dim, dtype=case.dtype)
    k = torch.empty(batch.num_tokens, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    shape = case.num_kv_heads, 2, case.block_size, case.head_dim
    if case.kv_scales == "token_head":
        shape = case.num_kv_heads, 2 * case.block_size * (case.head_dim + 2)
    kv = torch.empty(4, *shape, dtype=spec.kv_dtype)
    backend.write(k, k, kv, batch.slots_T)
    out = torch.empty_like(q)
    if lse:
        backend.attend_lse(q, kv, backend.plan(batch), out, torch.empty(q.shape[:2]))
    else:
        backend.attend(q, kv, backend.plan(batch), out)
    monkeypatch.undo()
    return recorder.launches


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_becomes_machine_code(name, capability, monkeypatch):
    gpu = GPUS[capability]
    launches = launches_of(CASES[name], gpu, monkeypatch)
    assert [launch.name for launch in launches] == ["write_kernel", "prefill_kernel", "decode_kernel", "reduce_kernel"]
    for launch in launches:
        compiled = launch.compile(capability)
        assert compiled.asm["cubin"] and f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= gpu.shared_bytes, launch.name


@pytest.mark.parametrize(
    ("name", "kv_dtype", "kv_scales", "capability"),
    [
        ("llama", torch.int8, "token_head", 90),
        ("llama", torch.float8_e4m3fn, "head", 90),
        ("small", torch.float8_e4m3fn, "token_head", 90),
        ("odd", torch.int8, "token_head", 80),
    ],
    ids=str,
)
def test_kernels_of_quantized_caches(name, kv_dtype, kv_scales, capability, monkeypatch):
    """Every kernel becomes machine code within the GPU's shared memory, and tensor cores multiply what was dequantized."""
    gpu = GPUS[capability]
    launches = launches_of(replace(CASES[name], kv_dtype=kv_dtype, kv_scales=kv_scales), gpu, monkeypatch)
    assert [launch.name for launch in launches] == ["write_kernel", "prefill_kernel", "decode_kernel", "reduce_kernel"]
    for launch in launches:
        compiled = launch.compile(capability)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= gpu.shared_bytes, launch.name
        if launch.name in ("prefill_kernel", "decode_kernel"):
            assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"]), launch.name
            assert not re.search(r"ld\.local|st\.local", compiled.asm["ptx"]), launch.name


@pytest.mark.parametrize(("name", "capability"), [("llama", 90), ("odd", 80)])
def test_kernels_of_shared_prefixes(name, capability, monkeypatch):
    """Keys that rows share, what is left of each row, and the logsumexp of all."""
    gpu, case = GPUS[capability], replace(CASES[name], rows=((512, 300), (900, 1), (600, 1)), prefixes=(((0, 1, 2), 480),))
    launches = launches_of(case, gpu, monkeypatch, cascade=1, lse=True)
    kernels = ["write_kernel", "prefill_kernel", "decode_kernel", "reduce_kernel", "shared_kernel", "merge_kernel"]
    assert [launch.name for launch in launches] == kernels
    for launch in launches[1:]:
        compiled = launch.compile(capability)
        assert compiled.asm["cubin"] and compiled.metadata.shared <= gpu.shared_bytes, launch.name
        if launch.name == "shared_kernel":
            assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"]) and "cp.async" in compiled.asm["ptx"]


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", CASES)
def test_a_batch_invariant_step_is_one_kernel_for_all_rows(name, capability, monkeypatch):
    """Rows of one token, too; and the whole of a row's keys goes through one loop of it, so less code is left."""
    gpu, lengths = GPUS[capability], []
    for invariant in (True, False):
        launches = launches_of(replace(CASES[name], batch_invariant=invariant), gpu, monkeypatch)
        assert launches[1].name == "prefill_kernel" and (len(launches) == 2) == invariant
        compiled = launches[1].compile(capability)
        assert compiled.metadata.shared <= gpu.shared_bytes
        lengths.append(len(re.findall(r"ex2\.approx", compiled.asm["ptx"])))
    assert lengths[0] < lengths[1] or CASES[name].sliding_window


@pytest.mark.parametrize("capability", GPUS)
def test_tensor_cores_asynchronous_loads_and_nothing_spilled(capability, monkeypatch, tmp_path):
    """A mixed step of a Llama in bf16: wgmma for tall tiles where the GPU has it, mma for short ones; cp.async; and registers
    hold all that a thread works on.
    """
    compiled = {launch.name: launch.compile(capability) for launch in launches_of(LLAMA, GPUS[capability], monkeypatch)}
    assert {name: stack_bytes(kernel, tmp_path) for name, kernel in compiled.items()} == dict.fromkeys(compiled, 0)
    ptx = {name: kernel.asm["ptx"] for name, kernel in compiled.items()}
    tall = "wgmma.mma_async.sync.aligned" if capability == 90 else "mma.sync.aligned.m16n8k16"
    assert tall in ptx["prefill_kernel"] and "mma.sync.aligned.m16n8k16" in ptx["decode_kernel"]
    for name in ("prefill_kernel", "decode_kernel"):
        assert "cp.async" in ptx[name], name
    assert "ld.global.v4" in ptx["write_kernel"] and "st.global.v4" in ptx["write_kernel"]  # 16 bytes at a time


def test_the_estimate_of_shared_memory_holds(monkeypatch):
    """Configurations are chosen by an estimate: it must not lie below what the compiler takes."""
    for case in CASES.values():
        for launch in launches_of(case, GPUS[80], monkeypatch):
            if launch.name not in ("prefill_kernel", "decode_kernel"):
                continue
            options = launch.options
            config = cuda.Config(options["BLOCK_M"], options["BLOCK_N"], options["num_warps"], options["num_stages"])
            size = case.dtype.itemsize
            estimate = config.shared_bytes(options["BLOCK_D"], size, size)
            assert launch.compile(80).metadata.shared <= estimate + 2048, (launch.name, case)


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_decode_of_uniform_rows(num_rows, monkeypatch):
    """Grids and splits follow from the batch's shape; the merge runs where there are splits."""
    case = replace(LLAMA, rows=((50, 1),) * num_rows)
    launches = {launch.name: launch for launch in launches_of(case, GPUS[90], monkeypatch)}
    splits = launches["decode_kernel"].grid[1]
    assert launches["decode_kernel"].grid == (8, splits, num_rows) and splits == {1: 32, 16: 4, 64: 1}[num_rows]
    assert ("reduce_kernel" in launches) == (splits > 1) and "prefill_kernel" not in launches
    assert launches["decode_kernel"].compile(90).asm["cubin"]
