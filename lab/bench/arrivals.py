"""When the requests of a workload arrive: open loop, so the times never depend on how fast the engine is. Torch-free."""

import math
import random
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

from lab.contracts.workload import WorkItem
from lab.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """The options that every workload of requests in time shares.

    `file` keeps the arrival_s of the workload's file (0 where a line has none). The first request arrives at 0, each
    next one after a gap: constant with `fixed`, exponential with `poisson`, gamma distributed with `gamma`, where a
    burstiness of 1 is a Poisson process, less is burstier and more is steadier.
    """

    arrival: Literal["file", "at_once", "fixed", "poisson", "gamma"] = "file"
    rate: float | None = None  # requests per second, for fixed, poisson and gamma
    burstiness: float = 1.0  # shape of the gamma distribution; the coefficient of variation is 1 / sqrt(burstiness)

    def __post_init__(self) -> None:
        if self.arrival in ("fixed", "poisson", "gamma"):
            if self.rate is None:
                raise UserError(f"workload.arrival={self.arrival} needs workload.rate, in requests per second.")
            if not 0 < self.rate < float("inf"):
                raise UserError(f"workload.rate must be over 0 requests per second, got {self.rate:g}.")
        elif self.rate is not None:
            raise UserError(f"workload.rate has no meaning with workload.arrival={self.arrival}; use fixed, poisson or gamma.")
        if not 0 < self.burstiness < float("inf"):
            raise UserError(f"workload.burstiness must be over 0, got {self.burstiness:g}.")
        if self.burstiness != 1.0 and self.arrival != "gamma":
            raise UserError(f"workload.burstiness has no meaning with workload.arrival={self.arrival}; use gamma.")


def arrival_times(options: ArrivalOptions, count: int, seed: int) -> list[float]:
    """`count` times in seconds from the start of the run, ascending; the same seed gives the same times."""
    if options.arrival in ("file", "at_once"):
        return [0.0] * count
    rng = random.Random(f"arrivals {seed}")
    mean_s = 1.0 / options.rate
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        if options.arrival == "fixed":
            now = len(times) * mean_s
        elif options.arrival == "poisson":
            now += rng.expovariate(options.rate)
        else:
            now += rng.gammavariate(options.burstiness, mean_s / options.burstiness)
    return times


def arrange(items: list[WorkItem], options: ArrivalOptions, seed: int) -> list[WorkItem]:
    """The items with their arrival times set, in order of arrival (items of one time stay in their order)."""
    if options.arrival != "file":
        times = arrival_times(options, len(items), seed)
        return [replace(item, arrival_s=time) for item, time in zip(items, times, strict=True)]
    return sorted(items, key=lambda item: item.arrival_s)


def checked_items(items: Any, name: str) -> list[WorkItem]:
    """What the workload plugin `name` made, held to its contract. Raises UserError naming the plugin and the request."""
    if not isinstance(items, list):
        raise UserError(f"workload '{name}' must make a list of requests, got {type(items).__name__}.")
    if not items:
        raise UserError(f"workload '{name}' made no requests: its list is empty.")
    before_s = 0.0
    for number, item in enumerate(items):
        if not isinstance(item, WorkItem):
            raise UserError(f"workload '{name}': request {number} must be a WorkItem, got {type(item).__name__}.")
        at_s = item.arrival_s
        if not isinstance(at_s, Real) or isinstance(at_s, bool) or not math.isfinite(at_s) or at_s < 0:
            raise UserError(f"workload '{name}': arrival_s of request {number} must be a time from 0 on, got {at_s!r}.")
        if at_s < before_s:
            raise UserError(
                f"workload '{name}': request {number} arrives at {at_s:g} s, before request {number - 1} ({before_s:g} s): "
                "a workload's requests must be in order of arrival."
            )
        before_s = at_s
    return items
