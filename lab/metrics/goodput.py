"""Goodput: whether a request met every latency limit that was asked for (the setting `goodput`). Torch-free."""

from collections.abc import Mapping
from typing import Any


def is_good(record: Mapping[str, Any], limits_ms: Mapping[str, float]) -> bool:
    """Whether a request ended well and kept every limit; equal counts as kept.

    Args:
        record: its line of requests.jsonl.
        limits_ms: by the name of a latency (ttft, tpot, e2e, ...). One that the request does not have, such as the TPOT of a
            single token, does not apply.
    """
    if record.get("error") or record["finish_reason"] not in ("stop", "length"):
        return False
    values = {name: record.get(f"{name}_ms") for name in limits_ms}
    return all(value is None or value <= limits_ms[name] for name, value in values.items())
