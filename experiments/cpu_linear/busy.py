"""What another process on one of the cores costs the linear layers of a decode step.

    python experiments/cpu_linear/busy.py [--rows 1,64] [--threads 2] [--seconds 3]

`linear` is torch.nn.functional.linear, whose threads meet at the end of every product; lab's take work from one another. Each
contestant runs in turn for some seconds, first beside nothing, then beside a process that computes all the time. The median
of all passes through the layers is told, and how many times slower the other process made it.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from bench import SHAPES, kernels

from plugins.quant import _cpu_linear

COMPETITOR = "while True: pass"


def passes(layers: list[Callable[[], torch.Tensor]], seconds: float) -> float:
    """The median time of a pass through the layers, in ms."""
    times, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begin = time.perf_counter()
        for call in layers:
            call()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rows", default="1,64")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    weights = {name: [torch.randn(o, i).bfloat16() for _ in range(n)] for name, (o, i, n) in SHAPES.items()}
    print("| rows | kernel | alone, ms | beside another process, ms | times slower |\n|---|---|---|---|---|")
    for rows in map(int, options.rows.split(",")):
        inputs = {name: torch.randn(rows, size).bfloat16() for name, (_, size, _) in SHAPES.items()}
        made = [kernels(weights[name], inputs[name], ["linear", "lab"]) for name in SHAPES]
        for kernel in ("linear", "lab"):
            layers = [call for calls in made for call in calls[kernel]]
            passes(layers, 0.3)
            alone = passes(layers, options.seconds)
            competitor = subprocess.Popen([sys.executable, "-c", COMPETITOR])
            try:
                beside = passes(layers, options.seconds)
            finally:
                competitor.kill()
                competitor.wait()
            print(f"| {rows} | {kernel} | {alone:.1f} | {beside:.1f} | {beside / alone:.1f} |", flush=True)


if __name__ == "__main__":
    if not _cpu_linear.ready():
        sys.exit("the kernels cannot be built here")
    main()
