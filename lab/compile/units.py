"""Compiled pieces as files: what Inductor made of a piece, reduced to what running it needs.

Inductor writes a Python module that allocates buffers and calls kernels. Kept is that module without its benchmarking and
build parts, and the kernels' shared libraries beside it. Loading one needs neither Dynamo nor Inductor nor a compiler.
"""

import ast
import importlib.abc
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lab.compile import tape
from lab.compile.program import Run, Unit
from lab.native import find_compiler

log = logging.getLogger("lab")

DATA_PTR_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # by which a kernel's binding finds torch's tensors
TRITON_CACHE_VARIABLE = "TRITON_CACHE_DIR"
INDUCTOR_SETTINGS = {
    "size_asserts": False,  # shapes are right by construction, and a check would cost as much as a small kernel
    "fx_graph_cache": False,  # entries are kept by lab.compile.artifacts
    "cpp.vec_isa_ok": True,  # the processor's flags are believed; to try each set out takes several seconds
}
WORK = "inductor"  # where Inductor's own files of an entry lie, for units that are not plain C++
_copies: list[tempfile.TemporaryDirectory] = []  # of entries whose units are loaded; they go with the process
_BUILDER = "async_compile"  # the name under which the generated module builds its kernels


@dataclass(frozen=True, slots=True)
class UnitCode:
    """A unit's Python source, and its kernels: global name -> shared library.

    `kernels` is None where they are of another kind (Triton): then the source is Inductor's own, and builds or finds them.
    """

    source: str
    kernels: dict[str, Path] | None


def compile_piece(piece: fx.GraphModule) -> UnitCode:
    """Compile a piece with Inductor. Call it in Dynamo's tracing context and inside `inductor_session`."""
    from torch._inductor import compile_fx

    examples = [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]
    made: list[Any] = []

    def inner(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        assert len(inputs) == len(examples), "the compiler changed a piece's signature"
        made.append(compile_fx.compile_fx_inner(graph, inputs, **options))
        return made[-1]

    compile_fx.compile_fx(piece, examples, inner_compile=inner)
    (compiled,) = made
    assert not compiled.constants, "a piece holds constants, which would not be kept with it"
    namespace = compiled.current_callable.__func__.__globals__
    return portable_code(compiled.source_code, namespace) or UnitCode(compiled.source_code, None)


@contextmanager
def inductor_session(work: Path) -> Iterator[None]:
    """Inductor with the settings that units are made with, and `work` as the folder for all that it writes."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    work.mkdir(exist_ok=True)
    compiler = find_compiler()
    settings = INDUCTOR_SETTINGS if compiler is None else {**INDUCTOR_SETTINGS, "cpp.cxx": (compiler,)}
    before = os.environ.get(TRITON_CACHE_VARIABLE)
    os.environ[TRITON_CACHE_VARIABLE] = str(work / "triton")  # else Inductor sets it to such a place, and leaves it so
    try:
        with temporary_cache_dir(str(work)), config.patch(settings):
            yield
    finally:
        if before is None:
            del os.environ[TRITON_CACHE_VARIABLE]
        else:
            os.environ[TRITON_CACHE_VARIABLE] = before


def portable_code(source: str, namespace: dict[str, Any]) -> UnitCode | None:
    """What of a generated module is needed to run it; None when it builds kernels of another kind than C++ bindings."""
    tree = ast.parse(source)
    kernels: dict[str, Path] = {}
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and _mentions(node.value, _BUILDER):
            if not _is_kernel(node.value):
                return None
            name = node.targets[0].id
            kernels[name] = Path(namespace[name].__self__.__file__)
        elif isinstance(node, ast.ClassDef | ast.Assign | ast.Import | ast.ImportFrom) and not _mentions(node, "AsyncCompile"):
            kept.append(node)
    needed = {n.id for node in kept if isinstance(node, ast.ClassDef) for n in ast.walk(node) if isinstance(n, ast.Name)}
    needed |= {"runner", "call", "Runner", "torch"}
    kept = [node for node in kept if _defines(node) & needed]
    return UnitCode(ast.unparse(ast.Module(kept, type_ignores=[])), kernels)


def _mentions(node: ast.AST, name: str) -> bool:
    return any(getattr(n, "id", None) == name or getattr(n, "name", None) == name for n in ast.walk(node))


def _is_kernel(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) == f"{_BUILDER}.cpp_pybinding"


def _defines(node: ast.stmt) -> set[str]:
    """The global names that a statement binds."""
    if isinstance(node, ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {(alias.asname or alias.name).split(".")[0] for alias in node.names}


def write_units(codes: list[UnitCode], folder: Path) -> list[dict[str, Any]]:
    """Copy units into `folder`: for each its source file and kernels by name, relative to the folder."""
    described = []
    for number, code in enumerate(codes):
        source = folder / f"unit_{number}.py"
        source.write_text(code.source, encoding="utf-8")
        if code.kernels is None:
            described.append({"source": source.name, "kernels": None})
            continue
        files = {}
        for name, library in code.kernels.items():
            files[name] = f"{library.name.split('.')[0]}.so"
            if not (folder / files[name]).exists():
                shutil.copyfile(library, folder / files[name])
        described.append({"source": source.name, "kernels": files})
    return described


def load_units(described: list[dict[str, Any]], files: dict[str, bytes], folder: Path) -> list[Unit]:
    """The callables of units that `write_units` described; `files` are the verified contents of the entry's folder."""
    if all(unit["kernels"] is not None for unit in described):
        tape.load()
        return [_load(number, files[unit["source"]], unit["kernels"], folder) for number, unit in enumerate(described)]
    from torch._inductor import config

    # a copy, for what is built on loading must not change the entry; kept, for tuning in the first runs writes beside kernels
    copy = tempfile.TemporaryDirectory(prefix="lab-compiled-", ignore_cleanup_errors=True)
    _copies.append(copy)
    for name, content in files.items():
        if name.startswith(f"{WORK}/"):
            path = Path(copy.name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    with inductor_session(Path(copy.name, WORK)), config.patch(compile_threads=1):  # all is compiled: no workers
        return [_load_module(files[unit["source"]], _load_kernels(unit["kernels"] or {}, folder)) for unit in described]


class ModuleUnit:
    """A piece as Inductor's wrapper in Python. Its function takes the arguments as one list, which it empties."""

    def __init__(self, call: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._call = call

    def bind(self, template: list[Any], values: Sequence[tuple[int, int]]) -> Run:
        """As Unit.bind has it."""

        def run(registers: list[Any]) -> Sequence[Any]:
            arguments = template.copy()
            for position, register in values:
                arguments[position] = registers[register]
            return self._call(arguments)

        return run


def _load(number: int, source: bytes, kernels: dict[str, str], folder: Path) -> Unit:
    """A piece for the CPU: as a tape, or in Python where its wrapper does what a tape cannot."""
    loops = {name: tape.address_of(folder / file) for name, file in kernels.items()}
    try:
        return tape.TapeUnit(tape.translate(source.decode("utf-8"), loops))
    except tape.Untranslatable as reason:
        log.info("piece %d of the model is driven from Python: no step of a tape stands for %s", number, reason)
        return _load_module(source, _load_kernels(kernels, folder))


def _load_module(source: bytes, kernels: dict[str, Any]) -> Unit:
    loader = _TextLoader(source.decode("utf-8"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("lab_compiled_unit", loader))
    vars(module).update(kernels)
    loader.exec_module(module)
    return ModuleUnit(module.call)


def _load_kernels(files: dict[str, str], folder: Path) -> dict[str, Any]:
    return {name: _load_kernel(folder / file) for name, file in files.items()}


def _load_kernel(library: Path) -> Any:
    os.environ[DATA_PTR_VARIABLE] = str(torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr)
    spec = importlib.util.spec_from_file_location("kernel", library)  # the module's own name for its entry point
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel


class _TextLoader(importlib.abc.InspectLoader):
    """Runs a module from a text in hand: no file is read again, and no bytecode cache takes part."""

    def __init__(self, source: str) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source

    def is_package(self, fullname: str) -> bool:
        return False
