"""What this machine has, found without importing torch."""

import os
import sys
from pathlib import Path

from lab.capabilities import Needs, unmet
from lab.registry import BrokenPlugin, Entry

CGROUP = Path("/sys/fs/cgroup")
DEV = Path("/dev")
GPUS = ("nvidia[0-9]*", "dxg", "nvgpu", "nvhost-gpu")  # files of their drivers: Linux, below Windows, on boards of NVIDIA's


def devices() -> list[str]:
    """The kinds of device that are present, `cpu` always."""
    return ["cpu", *(["cuda"] if any(any(DEV.glob(name)) for name in GPUS) else [])]


def unusable(entry: Entry) -> list[str]:
    """Why a plugin cannot be used on this machine at all; what else a run needs is not asked here."""
    if entry.broken:
        return [f"broken: {entry.broken.strip().splitlines()[-1]}"]
    try:
        capabilities = entry.capabilities
        if entry.source != "built-in":
            entry.load()
    except BrokenPlugin as error:
        return [f"broken: {str(error).strip().splitlines()[-1]}"]
    reasons = [unmet(capabilities, Needs(device=device)) for device in devices()]
    return min(reasons, key=len)


def usable_cores() -> int:
    """Cores that this process may use; the quota of a container counts."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def memory_bytes() -> tuple[int, int | None]:
    """The machine's memory, and the limit of the container (version 1 or 2 of cgroups) where there is one."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):
        text = _read(file).strip()
        if text.isdecimal() and int(text) < total:
            return total, int(text)
    return total, None


def folder_bytes(folder: Path) -> int:
    """The size of all files below a folder; 0 when there is none."""
    return sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
