"""How run.py talks to a peer: one JSON object per line, commands in on stdin, answers out on stdout.

A peer runs in a process of its own, under its own interpreter: this module needs the standard library alone.

    {"do": "prepare", "model": folder, "folder": folder to fill}   ->  {}
    {"do": "start", ...Start}                                      ->  {...Started}
    {"do": "run", "requests": [...Request]}                        ->  {...Answer}

The end of stdin ends the process. What a library prints on stdout goes to stderr, which run.py keeps as the peer's log.
"""

import importlib
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Start:
    """What a peer is started with."""

    model: str  # the checkpoint, a folder in transformers' format in bfloat16
    prepared: str | None  # the folder that the peer's `prepare` filled; None for a peer that reads the checkpoint itself
    cache: str  # a folder for what the peer keeps from start to start, such as compiled code
    threads: int
    max_len: int  # longest prompt and output together, in tokens
    max_seqs: int  # most requests at once
    kv_bytes: int  # of the KV cache
    options: list[str] = field(default_factory=list)  # for lab: overrides


@dataclass(frozen=True)
class Started:
    """What it took to be ready, and what is running."""

    import_s: float  # the library's import
    load_s: float  # from there to an engine that takes requests
    first_s: float  # one short request, in which some engines compile what the others compiled before
    versions: dict[str, str]
    settings: str  # in words, for the report


@dataclass(frozen=True)
class Request:
    """Generate exactly `num_output` tokens, greedily, whether an end-of-sequence token comes or not."""

    prompt_ids: list[int]
    num_output: int


@dataclass(frozen=True)
class Answer:
    """What came of one `run`. `token_times_s` counts from the start of the run and is None for more than one request."""

    seconds: float
    token_ids: list[list[int]]
    token_times_s: list[float] | None
    peak_rss_bytes: int  # of the process since its start, its children included


@dataclass
class Generated:
    """What a peer hands back: ids per request, and for a single request the moment of each token by `time.monotonic`."""

    token_ids: list[list[int]]
    token_times: list[float] | None = None


class Peer(ABC):
    """One engine under measurement. Its script defines a subclass and calls `serve` with it."""

    PACKAGES: tuple[str, ...] = ()  # whose versions are reported
    MODULES: tuple[str, ...] = ()  # imported before `__init__`, so that the import is timed apart
    SETTINGS = ""  # in words, for the report

    @staticmethod
    def prepare(model: Path, folder: Path) -> None:
        """Convert the checkpoint into `folder`. Only for peers that run.py lists as needing it."""
        raise RuntimeError(f"nothing to prepare in {folder} for {model}")

    @staticmethod
    def environment(start: Start) -> dict[str, str]:
        """Environment variables to set before the library is imported."""
        return {}

    @abstractmethod
    def __init__(self, start: Start) -> None:
        """Load the model and make ready to generate."""

    def set_up(self, requests: Sequence[Request]) -> None:  # noqa: B027 - most peers need nothing
        """Make room for these requests, untimed. Nothing may be computed here."""

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> Generated:
        """Generate for all of them at once. This call is what is timed."""

    def versions(self) -> dict[str, str]:
        return {name: metadata.version(name) for name in self.PACKAGES}


def serve(peer_class: type[Peer]) -> None:
    """Answer commands until stdin ends. What a peer raises ends the process, with the traceback in its log."""
    answers = _claim_stdout()
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        what = command.pop("do")
        if what == "prepare":
            peer_class.prepare(Path(command["model"]), Path(command["folder"]))
            answer: dict[str, Any] = {}
        elif what == "start":
            peer, started = _start(peer_class, Start(**command))
            answer = asdict(started)
        else:
            assert peer is not None, "run before start"
            answer = asdict(_run(peer, [Request(**request) for request in command["requests"]]))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _claim_stdout() -> TextIO:
    """The real stdout for answers alone; file descriptor 1, which libraries print to, becomes stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _start(peer_class: type[Peer], start: Start) -> tuple[Peer, Started]:
    os.environ.update(peer_class.environment(start))
    begin = time.monotonic()
    for module in peer_class.MODULES:
        importlib.import_module(module)
    imported = time.monotonic()
    peer = peer_class(start)
    loaded = time.monotonic()
    short = [Request([1, 2, 3, 4], 2)]  # two tokens: both a prefill and a decode step take place
    peer.set_up(short)
    peer.generate(short)
    done = time.monotonic()
    settings = peer.SETTINGS
    if start.options:
        settings += f" {' '.join(start.options)}"
    return peer, Started(imported - begin, loaded - imported, done - loaded, peer.versions(), settings.strip())


def _run(peer: Peer, requests: list[Request]) -> Answer:
    peer.set_up(requests)
    begin = time.monotonic()
    generated = peer.generate(requests)
    seconds = time.monotonic() - begin
    times = generated.token_times
    return Answer(
        seconds=seconds,
        token_ids=generated.token_ids,
        token_times_s=[t - begin for t in times] if times is not None else None,
        peak_rss_bytes=sum(_peak_rss_bytes(pid) for pid in process_tree(os.getpid())),
    )


def process_tree(root: int) -> list[int]:
    """The process and all its living descendants, by /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [root]
    for pid in tree:
        tree += children.get(pid, [])
    return tree


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (the command before it may hold spaces); empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _peak_rss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
