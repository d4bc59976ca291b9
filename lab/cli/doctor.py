"""`lab doctor`: what this machine has, and what therefore will not run."""

import importlib
import importlib.util
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import lab
from lab import registry
from lab.cache import cache_dir
from lab.cli.arguments import Arguments
from lab.cli.machine import devices, folder_bytes, memory_bytes, unusable, usable_cores
from lab.cli.table import in_bytes, print_table
from lab.errors import UserError
from lab.native import compiler

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "safetensors",
    "gguf",
    "hydra-core",
    "omegaconf",
    "wandb",
    "rich",
    "ninja",
)
CACHES = ("models", "compile", "native", "device")


def doctor(arguments: Arguments) -> int:
    """Print what was found. Always returns 0: a lack is not a failure."""
    if arguments.overrides:
        raise UserError(f"`lab doctor` takes no overrides, got {' '.join(arguments.overrides)}.")
    registry.discover(arguments.plugins)
    record = examine()
    if arguments.json:
        print(json.dumps(record))
    else:
        _print(record)
    return 0


def examine() -> dict[str, Any]:
    """All findings, as plain data."""
    total, limit = memory_bytes()
    found: dict[str, Any] = {
        "lab": lab.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "devices": _devices(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": total,
        "memory_limit_bytes": limit,
        "packages": {name: _version(name) for name in PACKAGES},
        "compiler": compiler(),
        "caches": {name: {"path": str(cache_dir(name)), "bytes": folder_bytes(cache_dir(name))} for name in CACHES},
        "wandb": _wandb(),
        "unusable_plugins": {f"{e.kind}.{e.name}": r for e in registry.entries() if (r := unusable(e))},
    }
    found["will_not_run"] = _will_not_run(found)
    return found


def _devices() -> dict[str, str]:
    """Each kind of device with its name, as torch sees it; a device that torch cannot use says so."""
    facts = importlib.import_module("lab.metrics.roofline")
    named = {"cpu": facts.device_name("cpu")}
    if "cuda" in devices():
        torch = importlib.import_module("torch")
        named["cuda"] = facts.device_name("cuda") if torch.cuda.is_available() else "present, but this torch cannot use it"
    return named


def _will_not_run(found: dict[str, Any]) -> list[str]:
    problems = [f"{name} is not installed" for name, known in found["packages"].items() if known is None]
    if found["compiler"] is None:
        problems.append("no C++ compiler (install g++ or clang): nothing is compiled, every run is eager")
    if "cuda" not in found["devices"]:
        problems.append("no CUDA device: device=cuda, and every plugin that needs one")
    return problems + [f"{name}: {'; '.join(reasons)}" for name, reasons in found["unusable_plugins"].items()]


def _wandb() -> str:
    """What `tracking.wandb.mode=auto` comes to. No server is asked."""
    if importlib.util.find_spec("wandb") is None:
        return "not installed"
    sink = importlib.import_module("lab.metrics.sinks.wandb")
    if mode := os.environ.get("WANDB_MODE"):
        return f"{mode} (WANDB_MODE)"
    if sink.has_key(os.environ.get("WANDB_BASE_URL", sink.DEFAULT_URL)):
        return "online if the server answers, else offline (a key is configured)"
    return "offline (no key is configured)"


def _print(found: dict[str, Any]) -> None:
    limit = found["memory_limit_bytes"]
    rows = [
        ("lab", found["lab"]),
        ("python", f"{found['python']} ({sys.executable})"),
        ("system", found["system"]),
        *((f"device {kind}", name) for kind, name in found["devices"].items()),
        ("cores", f"{found['usable_cores']} usable of {found['cores']}"),
        ("memory", in_bytes(found["memory_bytes"]) + (f", limited to {in_bytes(limit)}" if limit else "")),
        ("C++ compiler", found["compiler"] or "none"),
        *((name, known or "not installed") for name, known in found["packages"].items()),
        *((f"cache {name}", f"{in_bytes(c['bytes'])} in {c['path']}") for name, c in found["caches"].items()),
        ("W&B", found["wandb"]),
    ]
    print_table(("", "found"), rows)
    print("\nWill not run here:" if found["will_not_run"] else "\nEverything runs here.")
    for problem in found["will_not_run"]:
        print(f"  {problem}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
