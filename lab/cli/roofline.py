"""`lab roofline`: what no implementation of a model on this machine's device can beat."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from lab import registry
from lab.cli.arguments import Arguments
from lab.cli.machine import devices, memory_bytes
from lab.cli.table import in_bytes, print_table
from lab.config import compose
from lab.metrics.roofline import DeviceFacts, Floors, floors, measure_device
from lab.model.config import ModelConfig, read_config
from lab.settings import Settings


def roofline(arguments: Arguments) -> int:
    """Print the floors, measuring the device first where that has not been done."""
    registry.discover(arguments.plugins)
    settings = compose(arguments.overrides, arguments.config_dirs)
    config = read_config(_folder(settings.model.path))
    dtype = config.torch_dtype if settings.model.dtype == "auto" else settings.model.dtype
    kv_dtype = dtype if settings.cache.dtype == "auto" else settings.cache.dtype
    device = devices()[-1] if settings.device == "auto" else settings.device
    facts = measure_device(
        device,
        threads=settings.num_threads,
        again=arguments.measure,
        log=lambda text: print(text, file=sys.stderr),
    )
    record = _record(settings, config, dtype, facts, floors(config, dtype, facts, kv_dtype))
    if arguments.json:
        print(json.dumps(record))
    else:
        _print(record, facts)
    return 0


def _folder(path: str) -> Path:
    """A folder with a config.json is all that is needed; anything else is found as a run would find it."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return importlib.import_module("lab.model.source").resolve_model(path)


def _record(settings: Settings, config: ModelConfig, dtype: str, facts: DeviceFacts, floor: Floors) -> dict[str, Any]:
    length = settings.model.max_model_len or config.max_position_embeddings
    memory = settings.cache.memory_bytes
    if memory is None:
        total, limit = memory_bytes() if facts.kind == "cpu" else (facts.memory_bytes, None)
        memory = int(min(total, limit or total) * settings.cache.memory_utilization)
    else:
        memory += floor.weights_bytes  # the setting is the cache's own share
    return {
        "model": settings.model.path,
        "dtype": dtype,
        "device": facts.name,
        "threads": facts.threads,
        "measured": facts.measured,
        "quiet": facts.quiet,
        "busy_share": facts.busy_share,
        "spread": facts.spread,
        "bandwidth_gb_s": facts.bandwidth / 1e9,
        "last_bandwidth_gb_s": None if facts.last_bandwidth is None else facts.last_bandwidth / 1e9,
        "peak_gflop_s": floor.peak_flops / 1e9,
        "ridge_flop_per_byte": floor.ridge,
        "weights_bytes": floor.weights_bytes,
        "kv_bytes_per_token": floor.kv_bytes_per_token,
        "flops_per_token": floor.flops_per_token,
        "decode_floor_ms": floor.decode_ms(),
        "decode_floor_ms_at_max_len": floor.decode_ms(length),
        "decode_tok_per_s": floor.tokens_per_s,
        "batch_saturation": floor.batch_saturation,
        "max_model_len": length,
        "memory_bytes": memory,
        "max_concurrency": floor.max_concurrency(length, memory),
    }


def _bandwidth(facts: DeviceFacts) -> str:
    text = f"{facts.bandwidth / 1e9:.1f} GB/s, measured {facts.measured}"
    if facts.last_bandwidth is None:
        return text
    return f"{text}; only {facts.last_bandwidth / 1e9:.1f} GB/s when last measured, {facts.last_measured}"


def _quality(facts: DeviceFacts) -> str:
    """How far the measurement can be trusted."""
    if facts.disturbance is not None:
        return f"disturbed, the limits may be far too low: {facts.disturbance}"
    busy = "" if facts.busy_share is None else f"; {facts.busy_share:.0%} of the processor time went elsewhere"
    spread = "" if facts.spread is None else f"; the median repetition was {facts.spread:.0%} slower than the best"
    return f"quiet{busy}{spread}"


def _print(record: dict[str, Any], facts: DeviceFacts) -> None:
    length = record["max_model_len"]
    rows = (
        ("memory bandwidth", _bandwidth(facts)),
        ("the measurement", _quality(facts)),
        ("peak arithmetic", f"{record['peak_gflop_s']:.0f} GFLOP/s in {record['dtype']}"),
        ("ridge", f"{record['ridge_flop_per_byte']:.1f} FLOP per byte: above it arithmetic is the limit"),
        ("weights", in_bytes(record["weights_bytes"])),
        ("KV cache", f"{in_bytes(record['kv_bytes_per_token'])} per token"),
        ("work", f"{record['flops_per_token'] / 1e9:.3f} GFLOP per token, attention apart"),
        (
            "decode step, batch 1",
            f"{record['decode_floor_ms']:.3f} ms at least, {record['decode_tok_per_s']:.0f} tokens/s at most",
        ),
        (f"  at {length:,} tokens", f"{record['decode_floor_ms_at_max_len']:.3f} ms at least"),
        ("B_sat", f"{record['batch_saturation']:.1f} rows: from there arithmetic takes longer than reading the weights"),
        (
            "concurrency",
            f"{record['max_concurrency']:.1f} x {length:,} tokens in {in_bytes(record['memory_bytes'])}, weights included",
        ),
    )
    print_table(
        ("floor", "value"), rows, f"{record['model']} in {record['dtype']} on {record['device']}, {facts.threads} threads"
    )
