"""env.json: the machine, the software and the source that a run used."""

import os
import platform
import resource
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lab
from lab.metrics.roofline import device_name, total_memory_bytes

PACKAGES = ("numpy", "transformers", "safetensors", "gguf", "hydra-core", "omegaconf", "triton", "wandb", "rich", "pydantic")
GIT_SECONDS = 5


def describe(device: str) -> dict[str, Any]:
    """The environment of this process. `device` is cpu or cuda."""
    import torch

    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "lab": lab.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "git": git_state(Path(lab.__file__).resolve().parent.parent),
        "system": platform.platform(),
        "cpu": device_name("cpu"),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory_bytes(),
        "device": device,
    }
    if device == "cuda":
        found["gpu"] = device_name("cuda")
        found["cuda"] = torch.version.cuda
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """{commit, dirty} of the checkout that `folder` is the root of; None outside one, or without git."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(status)}


def peak_rss_bytes() -> int:
    """The most memory this process has had resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int:
    """The most memory of the GPU that torch has had allocated so far."""
    import torch

    return torch.cuda.max_memory_allocated()


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
