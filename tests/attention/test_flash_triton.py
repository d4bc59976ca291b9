"""Runs interpreted_flash.py: Triton reads TRITON_INTERPRET when it is imported, so the interpreter has a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("interpreted_flash.py")
LEAST = 71  # tests that must have run


def test_every_kernel_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", str(CASES), "-p", "no:cacheprovider", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=CASES.parents[2], check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= LEAST and "skipped" not in done.stdout, done.stdout[-500:]
