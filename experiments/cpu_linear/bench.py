"""Linear layers on the CPU: own kernels against torch.nn.functional.linear and oneDNN's prepacked weights.

Each shape of a SmolLM2-135M decode step has as many weights as the model has layers, used in turn as in a step, so that none
is found in a core's own cache. The kernels take turns, call by call; of each weight's times the least is kept, and these are
added up: other processes on the machine then cost little as long as some calls of each weight run undisturbed. The share of
the machine that others used meanwhile is printed.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from plugins.quant import _cpu_linear  # noqa: E402

REST_S = 0.02  # between two kernels: OpenMP's threads wait for more work at full speed, on a core that the next one needs
SHAPES = {  # (outputs, inputs, layers)
    "qkv": (960, 576, 30),
    "o": (576, 576, 30),
    "gate_up": (3072, 576, 30),
    "down": (576, 1536, 30),
    "lm_head": (49152, 576, 1),
}
NEVER = 1 << 30
FROM_ROWS = {"vectors": (NEVER, NEVER), "floats": (NEVER, 1), "tiles": (1, NEVER)}  # tiles, and products of floats


def kernels(weights: list[torch.Tensor], x: torch.Tensor, chosen: list[str]) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """A call for each weight, by the name of the kernel. `lab` is what the plugin does, the others of ours force a path."""
    outputs = weights[0].shape[0]
    blocks = [_cpu_linear.pack(w) for w in weights]
    onednn = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in weights]
    calls = {
        "linear": [lambda w=w: functional.linear(x, w) for w in weights],
        "onednn": [lambda p=p: torch.ops.mkldnn._linear_pointwise(x, p, None, "none", [], "") for p in onednn],
        **{name: [lambda b=b: _cpu_linear.linear(x, b, outputs) for b in blocks] for name in ("lab", *FROM_ROWS)},
    }
    return {name: calls[name] for name in chosen}


def measure(calls: dict[str, list[Callable[[], torch.Tensor]]], seconds: float) -> dict[str, float]:
    """Seconds for all weights once, by kernel: the sum of each weight's least time."""
    least = {name: [float("inf")] * len(of) for name, of in calls.items()}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, of in calls.items():
            before = take_from(*FROM_ROWS.get(name, _default_from_rows))
            time.sleep(REST_S)
            for i, call in enumerate(of):
                start = time.perf_counter()
                call()
                least[name][i] = min(least[name][i], time.perf_counter() - start)
            take_from(*before)
    return {name: sum(times) for name, times in least.items()}


def take_from(tiles: int, floats: int) -> tuple[int, int]:
    """From how many rows on our kernels take tiles, and products of floats. Returns what it was."""
    return torch.ops.lab_linear.set_amx_from_rows(tiles), torch.ops.lab_linear.set_floats_from_rows(floats)


def cpu_seconds() -> tuple[float, float]:
    """Busy seconds of the whole machine, and of this process."""
    fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100, time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape and number of rows")
    parser.add_argument("--kernels", default="linear,onednn,lab")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    dtype, chosen = getattr(torch, options.dtype), options.kernels.split(",")
    weights = {name: [torch.randn(o, i).to(dtype) for _ in range(n)] for name, (o, i, n) in SHAPES.items()}
    (busy, own), begun = cpu_seconds(), time.monotonic()
    print(f"{options.dtype}, {options.threads} threads; microseconds a call (GB/s of weights)\n")
    print("| rows | layer | " + " | ".join(chosen) + " | lab is faster than oneDNN by |")
    print("|" + "---|" * (len(chosen) + 3))
    for rows in map(int, options.rows.split(",")):
        step = dict.fromkeys(chosen, 0.0)
        for name, (outputs, inputs, layers) in SHAPES.items():
            x = torch.randn(rows, inputs).to(dtype)
            found = measure(kernels(weights[name], x, chosen), options.seconds)
            num_bytes = outputs * inputs * layers * dtype.itemsize
            cells = [f"{t / layers * 1e6:.1f} ({num_bytes / t / 1e9:.1f})" for t in found.values()]
            print(f"| {rows} | {name} | " + " | ".join(cells) + f" | {_ratio(found)} |", flush=True)
            step = {kernel: step[kernel] + t for kernel, t in found.items()}
        cells = [f"**{t * 1e3:.2f} ms**" for t in step.values()]
        print(f"| {rows} | all of a step | " + " | ".join(cells) + f" | {_ratio(step)} |", flush=True)
    now_busy, now_own = cpu_seconds()
    others = (now_busy - busy - (now_own - own)) / (time.monotonic() - begun)
    print(f"\nMeanwhile other processes kept {others:.1f} of the machine's cores busy.")


def _ratio(found: dict[str, float]) -> str:
    return f"{found['onednn'] / found['lab']:.2f}x" if {"onednn", "lab"} <= found.keys() else ""


if __name__ == "__main__":
    if not _cpu_linear.ready():
        sys.exit("the kernels cannot be built here")
    _default_from_rows = take_from(NEVER, NEVER)
    take_from(*_default_from_rows)
    main()
