"""What a run compiles and captures: its settings, made concrete for a device, its plugins and this machine."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lab.cache import cache_dir
from lab.capabilities import GRAPH_SUPPORT
from lab.compile.dispatch import Dispatcher, derived_sizes, settle
from lab.compile.graphs import CudaRuntime, DirectForward, GraphStore
from lab.contracts.attention import Attention
from lab.errors import UserError
from lab.model.config import ModelConfig
from lab.native import find_compiler, has_python_headers
from lab.settings import CompileSettings

if TYPE_CHECKING:
    from lab.compile.compiler import Form, TracedPlugin
    from lab.compile.executable import Executable
    from lab.runner.batch import BatchBuilder

log = logging.getLogger("lab")

NO_COMPILER = "no C++ compiler is installed; install g++ (Debian, Ubuntu: apt install g++), or name one in CXX"
NO_TRITON = "the package triton is not installed, which compiled code for CUDA is written in"
NO_HEADERS = "Python's C headers are not installed; install them (Debian, Ubuntu: apt install python3-dev)"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The forward pass of a run in the forms that its modes need, and the facts for its record."""

    direct: DirectForward
    pieces: "Executable | None"
    dispatcher: Dispatcher
    mode: str  # none or piecewise: what compile.mode came to
    seconds: float
    num_graphs: int  # unique compiled graphs
    from_cache: bool


def compile_for_run(
    settings: CompileSettings,
    model: nn.Module,
    config: ModelConfig,
    device: torch.device,
    backends: list[Attention],
    plugins: "Sequence[TracedPlugin]",
    *,
    max_rows: int,
    max_tokens: int,
    num_drafts: int,
    group_of: Sequence[int] = (),
) -> Compiled:
    """Compile what the settings ask for. Raises UserError when a mode asked for by name cannot be had."""
    mode = settle_mode(settings.mode, device)
    uniform_q = 1 + num_drafts
    dispatcher = _dispatcher(settings, device, backends, mode == "piecewise", max_rows, max_tokens, uniform_q)
    forms: dict[str, Any] = {"none": model}
    if mode == "none":
        return Compiled(DirectForward(backends, forms, group_of), None, dispatcher, mode, 0.0, 0, False)
    from lab.compile.compiler import compile_forward  # the compiler's imports are not needed otherwise

    found = compile_forward(model, config, device, _forms_needed(dispatcher, device), plugins, _cache(settings))
    pieces, whole = found.forwards.get("pieces"), found.forwards.get("whole")
    forms = {"none": pieces or whole, "piecewise": pieces, "full": whole}
    forms = {name: form for name, form in forms.items() if form is not None}
    return Compiled(
        DirectForward(backends, forms, group_of), pieces, dispatcher, mode, found.seconds, found.num_units, found.from_cache
    )


def compile_heads(
    settings: CompileSettings,
    compiled: Compiled,
    heads: Sequence[nn.Module],
    device: torch.device,
    plugins: "Sequence[TracedPlugin]",
) -> Compiled:
    """Compile draft heads too, where the model is: a step of theirs is short, and as many calls in Python as it has layers'
    would take as long as it does. Not on CUDA, where they are not captured. Returns `compiled` with what it took.
    """
    if compiled.mode == "none" or device.type != "cpu":
        return compiled
    from lab.compile.compiler import compile_forward

    for head in heads:
        found = compile_forward(head, head.build.config, device, ["pieces"], plugins, _cache(settings))
        head.compiled = found.forwards["pieces"]
        compiled = replace(
            compiled,
            seconds=compiled.seconds + found.seconds,
            num_graphs=compiled.num_graphs + found.num_units,
            from_cache=compiled.from_cache and found.from_cache,
        )
    return compiled


def settle_mode(asked: str, device: torch.device) -> str:
    """What compile.mode comes to: `auto` compiles where it can and says so where it cannot."""
    if asked == "none":
        return "none"
    obstacle = _obstacle(device)
    if obstacle is None:
        return "piecewise"
    if asked != "auto":
        raise UserError(f"compile.mode={asked}: {obstacle}. Or run eagerly with compile.mode=none.")
    log.warning("%s: the model runs eagerly, and slower", obstacle)
    return "none"


def _obstacle(device: torch.device) -> str | None:
    """Why nothing can be compiled for the device here. Triton, too, compiles C for the host."""
    if device.type == "cuda" and find_spec("triton") is None:
        return NO_TRITON
    if find_compiler() is None:
        return NO_COMPILER
    return None if has_python_headers() else NO_HEADERS


def _dispatcher(
    settings: CompileSettings,
    device: torch.device,
    backends: list[Attention],
    has_pieces: bool,
    max_rows: int,
    max_tokens: int,
    uniform_q: int,
) -> Dispatcher:
    is_cpu = device.type == "cpu"
    asked = settings.cudagraph_mode
    if asked == "auto":
        asked = "full_and_piecewise" if not is_cpu else "piecewise" if has_pieces else "none"
    support = min((backend.capabilities.graph for backend in backends), key=GRAPH_SUPPORT.index)
    if is_cpu:
        support = "any"  # `full` is one compiled callable there, in which attention is an ordinary call
        if not has_pieces and asked != "none":
            log.info(
                "compile.cudagraph_mode=%s: no step runs so, for on the CPU that is compiled code, and nothing is compiled",
                asked,
            )
            asked = "none"
    modes = settle(asked, graph_support=support, has_pieces=has_pieces, uniform_q=uniform_q)
    for reason in modes.reasons:
        log.info("compile.cudagraph_mode=%s: %s", asked, reason)
    sizes: Sequence[int] | None = settings.capture_sizes or derived_sizes(max_rows, uniform_q, max_tokens)
    pad = settings.pad == "always" or (settings.pad == "auto" and not is_cpu)
    if not is_cpu and not pad and {modes.decode, modes.mixed} != {"none"}:
        raise UserError("compile.pad=never: captured graphs need it. Use compile.cudagraph_mode=none, or compile.pad=auto.")
    return Dispatcher(modes, sizes if pad else None, max_rows=max_rows, uniform_q=uniform_q)


def _forms_needed(dispatcher: Dispatcher, device: torch.device) -> "list[Form]":
    """On the CPU each mode has a form of its own; graphs are captured from the pieces."""
    modes = {dispatcher.modes.decode, dispatcher.modes.mixed}
    if device.type != "cpu" or "full" not in modes:
        return ["pieces"]
    return ["whole"] if modes == {"full"} and dispatcher.sizes is None else ["pieces", "whole"]


def _cache(settings: CompileSettings) -> Path:
    return Path(settings.cache_dir).expanduser() if settings.cache_dir else cache_dir("compile")


def graph_store(compiled: Compiled, builder: "BatchBuilder", device: torch.device) -> GraphStore | None:
    """The store of captured graphs, with nothing captured yet; None where no graphs are captured."""
    if device.type == "cpu" or not compiled.dispatcher.keys:
        return None
    return GraphStore(compiled.direct, compiled.pieces, compiled.dispatcher, builder, CudaRuntime(device))


def num_compilations() -> int:
    """Graphs that torch.compile has made in this process, ours and those of plugins."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo is not None else 0
