"""A tiny model, and the command line in this process or in one of its own."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lab.__main__ import main
from lab.metrics import roofline
from tests import rigs
from tests.conftest import lend_native

FACTS = roofline.DeviceFacts(
    "test", "cpu", 1, 8 << 30, 40e9, {"float32": 200e9, "bfloat16": 800e9, "float16": 200e9}, "2026-01-01T00:00:00+00:00"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Counts up by one: 'ABC' goes on 'DEF...'."""
    folder = rigs.count(tmp_path_factory.mktemp("count"))
    rigs.alpha_tokenizer(folder)
    return folder


@pytest.fixture
def small(model, tmp_path):
    """Overrides of a run of a second."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ABC"}\n{"prompt": "XYZ"}\n')
    return [
        f"model.path='{model}'",
        "workload=prompts",
        f"workload.path='{prompts}'",
        "sampling={temperature: 0, max_tokens: 4}",
        "cache.num_blocks=32",
        "num_threads=1",
        "compile.mode=none",
        "tracking.wandb.mode=disabled",
        "tracking.progress=log",
    ]


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch, own_registry):
    """A working folder of the test's own, and a cache that holds a measurement of this machine's device."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    lend_native(tmp_path / "cache")  # before it is in force: a build of an earlier test may still ask where its folder is
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for threads in (1, None):  # of the runs here, and the default
        roofline._remember(roofline._facts_path("cpu", threads), FACTS)
    yield tmp_path / "here"
    torch.set_num_threads(before)


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def lab(capsys):
    """lab("run", ...) -> Outcome, in this process."""

    def call(*argv: str) -> Outcome:
        code = main(argv)
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def start():
    """start("run", ...) -> Popen of `python -m lab`, ended with the test."""
    started = []

    def call(*argv: str, **environment: str) -> subprocess.Popen:
        root = Path(roofline.__file__).resolve().parents[2]
        env = {**os.environ, "PYTHONPATH": str(root), **environment}
        command = [sys.executable, "-m", "lab", *argv]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
        return started[-1]

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
