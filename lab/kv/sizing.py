"""How many blocks the KV pool may have: from what the device or the machine really has free."""

import logging
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from lab.errors import UserError
from lab.settings import CacheSettings

log = logging.getLogger("lab")

CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30


def machine_memory() -> tuple[int, int]:
    """(total, free) bytes of the machine, or of the control group that limits this process, whichever is tighter."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = _group_limit()
    if limit is not None and limit < total:
        return limit, max(min(free, limit - used), 0)
    return total, free


def _group_limit() -> tuple[int | None, int]:
    """Limit and use of this process's control group (version 2, then 1); no limit is None."""
    for limit_file, used_file in (
        (CGROUP / "memory.max", CGROUP / "memory.current"),
        (CGROUP / "memory/memory.limit_in_bytes", CGROUP / "memory/memory.usage_in_bytes"),
    ):
        if limit_file.exists() and used_file.exists():
            text = limit_file.read_text().strip()
            if text != "max":
                return int(text), int(used_file.read_text())
    return None, 0


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free) bytes where the KV pool will live."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total, free
    return machine_memory()


def peak_bytes_of(run: Callable[[], None], device: torch.device) -> int:
    """Bytes that `run` needs at its peak over what is held before it.

    On the CPU the resident set is sampled while it runs: the process's own high-water mark would hide every peak below that
    of loading the weights.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        torch.cuda.empty_cache()
        return peak
    before = resident_bytes()
    done = threading.Event()
    highest = before

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, resident_bytes())

    watcher = threading.Thread(target=watch, name="lab-memory-watch")
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return max(highest, resident_bytes()) - before


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def num_blocks_for(
    settings: CacheSettings,
    block_bytes: int,
    device: torch.device,
    profile: Callable[[], None],
    graph_bytes: Callable[[], int] = lambda: 0,
) -> int:
    """The size of the pool in blocks: as set, from the bytes set, or measured.

    Measured: memory_utilization of the total, less all that is in use now (weights included), the peak of a profiling step
    of the largest size, and what captured graphs will take.

    Raises:
        UserError: not even one block fits, with the figures.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.memory_bytes is not None:
        return _at_least_one(settings.memory_bytes // block_bytes, f"cache.memory_bytes={settings.memory_bytes}", block_bytes)
    step_bytes = peak_bytes_of(profile, device) + graph_bytes()
    total, free = device_memory(device)
    used = total - free
    budget = int(total * settings.memory_utilization) - used - step_bytes
    log.info(
        "memory of the %s: %.1f GiB, of which %.1f are in use, weights included, and a full step needs %.2f; "
        "cache.memory_utilization=%g leaves %.1f GiB for the KV cache",
        "machine" if device.type == "cpu" else "GPU",
        total / GIB,
        used / GIB,
        step_bytes / GIB,
        settings.memory_utilization,
        max(budget, 0) / GIB,
    )
    return _at_least_one(budget // block_bytes, f"cache.memory_utilization={settings.memory_utilization:g}", block_bytes)


def _at_least_one(num_blocks: int, setting: str, block_bytes: int) -> int:
    if num_blocks < 1:
        raise UserError(
            f"{setting} leaves no room for the KV cache: one block takes {block_bytes} bytes. "
            "Raise it, or lower scheduler.max_num_batched_tokens or model.dtype."
        )
    return num_blocks
