"""Decode attention of `flash` on the CPU over quantized caches, against bfloat16: calls that take turns, best of each."""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from lab import registry
from lab.contracts.attention import Attention, AttentionSpec
from lab.kv.store import KVStore, bytes_per_block
from lab.runner.batch import BatchBuilder, Share
from lab.runner.rows import Rows

HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16  # SmolLM2-135M
CPU = torch.device("cpu")
CACHES = {
    "bfloat16": (torch.bfloat16, "none"),
    "int8 token_head": (torch.int8, "token_head"),
    "int8 head": (torch.int8, "head"),
    "fp8 token_head": (torch.float8_e4m3fn, "token_head"),
    "fp8 head": (torch.float8_e4m3fn, "head"),
}
WORK = {  # rows of (tokens before, tokens of the step)
    "decode, 1 row, context 4,096": [(4095, 1)],
    "decode, 16 rows, context 1,024": [(1023, 1)] * 16,
    "decode, 16 rows, context 4,096": [(4095, 1)] * 16,
    "decode, 64 rows, context 128": [(127, 1)] * 64,
    "decode, 64 rows, context 1,024": [(1023, 1)] * 64,
    "prefill, 512 tokens": [(0, 512)],
    "prefill, 512 tokens after 1,536": [(1536, 512)],
}
POOL_BYTES = 1 << 28  # of bfloat16: layers are as many as make the caches larger than the processor's


def backend_of(name: str, cache: tuple[torch.dtype, str], isa: str) -> Attention:
    entry = registry.get("attention", name)
    spec = AttentionSpec(
        HEADS, KV_HEADS, DIM, DIM**-0.5, BLOCK, torch.bfloat16, kv_dtype=cache[0], device=CPU, kv_scales=cache[1]
    )
    return entry.load()(entry.make_options({"isa": isa} if "isa" in entry.option_names else {}), spec)


def stepper(backend: Attention, rows: list[tuple[int, int]]) -> Callable[[], None]:
    """Writes the step's tokens into one layer's cache and attends; each call takes the next layer."""
    per_row = -(-max(before + count for before, count in rows) // BLOCK)
    num_blocks = len(rows) * per_row
    table = Rows(len(rows), per_row * BLOCK, BLOCK)
    table.blocks_RM[:] = np.random.default_rng(0).permutation(num_blocks).reshape(len(rows), per_row)
    batch = BatchBuilder(table, BLOCK, CPU).build(
        [Share(row, before, count, 0, True) for row, (before, count) in enumerate(rows)]
    )
    layers = max(1, min(30, POOL_BYTES // (num_blocks * BLOCK * KV_HEADS * DIM * 4)))
    scales = [torch.full((2, KV_HEADS), 4.0 / 127)] * layers if backend.spec.kv_scales == "head" else []
    caches = KVStore([backend] * layers, num_blocks, scales).layers
    for kv in caches:
        backend.load_blocks(kv, torch.arange(num_blocks), torch.randn(num_blocks, BLOCK, 2, KV_HEADS, DIM))
    q = torch.randn(batch.num_tokens, HEADS, DIM, dtype=torch.bfloat16)
    k = torch.randn(batch.num_tokens, KV_HEADS, DIM, dtype=torch.bfloat16)
    out, plan, turn = torch.empty_like(q), backend.plan(batch), [0]

    def step() -> None:
        turn[0] = (turn[0] + 1) % layers
        backend.write(k, k, caches[turn[0]], batch.slots_T)
        backend.attend(q, caches[turn[0]], plan, out)

    return step


def best_of(calls: dict[str, Callable[[], None]], seconds: float, threads: int) -> dict[str, float]:
    clock = time.thread_time if threads == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attention", default="flash")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    registry.discover()
    backends = {name: backend_of(args.attention, cache, args.isa) for name, cache in CACHES.items()}
    plain = bytes_per_block([backends["bfloat16"]])
    print({name: f"{plain / bytes_per_block([backend]):.2f} times the tokens" for name, backend in backends.items()})
    with torch.inference_mode():
        for work, rows in WORK.items():
            best = best_of({name: stepper(backend, rows) for name, backend in backends.items()}, args.seconds, args.threads)
            base = best["bfloat16"]
            cells = " | ".join(f"{seconds * 1e6:.0f} us, {base / seconds:.2f}" for seconds in best.values())
            print(f"| {work} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
