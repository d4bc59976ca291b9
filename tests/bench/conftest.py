"""A tiny model whose outputs are known by hand, a device that need not be measured, and runs of the main job on them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lab.bench.job import run_job
from lab.metrics import roofline
from lab.settings import (
    CacheSettings,
    CompileSettings,
    ModelSettings,
    PluginChoice,
    Settings,
    TrackingSettings,
    WandbSettings,
)
from tests import rigs
from tests.conftest import lend_native

FACTS = roofline.DeviceFacts(
    "test", "cpu", 1, 8 << 30, 40e9, {"float32": 200e9, "bfloat16": 800e9, "float16": 200e9}, "2026-01-01T00:00:00+00:00"
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch, one_thread):
    """A cache of its own, which holds a measurement of this machine's device."""
    lend_native(tmp_path / "cache")  # before it is in force: a build of an earlier test may still ask where its folder is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for threads in (1, None):  # of the runs here, and the default
        roofline._remember(roofline._facts_path("cpu", threads), FACTS)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Counts up by one: 'ABC' goes on 'DEF...'."""
    folder = rigs.count(tmp_path_factory.mktemp("count"))
    rigs.alpha_tokenizer(folder)
    return folder


@dataclass
class Outcome:
    code: int
    folder: Path

    @property
    def metrics(self):
        return json.loads((self.folder / "metrics.json").read_text())

    def lines(self, name):
        return [json.loads(line) for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def run(model, tmp_path):
    """Run the main job in this process: run(prompts, **settings) -> Outcome. `prepare` gets the folder first."""

    def run(prompts, *, clock=None, wandb=None, prepare=None, **values):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        folder.mkdir()
        if prepare is not None:
            prepare(folder)
        wandb = wandb or WandbSettings(mode="disabled")
        given = {
            "model": ModelSettings(path=str(model)),
            "cache": CacheSettings(num_blocks=64),
            "workload": PluginChoice("prompts", {"path": str(path)}),
            "sampling": {"temperature": 0.0, "max_tokens": 8},
            "tracking": TrackingSettings(wandb=wandb, progress="log"),
            "num_threads": 1,
            "compile": CompileSettings(mode="none"),
            **values,
        }
        clocks = {} if clock is None else {"clock": clock, "sleep": clock.sleep}
        return Outcome(run_job(Settings(**given), folder, config={"seed": 0, "model": {"path": "x"}}, **clocks), folder)

    return run


class Clock:
    """Time that moves by `tick` each time it is read, and by what is slept."""

    def __init__(self, tick=0.001):
        self.now = 100.0
        self.tick = tick
        self.slept = []

    def __call__(self):
        self.now += self.tick
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


class Child:
    """`lab run` in a process of its own."""

    def __init__(self, folder, *overrides, flags=(), code=None):
        self.folder = folder
        fixed = ["num_threads=1", "compile.mode=none", "cache.num_blocks=256", "tracking.wandb.mode=disabled"]
        fixed.append(f"hydra.run.dir='{folder}'")
        self.process = subprocess.Popen(
            [sys.executable, *(("-c", code) if code else ("-m", "lab")), "run", *flags, *fixed, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def wait_for_requests(self, count, seconds=600.0):
        """Until so many lines stand in requests.jsonl."""
        path, end = self.folder / "requests.jsonl", time.monotonic() + seconds
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < end, "the run does not get on"
            time.sleep(0.05)

    def wait_to_read(self, text):
        """Until a line with the text is on stderr. What `end` returns of stderr then lacks what was read."""
        assert any(text in line for line in self.process.stderr), "it ended without saying so"

    def signal(self, number):
        self.process.send_signal(number)

    def end(self, seconds=600.0):
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@pytest.fixture
def child(model, tmp_path):
    started = []

    def start(*overrides, flags=(), folder=None, code=None):
        started.append(Child(folder or tmp_path / "child", f"model.path='{model}'", *overrides, flags=flags, code=code))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.signal(signal.SIGKILL)
            each.process.communicate()
