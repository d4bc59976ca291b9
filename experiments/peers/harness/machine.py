"""Is the CPU ours? What else runs is the largest error of these measurements, so it is waited out, and counted."""

import os
import time
from collections.abc import Callable

from harness.protocol import process_tree, stat_fields
from lab.metrics.quiet import busy_s

WINDOW_S = 0.4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s_of(root: int) -> float:
    """CPU seconds of a process, its living descendants, and its children that have ended and been waited for."""
    total = 0
    for pid in process_tree(root):
        if fields := stat_fields(pid):
            total += sum(int(ticks) for ticks in fields[11:15])  # utime, stime, cutime, cstime
    return total / _TICKS_PER_S


def busy_share(window_s: float = WINDOW_S) -> float:
    """The share of all cores' time that is in use, looked at for a moment."""
    before, begin = busy_s(), time.monotonic()
    time.sleep(window_s)
    return (busy_s() - before) / ((time.monotonic() - begin) * (os.cpu_count() or 1))


def wait_until_quiet(limit: float, timeout_s: float, log: Callable[[str], None]) -> bool:
    """Wait until no more than `limit` of the CPU is in use. False when it stayed busy for `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    said = False
    while (share := busy_share()) > limit:
        if time.monotonic() > deadline:
            return False
        if not said:
            log(f"    waiting for a quiet CPU: {share:.0%} in use")
            said = True
    return True


class OthersWatch:
    """How much CPU other processes took while a peer was measured, as a share of all cores over that time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begin = time.monotonic()
        self._busy = busy_s()
        self._own = cpu_s_of(pid)

    def share(self) -> float:
        others = (busy_s() - self._busy) - (cpu_s_of(self._pid) - self._own)
        capacity = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        return max(others, 0.0) / capacity
