"""Weights in the model's own dtype: the reference of the quant kind, and the plain way to run.

On the CPU a weight is repacked once, for own kernels (see _cpu_linear) or, where those cannot be built and for float16, into
oneDNN's own layout. Both multiply a few rows about twice as fast as torch.nn.functional.linear. A tensor in oneDNN's layout
cannot be part of a compiled graph, so that product is one opaque op that gets a handle, an ordinary tensor, and looks the
packed weight up. A dtype that oneDNN cannot multiply on this machine either (float16 on most CPUs) and every other device use
torch.nn.functional.linear; but on CUDA own kernels where rows must not depend on their number (see _triton_linear).
"""

import itertools
from importlib.util import find_spec
from weakref import WeakValueDictionary

import torch
from torch.nn import functional

from lab.api import Capabilities, LinearSpec, ParamSpec, Quant, UserError, register

from . import _cpu_linear

_packed: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # owned by the layers
_handles = itertools.count()
_library = torch.library.Library("lab_quant_none", "DEF")
_library.define("packed_linear(Tensor x, Tensor handle, int out_features) -> Tensor")


def _packed_linear(x_TI: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_TI, _packed[handle.item()], None, "none", [], "")


def _packed_linear_fake(x_TI: torch.Tensor, handle: torch.Tensor, out_features: int) -> torch.Tensor:
    return x_TI.new_empty((*x_TI.shape[:-1], out_features))


_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("lab_quant_none::packed_linear", _packed_linear_fake, lib=_library)


def _can_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies this dtype on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return weight.dtype == torch.float32


def _multiplies_by_rows(weight: torch.Tensor) -> bool:
    """Whether rows can be multiplied independently of their number where this weight is; if so, loads what does it."""
    if weight.device.type != "cuda" or find_spec("triton") is None:
        return False
    from . import _triton_linear  # noqa: F401

    return True


@register("quant", "none")
class NoQuant(Quant):
    """Weights in the model's own dtype (on the CPU repacked for the kernels that multiply by them)."""

    capabilities = Capabilities(
        devices={"cpu", "cuda"}, dtypes={"float32", "bfloat16", "float16"}, features={"moe", "batch_invariant"}
    )
    libraries = {_cpu_linear.NAMESPACE: _cpu_linear.SOURCES}

    def params(self, spec: LinearSpec) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((spec.out_features, spec.in_features), spec.dtype)}

    def finish(self, w: dict[str, torch.Tensor], spec: LinearSpec) -> dict[str, torch.Tensor]:
        weight = w["weight"]
        if _cpu_linear.serves(weight):
            if spec.gated and spec.out_features % (2 * _cpu_linear.BLOCK) == 0:
                return {"gated_blocks": _cpu_linear.pack(_cpu_linear.interleave(weight))}
            return {"blocks": _cpu_linear.pack(weight)}
        if spec.batch_invariant:
            if _multiplies_by_rows(weight):
                return {"rows": weight}
            raise UserError(
                "debug.batch_invariant: quant plugin 'none' multiplies rows independently of their number by its own kernels "
                "only, which take float32 and bfloat16 on the CPU and need a C++ compiler there, on CUDA the package 'triton'; "
                f"this is {weight.dtype} on {weight.device.type}."
            )
        if not _can_pack(weight):
            return {"weight": weight}
        number = next(_handles)
        packed = _packed[number] = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return {"handle": torch.tensor(number), "packed": packed}

    def apply(self, w: dict[str, torch.Tensor], x_TI: torch.Tensor, spec: LinearSpec) -> torch.Tensor:
        if "blocks" in w:
            return _cpu_linear.linear(x_TI, w["blocks"], spec.out_features, batch_invariant=spec.batch_invariant)
        if "gated_blocks" in w:
            blocks = w["gated_blocks"]
            y_TO = _cpu_linear.linear(x_TI, blocks, spec.out_features, batch_invariant=spec.batch_invariant)
            return _cpu_linear.deinterleave(y_TO.t()).t()
        if "rows" in w:
            return torch.ops.lab_rows_linear.linear(x_TI, w["rows"])
        if "handle" in w:
            return torch.ops.lab_quant_none.packed_linear(x_TI, w["handle"], spec.out_features)
        return functional.linear(x_TI, w["weight"])

    def argmax(self, w: dict[str, torch.Tensor], x_TI: torch.Tensor, spec: LinearSpec) -> torch.Tensor | None:
        if "blocks" not in w:
            return None
        return _cpu_linear.argmax(x_TI, w["blocks"], spec.out_features, batch_invariant=spec.batch_invariant)

    def gated(self, w: dict[str, torch.Tensor], x_TI: torch.Tensor, spec: LinearSpec) -> torch.Tensor | None:
        if "gated_blocks" not in w:
            return None
        return _cpu_linear.gated(x_TI, w["gated_blocks"], spec.out_features, batch_invariant=spec.batch_invariant)

    def dequantize(self, w: dict[str, torch.Tensor], spec: LinearSpec) -> torch.Tensor:
        if "blocks" in w:
            return _cpu_linear.unpack(w["blocks"], spec.out_features, spec.in_features).float()
        if "gated_blocks" in w:
            return _cpu_linear.deinterleave(_cpu_linear.unpack(w["gated_blocks"], spec.out_features, spec.in_features)).float()
        weight_OI = w["packed"].to_dense() if "packed" in w else w["rows"] if "rows" in w else w["weight"]
        return weight_OI.float()
