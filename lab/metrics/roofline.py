"""What a device allows at best, and the floors that follow for a model on it.

The device is measured once (some seconds) and remembered in the cache; a measurement that something else disturbed is made
again by the next run, until one was quiet. The floors are plain arithmetic on the model's shape.
Decoding reads every weight and the keys and values of each sequence once a step, so at small batches its floor is bytes over
bandwidth; from B_sat rows on the arithmetic takes longer than reading the weights.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from lab.cache import cache_dir
from lab.errors import UserError
from lab.metrics.quiet import CpuWatch, busy_now, disturbance, is_quiet

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
FORMAT_VERSION = 2  # of the remembered measurement


class ModelShape(Protocol):
    """The fields of a model's configuration that the floors follow from."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    layer_windows: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device's measured limits. `flops` is operations per second by dtype name."""

    name: str
    kind: str  # cpu | cuda
    threads: int
    memory_bytes: int
    bandwidth: float  # bytes per second of a streaming read
    flops: dict[str, float]
    measured: str  # when the bandwidth was, ISO 8601
    quiet: bool = True  # whether nothing disturbed the measurement; if something did, the limits may lie far too low
    busy_share: float | None = None  # of the processor's time that went elsewhere meanwhile; None where that is not known
    spread: float | None = None  # by which the median repetition was slower than the best one, of the probe where that is most
    last_bandwidth: float | None = None  # of the latest measurement, where an earlier one was faster and is kept
    last_measured: str | None = None  # when that was

    @property
    def disturbance(self) -> str | None:
        """What disturbed the measurement, in words; None when it was quiet."""
        if self.quiet:
            return None
        return disturbance(self.busy_share, self.spread) or "something disturbed the measurement"

    @property
    def shortfall(self) -> float:
        """Share of the bandwidth that the latest measurement did not find again; 0 unless an earlier one was faster."""
        return 0.0 if self.last_bandwidth is None else 1 - self.last_bandwidth / self.bandwidth


@dataclass(frozen=True, slots=True)
class Floors:
    """What no implementation of this model on this device can beat, batch 1 where not said otherwise."""

    weights_bytes: int  # of the whole model
    weights_read_bytes: int  # read by one decode step: the input embeddings are only looked up
    kv_bytes_per_token: int  # of all layers
    layer_windows: tuple[int | None, ...]  # tokens that a token of each layer sees, None: all
    flops_per_token: int  # of the linear layers, attention apart
    attention_flops_per_context_token: int  # more for each token that a new one attends to
    bandwidth: float
    peak_flops: float

    def step_s(self, num_tokens: int = 1, kv_tokens: float = 0) -> float:
        """The floor of one step: `num_tokens` new ones that read `kv_tokens` cached ones among them, in every layer."""
        read = (self.weights_read_bytes + kv_tokens * self.kv_bytes_per_token) / self.bandwidth
        compute = (num_tokens * self.flops_per_token + kv_tokens * self.attention_flops_per_context_token) / self.peak_flops
        return max(read, compute)

    def seen(self, context: int) -> float:
        """How many of `context` tokens are kept and read, on the average over the layers."""
        return sum(min(context, window or context) for window in self.layer_windows) / len(self.layer_windows)

    def decode_ms(self, context: int = 0) -> float:
        """The floor of one decode step at batch 1 with `context` cached tokens."""
        return self.step_s(1, self.seen(context)) * 1e3

    @property
    def tokens_per_s(self) -> float:
        """The most tokens a second that one sequence can get."""
        return 1e3 / self.decode_ms()

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which work on this device is bound by arithmetic."""
        return self.peak_flops / self.bandwidth

    @property
    def batch_saturation(self) -> float:
        """B_sat: rows in a decode step from which on arithmetic takes longer than reading the weights."""
        return (self.weights_read_bytes / self.bandwidth) / (self.flops_per_token / self.peak_flops)

    def max_concurrency(self, tokens: int, memory_bytes: int) -> float:
        """How many sequences of `tokens` tokens fit beside the weights in `memory_bytes`."""
        return max(memory_bytes - self.weights_bytes, 0) / (self.kv_bytes_per_token * self.seen(tokens))


def floors(model: ModelShape, dtype: str, facts: DeviceFacts, kv_dtype: str | None = None) -> Floors:
    """The floors of a dense decoder with gated MLP in `dtype` (float32, bfloat16, float16), keys and values in `kv_dtype`.

    Raises UserError when the device's arithmetic rate in `dtype` was not measured.
    """
    if dtype not in facts.flops:
        raise UserError(f"roofline: {facts.name} was not measured in {dtype}.\nAvailable: {', '.join(facts.flops)}.")
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)  # q and o, k and v
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    embedding = model.vocab_size * model.hidden_size
    norms = (2 * model.num_layers + 1) * model.hidden_size
    read = model.num_layers * layer + embedding + norms
    stored = read if model.tie_word_embeddings else read + embedding
    return Floors(
        weights_bytes=stored * BYTES[dtype],
        weights_read_bytes=read * BYTES[dtype],
        kv_bytes_per_token=2 * model.num_layers * model.num_kv_heads * model.head_dim * BYTES[kv_dtype or dtype],
        layer_windows=tuple(model.layer_windows),
        flops_per_token=2 * (model.num_layers * layer + embedding),
        attention_flops_per_context_token=4 * model.num_layers * model.num_heads * model.head_dim,
        bandwidth=facts.bandwidth,
        peak_flops=facts.flops[dtype],
    )


def usable_cores() -> int:
    """The cores that this process may use: as many threads as a run takes by default, whatever OMP_NUM_THREADS says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def known_device(kind: str = "cpu", threads: int | None = None) -> DeviceFacts | None:
    """The remembered measurement of this machine's device, None where there is none to be had."""
    path = _facts_path(kind, threads)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return DeviceFacts(**data["facts"]) if data["version"] == FORMAT_VERSION else None
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, KeyError, TypeError):
        path.unlink(missing_ok=True)  # not ours, or half written by something else: measure again
        return None


def measure_device(
    kind: str = "cpu", *, threads: int | None = None, again: bool = False, log: Callable[[str], None] | None = None
) -> DeviceFacts:
    """The device's limits: remembered ones, or measured now in some seconds and then remembered.

    Args:
        kind: cpu or cuda.
        threads: that torch computes with; by default as many as a run takes, one for each usable core.
        again: measure even if there is a quiet measurement, and keep the higher of both, as always. Without it one that
            was disturbed is made again too, unless a short look finds the machine busy still.
        log: told before a measurement starts, and when it was disturbed.
    """
    say = log or (lambda text: None)
    threads = threads or usable_cores()
    known = known_device(kind, threads)
    if known is not None and not again and (known.quiet or busy_now()):
        return known
    if known is None or again:
        say(f"Measuring the {kind} device once (some seconds): memory bandwidth and peak arithmetic rate.")
    else:
        say(f"Measuring the {kind} device again (some seconds): {known.disturbance} when it was measured, {known.measured}.")
    facts = _measure_apart(kind, threads)
    if not facts.quiet:
        advice = "it may be far too low; the next run on an idle machine measures again, `lab roofline --measure` at once"
        say(f"While the {kind} device was measured {facts.disturbance}: {advice}.")
    if known is not None:
        facts = _higher(facts, known)
    if facts.last_bandwidth is not None:
        now, best = facts.last_bandwidth / 1e9, facts.bandwidth / 1e9
        say(f"Memory bandwidth was {now:.1f} GB/s now; the {best:.1f} GB/s measured {facts.measured} are kept as the limit.")
    _remember(_facts_path(kind, threads), facts)
    return facts


def _higher(facts: DeviceFacts, known: DeviceFacts) -> DeviceFacts:
    """The higher rates of two measurements, for a disturbed one only ever reads too low; as quiet as the quieter one.

    Where the bandwidth is that of the earlier measurement, its date is too, and what the later one found is noted.
    """
    best = {name: max(rate, known.flops.get(name, 0.0)) for name, rate in facts.flops.items()}
    base = known if known.quiet and not facts.quiet else facts
    if facts.bandwidth >= known.bandwidth:
        faster, last = facts, (None, None)
    else:
        faster, last = known, (facts.bandwidth, facts.measured)
    return replace(
        base,
        bandwidth=faster.bandwidth,
        measured=faster.measured,
        flops=best,
        last_bandwidth=last[0],
        last_measured=last[1],
    )


def _measure_apart(kind: str, threads: int) -> DeviceFacts:
    """Measure in a process of its own, so that the buffers of the probes do not count in this one's peak memory."""
    command = [sys.executable, "-m", "lab.metrics.roofline", kind, str(threads)]
    root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    if done.returncode:
        raise RuntimeError(f"measuring the {kind} device failed:\n{done.stderr}")
    return DeviceFacts(**json.loads(done.stdout))


def _measure(kind: str, threads: int) -> DeviceFacts:
    """Measure in this process. The bandwidth, which most floors hang on, is measured at the beginning and at the end."""
    import torch

    from lab.metrics import probes

    torch.set_num_threads(threads)
    cuda = kind == "cuda"
    bandwidth, flops = (probes.cuda_bandwidth, probes.cuda_flops) if cuda else (probes.cpu_bandwidth, probes.cpu_flops)
    watch = CpuWatch()
    with torch.inference_mode():
        first = bandwidth()
        rates = {name: flops(getattr(torch, name)) for name in probes.DTYPES}
        best = max(first, bandwidth())
    busy_share = None if cuda else watch.busy_share()  # a GPU does not mind
    spread = max(best.spread, *(rate.spread for rate in rates.values()))
    return DeviceFacts(
        name=device_name(kind),
        kind=kind,
        threads=threads,
        memory_bytes=torch.cuda.get_device_properties(0).total_memory if cuda else total_memory_bytes(),
        bandwidth=best.best,
        flops={name: rate.best for name, rate in rates.items()},
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        quiet=is_quiet(busy_share, spread),
        busy_share=busy_share,
        spread=spread,
    )


def _facts_path(kind: str, threads: int | None = None) -> Path:
    """Where this machine's measurement is kept: a change of device, cores, threads or torch asks for a new one."""
    import torch

    parts = (device_name(kind), kind, os.cpu_count(), threads or usable_cores(), torch.__version__)
    key = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    return cache_dir("device") / f"{key}.json"


def _remember(path: Path, facts: DeviceFacts) -> None:
    """Write whole or not at all: another process may read or write the same file."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"version": FORMAT_VERSION, "facts": asdict(facts)}, file, indent=2)
    Path(name).replace(path)


def device_name(kind: str) -> str:
    """The model of the CPU or GPU, as the system names it."""
    if kind == "cuda":
        import torch

        return torch.cuda.get_device_properties(0).name
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def total_memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(sys.argv[1], int(sys.argv[2])))))
