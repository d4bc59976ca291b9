"""experiments/gpu_check.py on a machine that may have no GPU: its dry run goes through every section."""

import json
import os
import subprocess
import sys

from tests.test_rules import ROOT

SECTIONS = ["machine", "kernels", "invariant-kernels", "tokens", "invariant", "decode", "prefill", "launches", "attention"]


def run(tmp_path, *arguments):
    """(what it printed, its results)."""
    command = [sys.executable, str(ROOT / "experiments" / "gpu_check.py"), "--dry-run", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OUT": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    return done, json.loads((tmp_path / "gpu_check.json").read_text())


def test_a_dry_run_goes_through_every_section(tmp_path):
    done, results = run(tmp_path, "--budget", "250")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert list(results) == SECTIONS and {result["status"] for result in results.values()} == {"ok"}
    assert results["machine"]["versions"]["torch"]
    assert results["kernels"]["lines"] == ["1 cases of flash against eager"]
    (line,) = [line for line in results["invariant"]["lines"] if "decode" in line]
    assert "x)" in line and results["invariant"]["tiny 2 x 8"]["on_ms"]["decode"] > 0
    assert results["decode"]["tiny decode 4"]["ms"] > 0 and results["prefill"]["tiny prefill 60"]["ms"] > 0
    _, _, summary = done.stdout.rpartition("\nresults: ")
    assert all(f"\n{name}: ok (" in summary for name in SECTIONS)


def test_a_section_that_fails_leaves_the_others_alone(tmp_path):
    done, results = run(tmp_path, "--sections", "tokens", "machine", "--model", "no/such/folder", "--budget", "60")
    assert done.returncode == 1
    assert results["tokens"]["status"] == "exit status 1" and "no/such/folder" in results["tokens"]["output"]
    assert results["machine"]["status"] == "ok"
