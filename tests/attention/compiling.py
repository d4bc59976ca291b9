"""Compiles what `flash` would launch on a GPU, for a GPU that is not there: launches of real plans, taken down and built."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

SPECIAL = 16  # what Triton compiles for separately: pointers and integers that are multiples of it


@dataclass(frozen=True)
class Launch:
    """One kernel with the arguments and options of a launch."""

    name: str
    function: JITFunction
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def compile(self, capability: int) -> Any:
        """The kernel compiled for the architecture sm_<capability>, as Triton's launcher would have it."""
        names = self.function.arg_names
        values = dict(zip(names, self.args, strict=False)) | {n: v for n, v in self.options.items() if n in names}
        kept_plain = set(self.function.do_not_specialize)
        signature, constants, attrs = {}, {}, {}
        for index, (name, parameter) in enumerate(zip(names, self.function.params, strict=True)):
            value = values[name]
            if parameter.is_constexpr:
                signature[name], constants[name] = "constexpr", value
                continue
            signature[name] = _type_of(value)
            is_special = isinstance(value, torch.Tensor) or (value % SPECIAL == 0 and name not in kept_plain)
            if is_special:
                attrs[(index,)] = [["tt.divisibility", SPECIAL]]
        source = ASTSource(self.function, signature, constexprs=constants, attrs=attrs)
        launch_options = {name: value for name, value in self.options.items() if name not in names}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch_options)


def stack_bytes(compiled: Any, folder: Path) -> int:
    """Local memory of a thread: what did not fit into its registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(re.search(r"STACK:(\d+)", said).group(1))


class Recorder:
    """Stands in for a module of kernels: launching one only takes the launch down."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        return _Recorded(self, name, getattr(self._module, name))


@dataclass(frozen=True)
class _Recorded:
    recorder: Recorder
    name: str
    function: JITFunction

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.recorder.launches.append(Launch(self.name, self.function, grid, args, options))


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv"}
        names |= {"int8": "i8", "int32": "i32", "int64": "i64"}
        return "*" + names[str(value.dtype).removeprefix("torch.")]
    assert isinstance(value, int)
    return "i32"
