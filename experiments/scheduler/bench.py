"""What scheduling costs: per step, per added request, and over a trace of 100,000 requests. No model, no torch.

    python experiments/scheduler/bench.py [steps] [adds] [trace] [--requests N] [--trace FILE] [--json FILE]

Steps are executed by nobody: the result of every step is known before it is asked for, so all the time is the scheduler's
and the block manager's. Times are CPU times of this process, so that other processes count as little as may be. A trace
is run with a fixed number of requests in the system, so that it is never idle; its arrival times are only an order.

Trace files: Mooncake's JSON lines (input_length, output_length, hash_ids of 512 tokens each) or the CSV of the Azure LLM
inference traces (TIMESTAMP, ContextTokens, GeneratedTokens).
"""

import argparse
import csv
import gc
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lab.kv.blocks import BlockManager
from lab.sampling_params import SamplingParams
from lab.sched.policies.fcfs import FirstComeFirstServed
from lab.sched.scheduler import Scheduler
from lab.settings import SchedulerSettings
from lab.types import Request, RowResult, Step, StepResult

BLOCK_SIZE = 16
MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for
TOKEN, NONE = [5], []
Sizes = tuple[list[int], int]  # prompt token ids, output tokens


def make_scheduler(
    max_num_seqs: int, *, is_async: bool = False, num_blocks: int = 65_536, budget: int = 8192, max_model_len: int = 262_144
) -> Scheduler:
    settings = SchedulerSettings(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, async_scheduling=is_async)
    policy = FirstComeFirstServed(FirstComeFirstServed.Options())
    return Scheduler(settings, BlockManager(num_blocks, BLOCK_SIZE), policy, max_model_len=max_model_len)


def make_request(index: int, prompt_ids: list[int], num_output: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    return Request(str(index), prompt_ids, params, float(index), 0, arrival_index=index)


def no_op(step: Step) -> StepResult:
    """The same token for every row, at once."""
    rows = [RowResult(c.request_id, TOKEN if c.samples else NONE, 0, None, None, NONE) for c in step.chunks]
    return StepResult(step.index, rows, ms=0.0)


def bench_steps(num_running: int, is_async: bool) -> dict[str, Any]:
    """CPU microseconds of schedule() and update() together, over steps in which so many requests decode."""
    scheduler = make_scheduler(num_running, is_async=is_async, budget=max(8192, 100 * num_running))
    for i in range(num_running):
        scheduler.add(make_request(i, [(7 * i + j) % 1000 for j in range(100)], 400))
    times, before = [], None
    while scheduler.has_work:
        begin = time.process_time()
        step = scheduler.schedule(0.0)
        spent = time.process_time() - begin
        after = (step, no_op(step))
        ready = before if is_async else after
        if ready is not None:
            begin = time.process_time()
            scheduler.update(*ready)
            spent += time.process_time() - begin
        before = after
        if len(step.chunks) == num_running and not step.new_rows:
            times.append(spent * 1e6)
    return {
        "running": num_running,
        "mode": "async" if is_async else "sync",
        "steps": len(times),
        "median_us": statistics.median(times),
        "p99_us": statistics.quantiles(times, n=100)[98],
        "us_per_request": statistics.median(times) / num_running,
    }


def bench_adds(num_prompt: int, shared: bool, count: int = 1000) -> dict[str, Any]:
    """CPU microseconds per request of add(), and of its first scheduling (hashing, matching, allocating, registering)."""
    scheduler = make_scheduler(count, budget=count * num_prompt, num_blocks=count * (num_prompt // BLOCK_SIZE + 2))
    prefix = [] if not shared else list(range(num_prompt - 8))
    requests = [
        make_request(i, prefix + [(i * 7919 + j) % 50_000 for j in range(num_prompt - len(prefix))], 4) for i in range(count)
    ]
    begin = time.process_time()
    for request in requests:
        scheduler.add(request)
    added = time.process_time()
    step = scheduler.schedule(0.0)
    end = time.process_time()
    assert len(step.new_rows) == count
    return {
        "prompt": num_prompt,
        "prefix": "shared" if shared else "own",
        "add_us": (added - begin) / count * 1e6,
        "admit_us": (end - added) / count * 1e6,
    }


def generate_trace(count: int, seed: int = 0) -> Iterator[Sizes]:
    """Lengths of long tails (means of about 500 in and 100 out); half the prompts begin with one of 50 common prefixes."""
    chooser = random.Random(seed)
    prefixes = [[chooser.randrange(50_000) for _ in range(chooser.randint(64, 1024))] for _ in range(50)]
    for _ in range(count):
        num_own = min(int(chooser.lognormvariate(5.2, 1.0)) + 1, 8192)
        first = chooser.randrange(50_000)
        prefix = chooser.choice(prefixes) if chooser.random() < 0.5 else []
        yield prefix + list(range(first, first + num_own)), min(int(chooser.lognormvariate(4.2, 0.9)) + 1, 2048)


def read_trace(path: Path) -> Iterator[Sizes]:
    """Requests of a Mooncake JSONL or Azure CSV file, one after another."""
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".csv":
            for number, row in enumerate(csv.DictReader(file)):
                first = number * 16_384 % 2**31
                yield list(range(first, first + int(row["ContextTokens"]))), max(int(row["GeneratedTokens"]), 1)
        else:
            for line in file:
                row = json.loads(line)
                token_ids = [t for h in row["hash_ids"] for t in range(h * MOONCAKE_BLOCK, (h + 1) * MOONCAKE_BLOCK)]
                yield token_ids[: row["input_length"]], max(row["output_length"], 1)


def rss_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def bench_trace(trace: Iterable[Sizes], is_async: bool, max_num_seqs: int, in_system: int) -> dict[str, Any]:
    """CPU seconds to schedule a trace, and resident memory on the way (MiB, by requests ended)."""
    scheduler = make_scheduler(max_num_seqs, is_async=is_async)
    source = (make_request(i, prompt_ids, num_output) for i, (prompt_ids, num_output) in enumerate(trace))
    num_added = num_ended = num_steps = num_tokens = num_output = 0
    memory: dict[int, float] = {}
    before, making, executing = None, 0.0, 0.0
    gc.collect()
    begin = time.process_time()
    while True:
        free = in_system - scheduler.num_running - scheduler.num_waiting
        if free > 0:
            start = time.process_time()
            batch = list(islice(source, free))
            making += time.process_time() - start
            for request in batch:
                scheduler.add(request)
            num_added += len(batch)
        if not scheduler.has_work:
            break
        step = scheduler.schedule(0.0)
        start = time.process_time()
        after = (step, no_op(step))
        executing += time.process_time() - start
        ready = before if is_async else after
        before = after
        for update in scheduler.update(*ready) if ready else ():
            num_output += len(update.token_ids)
            if update.finish_reason is not None:
                num_ended += 1
                if num_ended in (10_000, 50_000, 100_000):
                    memory[num_ended] = round(rss_mib(), 1)
        num_steps += 1
        num_tokens += step.num_tokens
    seconds = time.process_time() - begin - making
    scheduler.blocks.check_integrity([])
    assert num_ended == num_added and scheduler.blocks.num_used == 0
    stats = scheduler.blocks.stats
    return {
        "mode": "async" if is_async else "sync",
        "requests": num_ended,
        "cpu_s": seconds,
        "scheduler_cpu_s": seconds - executing,
        "steps": num_steps,
        "computed_tokens": num_tokens,
        "output_tokens": num_output,
        "hit_rate": stats.hit_rate,
        "preemptions": scheduler.num_preemptions,
        "rss_mib": memory,
    }


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    names = list(rows[0])
    cells = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(n), *(len(c[i]) for c in cells)) for i, n in enumerate(names)]
    for line in [names, *cells]:
        print("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="steps|adds|trace", help="what to measure (default: all)")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--trace", type=Path, help="a Mooncake .jsonl or Azure .csv file instead of generated requests")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--in-system", type=int, default=512, help="requests running or waiting at a time")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    unknown = set(args.parts) - {"steps", "adds", "trace"}
    if unknown:
        parser.error(f"no part named {', '.join(sorted(unknown))}; there are steps, adds and trace")
    parts = args.parts or ["steps", "adds", "trace"]
    figures: dict[str, list[dict[str, Any]]] = {}
    if "steps" in parts:
        figures["steps"] = [bench_steps(n, a) for n in (1, 16, 64, 256) for a in (False, True)]
        show("One step of decoding requests", figures["steps"])
    if "adds" in parts:
        figures["adds"] = [bench_adds(n, shared) for n in (128, 1024) for shared in (False, True)]
        show("One request", figures["adds"])
    if "trace" in parts:
        figures["trace"] = []
        for is_async in (False, True):
            trace = islice(read_trace(args.trace), args.requests) if args.trace else generate_trace(args.requests)
            figures["trace"].append(bench_trace(trace, is_async, args.max_num_seqs, args.in_system))
        show("A trace", figures["trace"])
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
