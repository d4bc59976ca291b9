"""The Triton kernels: right against the reference over a set of shapes, and how fast on two of them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from gpu import Context
from gpu.machine import facts_of
from lab import registry
from lab.contracts.attention import Attention, AttentionSpec
from lab.runner.batch import Batch, BatchBuilder, Share
from lab.runner.rows import Rows

BLOCK = 16
TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MIXED = ((0, 300), (700, 1), (64, 20), (5, 1), (0, 1), (250, 6), (1000, 129), (33, 2))
ROWS = {
    "mixed": MIXED,
    "decode": tuple((n, 1) for n in (0, 14, 15, 16, 17, 127, 1023, 4096)),
    "one decode": ((5000, 1),),
    "verify": tuple((n, 5) for n in (3, 40, 700)),
    "prefill": ((0, 1), (0, 63), (0, 64), (0, 65), (0, 1500)),
    "chunk": ((2000, 512),),
}
HEADS = ((32, 8, 128), (9, 3, 64), (8, 8, 80), (16, 1, 96), (8, 2, 256), (6, 2, 40))
REPEATS = 20
OTHER_TILES = ((128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 4), (128, 128, 8, 2), (64, 64, 4, 3))  # M, N, warps, stages


def spec_of(context: Context, heads: tuple[int, int, int], dtype: torch.dtype, **more: Any) -> AttentionSpec:
    num_heads, num_kv_heads, dim = heads
    device = torch.device(context.device)
    return AttentionSpec(num_heads, num_kv_heads, dim, dim**-0.5, BLOCK, dtype, dtype, device, **more)


def backend_of(name: str, spec: AttentionSpec) -> Attention:
    registry.discover()
    entry = registry.get("attention", name)
    if name != "flash" or spec.device.type == "cuda":
        return entry.load()(entry.options(), spec)
    from plugins.attention.flash.cuda import CudaKernels

    backend = entry.load().__new__(entry.load())  # a dry run: the kernels of CUDA in the interpreter
    Attention.__init__(backend, entry.options(), spec)
    backend._kernels = CudaKernels(SimpleNamespace(num_splits=2, cascade="auto"), spec)
    return backend


def batch_of(rows: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Batch, int]:
    """The batch of rows (tokens before, tokens of the step) over shuffled blocks, and the number of blocks."""
    needs = [-(-(before + count) // BLOCK) for before, count in rows]
    order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(0)).tolist()
    table = Rows(len(rows), max(needs) * BLOCK, BLOCK)
    for row, need in enumerate(needs):
        table.blocks_RM[row, :need] = [order.pop() for _ in range(need)]
    shares = [Share(row, before, count, 0, True) for row, (before, count) in enumerate(rows)]
    return BatchBuilder(table, BLOCK, device).build(shares), sum(needs)


def filled(backend: Attention, num_blocks: int) -> torch.Tensor:
    spec = backend.spec
    kv = torch.zeros(backend.kv_shape(num_blocks, BLOCK), dtype=spec.kv_dtype, device=spec.device)
    step = 256
    for first in range(0, num_blocks, step):
        blocks = torch.arange(first, min(first + step, num_blocks), device=spec.device)
        generator = torch.Generator(spec.device).manual_seed(first)
        shape = (len(blocks), BLOCK, 2, spec.num_kv_heads, spec.head_dim)
        backend.load_blocks(kv, blocks, torch.randn(shape, generator=generator, device=spec.device).to(spec.kv_dtype))
    return kv


@torch.inference_mode()
def kernels(context: Context) -> dict[str, Any]:
    """`flash` against `eager`: every set of rows, shape and dtype, with windows, caps and splits among them."""
    dtypes = (torch.float32,) if context.is_dry else (torch.bfloat16, torch.float16, torch.float32)
    rows = {"small": ((0, 20), (9, 1))} if context.is_dry else ROWS
    count = 0
    for heads in HEADS[-1:] if context.is_dry else HEADS:
        for dtype in dtypes:
            for name, some in rows.items():
                for more in ({}, {"sliding_window": 100}, {"softcap": 20.0})[: 3 if name in ("mixed", "decode") else 1]:
                    spec = spec_of(context, heads, dtype, **more)
                    worst = difference(spec, some)
                    label = f"{heads} {str(dtype).removeprefix('torch.')} {name} {more or ''}: off by {worst:.1e}"
                    context.check(worst <= TOLERANCE[dtype], label)
                    count += 1
        context.keep("kernels")
    context.say(f"{count} cases of flash against eager")
    return context.result()


def difference(spec: AttentionSpec, rows: tuple[tuple[int, int], ...]) -> float:
    """The largest difference of flash from eager; NaN counts as infinite."""
    batch, num_blocks = batch_of(rows, spec.device)
    generator = torch.Generator(spec.device).manual_seed(9)
    shape = (batch.num_tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
    fused = torch.randn(shape, generator=generator, device=spec.device).to(spec.dtype)
    q, k, v = fused.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), 1)
    outputs = []
    for name in ("flash", "eager"):
        backend = backend_of(name, spec)
        kv = filled(backend, num_blocks)
        backend.write(k, v, kv, batch.slots_T)
        outputs.append(torch.full((batch.num_tokens, *q.shape[1:]), torch.nan, dtype=spec.dtype, device=spec.device))
        backend.attend(q, kv, backend.plan(batch), outputs[-1])
    return float((outputs[0].float() - outputs[1].float()).abs().nan_to_num(torch.inf).max())


@torch.inference_mode()
def speed(context: Context) -> dict[str, Any]:
    """Decode bandwidth and prefill arithmetic of a Llama-3-8B layer, and which tile of the prefill kernel is the fastest."""
    facts = facts_of(context)
    dtype = torch.float32 if context.is_dry else torch.bfloat16
    heads = (4, 2, 16) if context.is_dry else (32, 8, 128)
    decodes = ((2, 20),) if context.is_dry else ((1, 4096), (16, 4096), (64, 1024), (64, 4096), (256, 1024))
    for rows, length in decodes:
        spec = spec_of(context, heads, dtype)
        seconds, _ = attend_seconds(context, spec, ((length - 1, 1),) * rows)
        token_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize
        rate = rows * length * token_bytes / seconds
        context.data[f"decode {rows}x{length}"] = {"us": seconds * 1e6, "bytes_per_s": rate}
        share = rate / facts.bandwidth
        context.say(
            f"decode {rows} x {length}: {seconds * 1e6:.0f} us, {rate / 1e9:.0f} GB/s, {share:.0%} of what was measured"
        )
    for length in (20,) if context.is_dry else (2048, 8192):
        prefill_speed(context, spec_of(context, heads, dtype), length, facts.flops[str(dtype).removeprefix("torch.")])
        context.keep("attention")
    return context.result()


def prefill_speed(context: Context, spec: AttentionSpec, length: int, peak: float) -> None:
    """One fresh prompt: with the plugin's own choice of tiles, with others, and torch's on contiguous tensors."""
    from plugins.attention.flash.configs import Config

    flops = 2 * length * length * spec.num_heads * spec.head_dim  # two products, causal: half of 4 S S N H
    seconds, backend = attend_seconds(context, spec, ((0, length),))
    rates = {"own choice": flops / seconds}
    for config in () if context.is_dry else OTHER_TILES:
        try:
            rates[str(config)] = flops / attend_seconds(context, spec, ((0, length),), Config(*config))[0]
        except RuntimeError as error:  # more shared memory than there is
            context.data.setdefault("refused", []).append(f"{config}: {error}")
    if not context.is_dry:
        q = torch.randn(1, spec.num_heads, length, spec.head_dim, dtype=spec.dtype, device=spec.device)
        k = torch.randn(1, spec.num_kv_heads, length, spec.head_dim, dtype=spec.dtype, device=spec.device)
        call = lambda: F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)  # noqa: E731
        rates["torch sdpa, contiguous"] = flops / best_seconds(context, call)
    context.data[f"prefill {length}"] = rates
    described = ", ".join(f"{name} {rate / 1e12:.0f}" for name, rate in rates.items())
    context.say(f"prefill {length}: TFLOP/s {described}; {rates['own choice'] / peak:.0%} of the measured peak")


def attend_seconds(
    context: Context, spec: AttentionSpec, rows: tuple[tuple[int, int], ...], config: Any = None
) -> tuple[float, Attention]:
    backend = backend_of("flash", spec)
    if config is not None:
        backend._kernels._prefill = replace(config)
    batch, num_blocks = batch_of(rows, spec.device)
    kv = torch.randn(backend.kv_shape(num_blocks, BLOCK), device=spec.device, dtype=spec.kv_dtype)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, device=spec.device, dtype=spec.dtype)
    out, plan = torch.empty_like(q), backend.plan(batch)
    return best_seconds(context, lambda: backend.attend(q, kv, plan, out)), backend


def best_seconds(context: Context, call: Callable[[], Any]) -> float:
    """The median of device times, of calls replayed from a graph so that launching costs nothing."""
    call()
    if context.is_dry:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
