"""Norms on CUDA by own Triton kernels, a row by a program: debug.batch_invariant.

Inductor reduces a row by as many threads as the number of rows leaves free, and may cut it into parts: the order of the sum
follows from the batch. These kernels are opaque to it. What else lies between linear layers has no sums: an element is the
same expression of its own inputs in whatever tile it is computed, so rotations and activations remain formulas.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from lab.model.layers.fused import Formulas

NAMESPACE = "lab_rows"
ENTRIES_PER_THREAD = 16


@triton.jit
def rms_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    SIZE: tl.constexpr,
    EPS: tl.constexpr,
    WITH_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The norm of a dense row of x into y, rounded as `Formulas.rms_norm` says. Grid: (rows,).

    WITH_DELTA: of x + delta, which goes to total; else neither is touched.
    """
    place = tl.arange(0, BLOCK)
    mask = place < SIZE
    first = tl.program_id(0).to(tl.int64) * SIZE
    x = tl.load(x_ptr + first + place, mask=mask, other=0.0)
    if WITH_DELTA:
        delta = tl.load(delta_ptr + first + place, mask=mask, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + first + place, x, mask=mask)
    exact = x.to(tl.float32)
    scaled = exact * tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + EPS)
    weight = tl.load(weight_ptr + place, mask=mask, other=0.0)
    rounded = scaled.to(weight.dtype).to(tl.float32)
    y = (weight.to(tl.float32) * rounded).to(weight.dtype)
    tl.store(y_ptr + first + place, y.to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As Formulas.rms_norm."""
    return _norm(x.contiguous(), None, weight, eps)[0]


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As Formulas.add_rms_norm."""
    return _norm(x.contiguous(), delta.contiguous(), weight, eps)


def _norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and what it is of."""
    size = x.shape[-1]
    y, total = torch.empty_like(x), x if delta is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    if x.numel():
        rms_norm_kernel[(x.numel() // size,)](
            *(x, x if delta is None else delta, weight, y, total),
            SIZE=size,
            EPS=eps,
            WITH_DELTA=delta is not None,
            BLOCK=block,
            num_warps=min(max(block // (32 * ENTRIES_PER_THREAD), 1), 16),
        )
    return y, total


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_library.define("add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)")
_library.impl("rms_norm", rms_norm, "CUDA")
_library.impl("add_rms_norm", add_rms_norm, "CUDA")


def _rms_norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _add_rms_norm_fake(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
    return x.new_empty(x.shape), x.new_empty(x.shape)


torch.library.register_fake(f"{NAMESPACE}::rms_norm", _rms_norm_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::add_rms_norm", _add_rms_norm_fake, lib=_library)


class RowKernels(Formulas):
    """The formulas, with norms by the operators of this module."""

    is_invariant = True

    def __init__(self) -> None:
        self.rms_norm, self.add_rms_norm = torch.ops.lab_rows.rms_norm.default, torch.ops.lab_rows.add_rms_norm.default
