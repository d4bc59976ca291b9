"""Short measurements of what a device can do at best: memory bandwidth and arithmetic rate.

Each probe takes the best of several repetitions, because what is asked for is a limit: interruptions only make a probe slower.
On a CPU both go through oneDNN's prepacked linear, the fastest path torch has: a plain sum() of the same bytes reads them a
quarter slower than a matrix-vector product does, and would set the floor too low.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

STREAM_BYTES = (256 << 20, 1 << 30)  # read per repetition: at least, at most
GEMM_TOKENS = 512
GEMM_WIDTH = 1536
PROBE_SECONDS = 0.4
LEAST_REPETITIONS = 3
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """What a probe found: `best` units per second, and by which share the median repetition was slower than the best one."""

    best: float
    spread: float


def rate_of(amount: float, work: Callable[[], object], synchronize: Callable[[], None] | None = None) -> Rate:
    """The rate at which `work` does its `amount`: repeated for PROBE_SECONDS, three times at least, after a warm-up."""
    wait = synchronize or (lambda: None)
    work()
    wait()
    seconds, end = [], time.perf_counter() + PROBE_SECONDS
    while len(seconds) < LEAST_REPETITIONS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        wait()
        seconds.append(time.perf_counter() - start)
    best = min(seconds)
    return Rate(amount / best, statistics.median(seconds) / best - 1)


def last_level_cache_bytes() -> int:
    """The size of the CPU's largest cache, 32 MiB where the system does not tell."""
    sizes = [_cache_bytes(path.read_text().strip()) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(sizes, default=32 << 20)


def _cache_bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def _packed_dtypes() -> list[torch.dtype]:
    """The dtypes for which oneDNN has a prepacked linear here; empty in a build without oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return []
    ops = torch.ops.mkldnn
    return [torch.float32] + ([torch.bfloat16] if ops._is_mkldnn_bf16_supported() else [])


def _linear(weight_OI: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The fastest y = x @ w^T for this weight on the CPU."""
    if weight_OI.dtype not in _packed_dtypes():
        return lambda x: torch.nn.functional.linear(x, weight_OI)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def cpu_bandwidth() -> Rate:
    """Bytes per second of a streaming read with all threads of torch: the best of a reduction and matrix-vector products."""
    least, most = STREAM_BYTES
    total = min(max(least, 3 * last_level_cache_bytes() // 2), most)  # over the cache, so that none of it is still there
    best = _sum_bandwidth(total)
    for dtype in _packed_dtypes():
        rows = total // 4 // (4096 * dtype.itemsize)
        linears = [_linear(torch.full((rows, 4096), 0.01, dtype=dtype)) for _ in range(4)]
        x = torch.ones(1, 4096, dtype=dtype)
        read = 4 * rows * 4096 * dtype.itemsize
        best = max(best, rate_of(read, lambda f=linears, x=x: [linear(x) for linear in f]))
    return best


def _sum_bandwidth(total: int) -> Rate:
    values = torch.ones(total // 4)
    return rate_of(total, values.sum)


def cpu_flops(dtype: torch.dtype) -> Rate:
    """Floating point operations per second of a matrix product in `dtype` with all threads of torch."""
    linear = _linear(torch.full((GEMM_WIDTH, GEMM_WIDTH), 0.01, dtype=dtype))
    x = torch.ones(GEMM_TOKENS, GEMM_WIDTH, dtype=dtype)
    return rate_of(2 * GEMM_TOKENS * GEMM_WIDTH**2, lambda: linear(x))


def cuda_bandwidth() -> Rate:
    """Bytes per second of device memory: a copy, counted as read and written."""
    source = torch.ones(1 << 28, device="cuda")  # 1 GiB
    target = torch.empty_like(source)
    return rate_of(2 * source.numel() * source.itemsize, lambda: target.copy_(source), synchronize=torch.cuda.synchronize)


def cuda_flops(dtype: torch.dtype) -> Rate:
    """Floating point operations per second of a large matrix product on the GPU."""
    size = 8192
    a = torch.ones(size, size, dtype=dtype, device="cuda")
    b = torch.ones(size, size, dtype=dtype, device="cuda")
    return rate_of(2 * size**3, lambda: a @ b, synchronize=torch.cuda.synchronize)
