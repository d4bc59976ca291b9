"""The team of threads that all C++ kernels share: team.cpp's trials."""

import subprocess
from pathlib import Path

import pytest

from lab.native import build

TRIALS = ("pieces", "sleepers", "two_callers", "nested", "a_held_up_thread", "forked", "alone", "shares")

pytestmark = pytest.mark.skipif(build.available() is not None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("team") / "team"
    source = Path(__file__).with_name("team.cpp")
    flags = "-O2", "-std=c++20", "-pthread", "-Wall", "-Werror", f"-I{build.INCLUDE}"
    subprocess.run([build.find_compiler(), *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("trial", TRIALS)
def test_trial(program, trial):
    done = subprocess.run([program, trial], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
