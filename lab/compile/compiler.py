"""From a model to its compiled forward passes: looked up in the cache, or captured, compiled and kept there."""

import dataclasses
import hashlib
import logging
import platform
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lab.compile.artifacts import Entry, key_of, open_or_make
from lab.compile.executable import Executable
from lab.compile.pieces import Graph, split_at_attention, unsplit, with_graph
from lab.compile.program import Program, named_weights
from lab.compile.units import INDUCTOR_SETTINGS, WORK, compile_piece, inductor_session, load_units, write_units
from lab.model.config import ModelConfig
from lab.native import find_compiler

log = logging.getLogger("lab")

Form = Literal["pieces", "whole"]
SPLIT = {"pieces": split_at_attention, "whole": unsplit}
TRACED_CODE = ("model", "compile", "context.py", "contracts")  # what is traced, and what traces


@dataclass(frozen=True, slots=True)
class TracedPlugin:
    """A plugin whose code is in the graph. Its folder counts as a whole: it may import what stands beside it."""

    name: str
    options: str
    plugin: type

    def facts(self) -> list[str]:
        file = getattr(sys.modules[self.plugin.__module__], "__file__", None)
        code = _digest(Path(file).parent, ["."]) if file else uuid.uuid4().hex  # code of no file is never found again
        return [self.name, self.options, code]


@dataclass(slots=True)
class Compilation:
    """What compiling gave: the forward passes by form, and how it went."""

    forwards: dict[Form, Executable]
    seconds: float
    from_cache: bool  # nothing was compiled
    num_units: int


def compile_forward(
    model: nn.Module,
    config: ModelConfig,
    device: torch.device,
    forms: Sequence[Form],
    plugins: Sequence[TracedPlugin],
    cache: Path,
) -> Compilation:
    """The model's forward pass in the given forms, from the folder `cache` of all entries where it is there."""
    begin = time.perf_counter()
    facts = traced_facts(model, config, device, plugins)
    forwards, from_cache, num_units = {}, True, 0
    for form in forms:
        found, was_there = open_or_make(
            cache / key_of({**facts, "form": form}),
            lambda folder, form=form: _make(model, device, form, folder),
            lambda entry: _load(entry, model),
        )
        forwards[form] = found
        from_cache &= was_there
        num_units += found.program.num_units
    return Compilation(forwards, time.perf_counter() - begin, from_cache, num_units)


def _make(model: nn.Module, device: torch.device, form: Form, folder: Path) -> dict[str, Any]:
    """Compile into `folder`; returns the entry's content."""
    log.info("compiling the model (%s); kept for the next start", "in pieces" if form == "pieces" else "as one graph")
    begin = time.perf_counter()

    def use(graph: Graph) -> dict[str, Any]:
        split = SPLIT[form](graph)
        codes = []
        for number, piece in enumerate(split.pieces, 1):
            log.info("compiling piece %d of %d (%.0f s so far)", number, len(split.pieces), time.perf_counter() - begin)
            codes.append(compile_piece(piece))
        described = write_units(codes, folder)
        if all(code.kernels is not None for code in codes):
            shutil.rmtree(folder / WORK)
        return {"program": split.program.to_plain(), "units": described}

    with inductor_session(folder / WORK):
        content = with_graph(model, device, use)
    log.info("compiled in %.1f s", time.perf_counter() - begin)
    return content


def _load(entry: Entry, model: nn.Module) -> Executable:
    units = load_units(entry.content["units"], entry.files, entry.folder)
    return Executable(Program.from_plain(entry.content["program"]), units, model)


def traced_facts(
    model: nn.Module, config: ModelConfig, device: torch.device, plugins: Sequence[TracedPlugin]
) -> dict[str, Any]:
    """All that compiled code depends on, as plain data. Guards are dropped, so what is missing here would go unnoticed."""
    of_config = {name: value for name, value in dataclasses.asdict(config).items() if name != "raw"}
    return {
        "torch": torch.__version__,
        "python": platform.python_version() + sys.implementation.cache_tag,
        "code": _digest(Path(__file__).resolve().parents[1], TRACED_CODE),
        "config": repr(sorted(of_config.items())),
        "fused": [model.fused.is_native, model.batch_invariant],
        "aux_layers": list(model.aux_layers),
        "weights": [
            [name, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.device.type]
            for name, tensor in named_weights(model).items()
        ],
        "plugins": [plugin.facts() for plugin in plugins],
        "inductor": repr(sorted(INDUCTOR_SETTINGS.items())),
        "threads": torch.get_num_threads(),  # written into the code of parallel loops
        "machine": _machine(device),
    }


def _digest(root: Path, names: Sequence[str]) -> str:
    """Of all Python files that these files and folders below `root` are or hold."""
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _machine(device: torch.device) -> list[str]:
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device)), str(torch.version.cuda)]
    compiler = find_compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout if compiler else ""
    return [platform.machine(), _processor_flags(), version]


def _processor_flags() -> str:
    """The instruction sets of the processor, as Linux lists them; its name elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
