"""The measurement itself: start the peers, take turns, keep every sample on disk as soon as it is there."""

import contextlib
import hashlib
import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.machine import OthersWatch, wait_until_quiet
from harness.process import PeerFailed, PeerProcess
from harness.protocol import Request, Start
from harness.tables import figures_of
from harness.workloads import MAX_LEN, MAX_SEQS, Encode, requests_of, warm_up_of
from lab.metrics.quiet import MOST_OF_OTHERS

SCRIPTS = Path(__file__).resolve().parent.parent
START_TIMEOUT_S, RUN_TIMEOUT_S, PREPARE_TIMEOUT_S = 400.0, 200.0, 900.0
ENOUGH = 3  # samples of a slow workload
NEW_PROMPTS = 1000  # added to a repeat's number when it is measured again: prompts must not be seen twice


@dataclass(frozen=True)
class Plan:
    """What to measure and how. The fields in `key` must not change between a run and its resumption."""

    pythons: dict[str, str]  # interpreter by peer, in the order in which they take turns
    prepared: dict[str, Path]  # converted checkpoints by peer
    model: Path
    model_name: str
    work: Path  # a folder for caches, logs and the state
    workloads: tuple[str, ...]
    repeats: int = 5
    threads: int = 2
    kv_bytes: int = 1 << 30
    cold_starts: bool = True
    slow_s: float = 10.0  # a workload that takes longer gets no more than ENOUGH samples
    quiet_share: float = 0.04  # of the CPU in use at most before a sample is taken
    quiet_timeout_s: float = 60.0
    retries: int = 1  # of a disturbed sample
    lab_overrides: tuple[str, ...] = ()

    def key(self, encode: Encode) -> dict[str, Any]:
        prompts = json.dumps([[r.prompt_ids for r in requests_of(name, 0, encode)] for name in ("w1", "w4")])
        return {
            "model": self.model_name,
            "prompts": hashlib.blake2b(prompts.encode(), digest_size=8).hexdigest(),
            "threads": self.threads,
            "kv_bytes": self.kv_bytes,
            "lab_overrides": list(self.lab_overrides),
        }


@dataclass
class PeerRecord:
    """All that is known of one peer."""

    versions: dict[str, str] = field(default_factory=dict)
    settings: str = ""
    failure: str | None = None
    starts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"cold": [], "warm": []})
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by workload


@dataclass
class Session:
    """One run, from its plan to its records. `log` gets one line at a time."""

    plan: Plan
    encode: Encode
    log: Callable[[str], None] = print
    records: dict[str, PeerRecord] = field(default_factory=dict)

    @property
    def state_path(self) -> Path:
        return self.plan.work / "state.json"

    def load(self) -> list[str]:
        """Take up the records of an earlier run. Returns the names of the settings that differ, and takes up nothing then."""
        state = json.loads(self.state_path.read_text(encoding="utf-8"))
        key = self.plan.key(self.encode)
        differing = [name for name in key if state["key"].get(name) != key[name]]
        if not differing:
            self.records = {name: PeerRecord(**record) for name, record in state["peers"].items() if name in self.plan.pythons}
            for record in self.records.values():
                record.failure = None
        return differing

    def save(self) -> None:
        state = {"key": self.plan.key(self.encode), "peers": {name: asdict(record) for name, record in self.records.items()}}
        part = self.state_path.with_suffix(".part")
        part.write_text(json.dumps(state), encoding="utf-8")
        part.replace(self.state_path)

    def run(self) -> None:
        """Measure what the records lack."""
        for name in self.plan.pythons:
            self.records.setdefault(name, PeerRecord())
        if self.plan.cold_starts:
            for name in self._in_play():
                if not self.records[name].starts["cold"]:
                    with self._failing(name), ExitStack() as stack:
                        shutil.rmtree(self._cache(name), ignore_errors=True)
                        self._start(name, "cold", stack)
        with ExitStack() as stack:
            self._take_turns(stack)

    def _in_play(self) -> list[str]:
        return [name for name, record in self.records.items() if record.failure is None]

    def _wanted(self, name: str, workload: str, repeat: int) -> bool:
        record = self.records[name]
        samples = record.samples.get(workload, [])
        slow = len(samples) >= ENOUGH and statistics.median(s["seconds"] for s in samples) > self.plan.slow_s
        return record.failure is None and len(samples) <= repeat and not slow

    def _take_turns(self, stack: ExitStack) -> None:
        """Every repeat measures each workload on all peers, forwards and backwards in turn."""
        processes: dict[str, PeerProcess] = {}
        for name in self._in_play():
            if any(self._wanted(name, workload, self.plan.repeats - 1) for workload in self.plan.workloads):
                with self._failing(name):
                    processes[name] = self._start(name, "warm", stack)
                    processes[name].pause()
        met: set[tuple[str, str]] = set()
        for repeat in range(self.plan.repeats):
            for workload in self.plan.workloads:
                order = list(processes) if repeat % 2 == 0 else list(reversed(processes))
                for name in order:
                    if self._wanted(name, workload, repeat):
                        with self._failing(name), _awake(processes[name]):
                            if (name, workload) not in met:
                                processes[name].run(warm_up_of(workload, self.encode), RUN_TIMEOUT_S)
                                met.add((name, workload))
                            self._measure(processes[name], workload, repeat)

    def _start(self, name: str, kind: str, stack: ExitStack) -> PeerProcess:
        plan = self.plan
        cache = self._cache(name)
        cache.mkdir(parents=True, exist_ok=True)
        process = stack.enter_context(self._process(name))
        quiet = wait_until_quiet(plan.quiet_share, plan.quiet_timeout_s, self.log)
        start = Start(
            model=str(plan.model),
            prepared=str(plan.prepared[name]) if name in plan.prepared else None,
            cache=str(cache),
            threads=plan.threads,
            max_len=MAX_LEN,
            max_seqs=MAX_SEQS,
            kv_bytes=plan.kv_bytes,
            options=list(plan.lab_overrides) if name == "lab" else [],
        )
        watch = OthersWatch(process.pid)
        started = process.start(start, START_TIMEOUT_S)
        record = self.records[name]
        record.versions, record.settings = started.versions, started.settings
        times = {"import_s": started.import_s, "load_s": started.load_s, "first_s": started.first_s}
        record.starts[kind].append({**times, "disturbed": not quiet or watch.share() > MOST_OF_OTHERS})
        self.save()
        self.log(
            f"  {name}: ready with {kind} caches in {started.load_s + started.first_s:.1f} s, after {started.import_s:.1f} s "
            f"of imports ({', '.join(f'{package} {version}' for package, version in started.versions.items())})"
        )
        return process

    def _process(self, name: str) -> PeerProcess:
        log = self.plan.work / f"{name}.log"
        return PeerProcess(name, self.plan.pythons[name], SCRIPTS / f"peer_{name}.py", log, self.plan.threads)

    def prepare(self, name: str, folder: Path) -> None:
        """Have a peer convert the checkpoint into `folder`."""
        with self._process(name) as process:
            process.prepare(self.plan.model, folder, PREPARE_TIMEOUT_S)

    def _measure(self, process: PeerProcess, workload: str, repeat: int) -> None:
        """Take one sample; where others disturbed it, the best of `retries` more."""
        best: dict[str, Any] | None = None
        for attempt in range(self.plan.retries + 1):
            sample = self._sample(process, workload, repeat + attempt * NEW_PROMPTS)
            if best is None or sample["others"] < best["others"]:
                best = sample
            if not sample["disturbed"]:
                break
        assert best is not None
        self.records[process.name].samples.setdefault(workload, []).append(best)
        self.save()
        figures = ", ".join(f"{key} {value:.5g}" for key, value in best["figures"].items())
        note = f"; others took {best['others']:.0%} of the CPU" if best["disturbed"] else ""
        self.log(f"  {workload} #{repeat + 1} {process.name}: {figures}{note}")

    def _sample(self, process: PeerProcess, workload: str, prompts: int) -> dict[str, Any]:
        requests = requests_of(workload, prompts, self.encode)
        quiet = wait_until_quiet(self.plan.quiet_share, self.plan.quiet_timeout_s, self.log)
        watch = OthersWatch(process.pid)
        answer = process.run(requests, RUN_TIMEOUT_S)
        others = watch.share()
        return {
            "prompts": prompts,
            "seconds": answer.seconds,
            "figures": figures_of(workload, asdict(answer), num_prompt_tokens(requests)),
            "others": others,
            "disturbed": not quiet or others > MOST_OF_OTHERS,
            "token_ids": answer.token_ids,
        }

    def _cache(self, name: str) -> Path:
        return self.plan.work / "cache" / name

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """A peer that fails is out of the run; the others go on."""
        try:
            yield
        except PeerFailed as failure:
            self.records[name].failure = str(failure)
            self.save()
            self.log("\n      ".join([f"  {failure}: it is out of this run", *failure.details]))


@contextlib.contextmanager
def _awake(process: PeerProcess) -> Iterator[None]:
    process.resume()
    try:
        yield
    finally:
        process.pause()


def num_prompt_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.prompt_ids) for request in requests)
