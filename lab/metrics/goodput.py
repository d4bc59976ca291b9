"""Goodput: how many requests a second met every latency limit that was asked for. Torch-free."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from lab.errors import UserError, nearest

# limit -> the field of a request record that it bounds; an ITL limit is on the request's worst gap
LIMITS = {
    "ttft": "ttft_ms",
    "itl": "itl_ms",
    "tpot": "tpot_ms",
    "e2e": "e2e_ms",
    "queue": "queue_ms",
    "prefill": "prefill_ms",
    "decode": "decode_ms",
}


def check_limits(limits: Mapping[str, Any]) -> dict[str, float]:
    """The limits in ms, checked. Raises UserError naming the wrong key or value."""
    checked = {}
    for key, value in limits.items():
        if key not in LIMITS:
            guess = nearest(str(key), LIMITS)
            hint = f" Did you mean '{guess}'?" if guess else ""
            raise UserError(f"goodput: no latency named '{key}'.{hint}\nAvailable: {', '.join(LIMITS)} (limits in ms).")
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise UserError(f"goodput: {key} must be a number of milliseconds over 0, got {value!r}.")
        checked[key] = float(value)
    return checked


def is_good(record: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether a request that ended well kept every limit; equal counts as kept.

    A latency that the request does not have (TPOT and ITL of a single token) does not apply.
    """
    if record.get("error") or not record.get("output_token_ids"):
        return False
    for key, limit in limits.items():
        value = record.get(LIMITS[key])
        worst = max(value, default=None) if isinstance(value, list) else value
        if worst is not None and worst > limit:
            return False
    return True
