"""Compiles lab's pieces of a model for a GPU that is not there: run by test_cuda_pieces.py in a process of its own.

    python cuda_pieces.py FOLDER CAPABILITY [invariant]

Pieces are captured on the CPU, where the model's code is the same, and given to Inductor with inputs on a pretended GPU, whose
properties Inductor is told. It writes the code that would run; its Triton kernels are compiled down to machine code. Only
running them takes a GPU. Prints one JSON object for each piece: its kernels, their targets, and the library and operator
calls beside them. `invariant`: as with debug.batch_invariant=true.

A torch without CUDA stops in two places, which are stepped around: indexing a tensor asks CUDA for its current device before
anything else, and the module that Inductor writes imports CUDA's streams. So indexing is done by the operators that it comes
down to, and the module is read, not run.
"""

import ast
import contextlib
import itertools
import json
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch._dynamo import device_interface
from torch._inductor import config as inductor_config
from torch._inductor import graph as inductor_graph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _triton as torch_triton
from triton.backends.compiler import GPUTarget

from lab import registry
from lab.compile.pieces import Graph, split_at_attention, with_graph
from lab.compile.units import compile_piece, inductor_session
from lab.model import load
from lab.model.config import read_config
from lab.model.layers.fused import fused_for

CUDA = torch.device("cuda", 0)
SMS = {80: 108, 90: 132}


class Written(RuntimeError):
    """Carries the code that Inductor wrote."""


def pretend_gpu(capability: int) -> None:
    """Tell Inductor and Triton of a GPU; nothing of it can run."""
    major, minor = divmod(capability, 10)
    known = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32}
    known |= {"multi_processor_count": SMS[capability], "major": major, "max_threads_per_block": 1024}
    facts = SimpleNamespace(
        **known, minor=minor, name="pretended", gcnArchName="", total_memory=80 << 30, L2_cache_size=40 << 20
    )
    properties = DeviceProperties(type="cuda", index=0, cc=capability, **known)
    DeviceProperties.create = classmethod(lambda cls, device: properties)
    answers = {
        "is_available": True,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "get_compute_capability": capability,
        "get_device_properties": facts,
        "current_device": 0,
        "device_count": 1,
        "synchronize": None,
    }
    for name, answer in answers.items():
        setattr(device_interface.CudaInterface, name, staticmethod(lambda *_, answer=answer, **__: answer))
    device_interface.CudaInterface.Worker.get_device_properties = staticmethod(lambda *_: facts)
    torch.cuda.get_device_properties = lambda *_: facts
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    torch.cuda.current_device = lambda: 0
    torch_triton.has_triton = lambda *_: True
    triton_helpers.set_driver_to_gpu = lambda: None
    target = GPUTarget("cuda", capability, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def index_by_operators(self: torch.Tensor, index: Any) -> torch.Tensor:
    """What `tensor[index]` comes down to."""
    index = index if isinstance(index, tuple) else (index,)
    aten, out, dim = torch.ops.aten, self, 0
    for part in index:
        if part is Ellipsis:
            dim += self.dim() - sum(1 for other in index if other is not None and other is not Ellipsis)
        elif part is None:
            out, dim = aten.unsqueeze.default(out, dim), dim + 1
        elif isinstance(part, slice):
            if part != slice(None):
                out = aten.slice.Tensor(out, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, torch.Tensor):
            out, dim = aten.index.Tensor(out, [None] * dim + [part]), dim + 1
        else:
            out = aten.select.int(out, dim, part)
    return out


def code_of(piece: torch.fx.GraphModule) -> str:
    """What Inductor writes for the piece when its inputs are on the GPU."""
    for node in piece.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            with value.fake_mode:
                node.meta["example_value"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
    try:
        compile_piece(piece)
    except RuntimeError as error:  # wrapped on its way by Dynamo and Inductor
        while error is not None and not isinstance(error, Written):
            error = error.__cause__ or error.__context__
        if error is None:
            raise
        return error.args[0]
    raise AssertionError("Inductor wrote no module")


def write_only(self: Any) -> None:
    raise Written(self.codegen()[0].value)


def kernels_of(code: str, folder: Path) -> dict[str, str]:
    """The Triton kernels that a module holds, each with its PTX: all of their configurations must compile."""
    compiled = {}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton":
            name, source = (argument.value for argument in node.args[:2])
            path = folder / f"{name}.py"
            path.write_text(source, encoding="utf-8")
            spec = spec_from_file_location(name, path)
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
            tuner = getattr(module, name)
            results = [tuner._precompile_config(config) for config in tuner.configs]
            assert all(result.kernel.asm["cubin"] for result in results)
            compiled[name] = results[0].kernel.asm["ptx"]
    return compiled


def main(folder: Path, capability: int, invariant: bool) -> None:
    registry.discover()
    plain = sys.modules[registry.get("quant", "none").load().__module__]
    plain._can_pack, plain._cpu_linear.serves = (lambda *_: False), (lambda *_: False)  # weights as they are on a GPU
    fused, multiplies_by_rows = fused_for(CUDA, torch.bfloat16, invariant), plain._multiplies_by_rows
    plain._multiplies_by_rows = lambda weight: multiplies_by_rows(SimpleNamespace(device=CUDA))
    load.fused_for = lambda *_: fused
    quant, moe = (
        entry.load()(entry.make_options({})) for entry in (registry.get("quant", "none"), registry.get("moe", "none"))
    )
    config, device = read_config(folder), torch.device("cpu")
    model = load.load_model(
        folder,
        config,
        dtype=torch.bfloat16,
        device=device,
        load_format="dummy",
        quant=quant,
        moe=moe,
        max_model_len=512,
        batch_invariant=invariant,
    )
    pretend_gpu(capability)
    FakeTensor.__getitem__ = FunctionalTensor.__getitem__ = index_by_operators
    inductor_graph.GraphLowering.compile_to_module = write_only

    def use(graph: Graph) -> list[str]:
        split = split_at_attention(graph)
        assert len(split.program.calls) == 2 * config.num_layers + 1
        return [code_of(piece) for piece in split.pieces]

    with inductor_session(folder / "work"), inductor_config.patch(use_static_triton_launcher=False):
        for number, code in enumerate(with_graph(model, device, use)):
            (folder / str(number)).mkdir()
            ptx = kernels_of(code, folder / str(number))
            targets = sorted(set(itertools.chain(*(re.findall(r"\.target (\w+)", text) for text in ptx.values()))))
            calls = re.findall(r"(?:extern_kernels|torch\.ops\.lab_\w+)\.(\w+)(?:\.default)?\(", code)
            symbolic = bool(re.search(r"empty_strided_cuda\(\(u\d+, ", code))
            print(json.dumps({"kernels": sorted(ptx), "targets": targets, "calls": calls, "symbolic": symbolic}))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(Path(sys.argv[1]), int(sys.argv[2]), invariant="invariant" in sys.argv)
