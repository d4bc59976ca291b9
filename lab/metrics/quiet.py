"""Whether a measurement was disturbed: what else kept the processor busy, and how far its repetitions lie apart. Torch-free."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MOST_BUSY = 0.10  # share of the processor's time that may go elsewhere while the device is measured
MOST_OF_OTHERS = 0.05  # and while a run is: beyond it its times are marked
SHORTEST_WATCH_S = 0.5  # below it the clock's ticks are too coarse to tell
MOST_SPREAD = 0.30  # by which the median repetition may be slower than the best one

_STAT = Path("/proc/stat")
_IDLE = slice(3, 5)  # idle, iowait
_COUNTED = slice(0, 8)  # user to steal; the guest fields that follow are counted in user already


def is_quiet(busy_share: float | None, spread: float) -> bool:
    """Whether a measurement may count as undisturbed. `busy_share` is None where the system does not tell."""
    return disturbance(busy_share, spread) is None


def disturbance(busy_share: float | None, spread: float | None) -> str | None:
    """What disturbed a measurement, with its figure; None when nothing did. Either figure is None where it is not known."""
    found = []
    if busy_share is not None and busy_share > MOST_BUSY:
        found.append(f"the machine was busy ({busy_share:.0%} of its processor time went elsewhere)")
    if spread is not None and spread > MOST_SPREAD:
        found.append(f"the machine's speed varied (half of the repetitions were {spread:.0%} or more slower than the best)")
    return " and ".join(found) or None


def taken_by_others(metrics: Mapping[str, Any]) -> str | None:
    """The share of the CPU that others took during a run, by its metrics.json, where it is enough to spoil the run's times."""
    share = metrics.get("others_cpu_share")
    return f"{share:.0%}" if share is not None and share > MOST_OF_OTHERS else None


class CpuWatch:
    """Counts from its making on how much of the machine's processor time goes to anything but this process."""

    def __init__(self) -> None:
        self._busy_s, self._own_s, self._start_s = busy_s(), _own_s(), time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start_s

    def busy_share(self) -> float | None:
        """The share, from 0 to 1, of all cores' time; None where the system does not tell."""
        seconds, busy_now_s = self.seconds, busy_s()
        if busy_now_s is None or self._busy_s is None or not seconds:
            return None
        others_s = (busy_now_s - self._busy_s) - (_own_s() - self._own_s)
        return min(max(others_s / (seconds * (os.cpu_count() or 1)), 0.0), 1.0)


def busy_now(seconds: float = 0.3) -> bool:
    """A short look: whether others keep the processor busy at this moment."""
    watch = CpuWatch()
    time.sleep(seconds)
    return not is_quiet(watch.busy_share(), 0.0)


def _own_s() -> float:
    times = os.times()
    return times.user + times.system


def busy_s() -> float | None:
    """Seconds that all cores together were busy, or taken by the host, since the start; None where the system does not tell."""
    try:
        line = _STAT.read_text(encoding="ascii").partition("\n")[0]
    except OSError:
        return None
    ticks = [int(count) for count in line.split()[1:]]
    counted = sum(ticks[_COUNTED])
    return (counted - sum(ticks[_IDLE])) / os.sysconf("SC_CLK_TCK") if counted else None
