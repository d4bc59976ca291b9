"""Triton kernels in its interpreter, in a process of their own: Triton reads the setting when it is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path


def run_interpreted(cases: Path, least: int) -> None:
    """Run a file of tests with kernels interpreted. Fails unless all pass, none is skipped, and they are `least` or more."""
    command = [sys.executable, "-m", "pytest", str(cases), "-p", "no:cacheprovider", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= least and "skipped" not in done.stdout, done.stdout[-500:]
