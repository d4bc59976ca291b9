"""The sections of gpu_check.py."""

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Context:
    """What a section runs with, and what it has found so far."""

    work: Path  # shared by all sections: models and compiled code
    is_dry: bool
    model: Path | None  # a checkpoint given by the user
    budget_s: float
    lines: list[str] = field(default_factory=list)  # for the summary
    failures: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> str:
        return "cpu" if self.is_dry else "cuda"

    @property
    def time_left(self) -> float:
        return self.budget_s - (time.monotonic() - self.begin)

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(line, flush=True)

    def check(self, is_right: bool, what: str) -> None:
        print("ok  " if is_right else "FAIL", what, flush=True)
        if not is_right:
            self.failures.append(what)

    def result(self) -> dict[str, Any]:
        return {"lines": self.lines, "failures": self.failures, **self.data}

    def keep(self, name: str) -> None:
        """Write down what there is, for the case that the section is stopped."""
        (self.work / f"{name}.partial.json").write_text(json.dumps(self.result()), encoding="utf-8")


@dataclass(frozen=True)
class Section:
    """A function of a module of this package, and its share of the time."""

    module: str
    function: str
    weight: float

    def load(self) -> Callable[[Context], dict[str, Any]]:
        return getattr(importlib.import_module(f"gpu.{self.module}"), self.function)


SECTIONS = {
    "machine": Section("machine", "machine", 1),
    "kernels": Section("kernels", "kernels", 3),
    "invariant-kernels": Section("invariant", "kernels", 1),
    "tokens": Section("tokens", "tokens", 5),
    "invariant": Section("invariant", "requests", 3),
    "decode": Section("steps", "decode", 6),
    "prefill": Section("steps", "prefill", 2),
    "launches": Section("steps", "launches", 2),
    "attention": Section("kernels", "speed", 2),
}
