"""The README's command for the draft head that comes with lab, on the real model and compiled."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests import rigs

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_command_runs_and_drafts_are_accepted(tmp_path):
    rigs.smollm2()  # fetched before, not by the run
    (command,) = re.findall(r"^lab (run .*\+spec=eagle.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    settings = ["--json", "hydra.run.dir=out", "tracking.wandb.mode=disabled", "cache.memory_bytes=200000000"]
    done = subprocess.run(
        [sys.executable, "-m", "lab", *command.split(), *settings],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spec = json.loads((tmp_path / "out" / "metrics.json").read_text())["spec"]
    assert spec["accepted_tokens"] > 0 and spec["num_drafts"] > 0, spec
