"""What lies between a decoder's linear layers: as formulas, and on the CPU as own kernels (native/).

Left to Inductor, the formulas become C++ that wakes all threads for every loop of every kernel, which for one token takes
longer than the work, and an exponential and a division that are slow for thousands; and each takes g++ some ten seconds. A
kernel takes the same roundings as the formula run eagerly. Other devices and dtypes take the formulas, which Inductor fuses;
on CUDA norms are kernels (rows.py) where a row may not depend on the number of rows.
"""

import logging
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn import functional

from lab import native

log = logging.getLogger("lab")

NAMESPACE = "lab_layers"
SOURCES = tuple(Path(__file__).parent / "native" / name for name in ("fused.cpp", "top.cpp"))
DTYPES = (torch.float32, torch.bfloat16)


class Formulas:
    """The reference."""

    is_native = False
    is_invariant = False  # whether a row gets the same bits beside any number of others

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension, in float32 up to the weight and, if it is float32 too, with it."""
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * scaled.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + delta, and x + delta."""
        total = x + delta
        return self.rms_norm(total, weight, eps), total

    def rotate(self, x_TXH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the leading entries of X heads by pairs (i, i + half). cos and sin: (T, 1, half) in float32."""
        half = cos.shape[-1]
        exact = x_TXH.float()
        first, second = exact[..., :half], exact[..., half : 2 * half]
        # rounded before they are joined: compiled, the join is then the one pass that writes, with no float32 copy in between
        parts = [(first * cos - second * sin).to(x_TXH.dtype), (second * cos + first * sin).to(x_TXH.dtype)]
        if 2 * half < x_TXH.shape[-1]:
            parts.append(x_TXH[..., 2 * half :])
        return torch.cat(parts, dim=-1)

    def silu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, of gate and up side by side: (T, 2 F) to (T, F)."""
        gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
        return functional.silu(gate_TF) * up_TF

    def gelu_mul(self, gate_up_TG: torch.Tensor) -> torch.Tensor:
        """As silu_mul, with gelu in its tanh form."""
        gate_TF, up_TF = gate_up_TG.chunk(2, dim=-1)
        return functional.gelu(gate_TF, approximate="tanh") * up_TF

    def take_rows(self, table_VH: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
        """The rows of a table: (T, H). An index outside of it is an error."""
        return functional.embedding(index_T, table_VH)

    def top(self, logits_LV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k likeliest entries of each row, the likeliest first: log-probabilities in float32, and int64 ids."""
        exact_LV = logits_LV.float()
        top_LK, ids_LK = exact_LV.topk(k, -1)
        return (top_LK - exact_LV.logsumexp(-1, keepdim=True)).clamp_(max=0.0), ids_LK


class Kernels(Formulas):
    """The same by the operators in native/, opaque to torch.compile."""

    is_native = True
    is_invariant = True

    def __init__(self) -> None:
        native.load(NAMESPACE, SOURCES)
        ops = torch.ops.lab_layers
        self.rms_norm, self.add_rms_norm = ops.rms_norm.default, ops.add_rms_norm.default
        self.rotate, self.take_rows = ops.rotate.default, ops.take_rows.default
        self.silu_mul, self.gelu_mul = ops.silu_mul.default, ops.gelu_mul.default
        self.top = ops.top.default
        for name, fake in _FAKES.items():
            torch.library.register_fake(f"{NAMESPACE}::{name}", fake, allow_override=True)


_FAKES = {
    "rms_norm": lambda x, weight, eps: x.new_empty(x.shape),
    "add_rms_norm": lambda x, delta, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    "rotate": lambda x, cos, sin: x.new_empty(x.shape),
    "silu_mul": lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)),
    "gelu_mul": lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)),
    "take_rows": lambda table, index: table.new_empty((index.shape[0], table.shape[1])),
}


def fused_for(device: torch.device, dtype: torch.dtype, batch_invariant: bool = False) -> Formulas:
    """The kernels where they can be had, which takes a compiler on the first use; else the formulas.

    On CUDA there are kernels for `batch_invariant` alone, where Triton is installed.
    """
    if device.type == "cuda" and batch_invariant and find_spec("triton") is not None:
        from lab.model.layers.rows import RowKernels

        return RowKernels()
    if device.type != "cpu" or dtype not in DTYPES or native.available() is not None:
        return Formulas()
    try:
        return Kernels()
    except native.BuildError as error:
        log.warning("norms, rotations and activations run without own kernels, and slower: %s", error)
        return Formulas()
