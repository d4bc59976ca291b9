"""Linear layers on the CPU by own kernels (native/), which read a weight once, front to back, for any number of rows.

One packed copy of a weight serves every number of rows, and is an ordinary tensor: compiled graphs take it as an input, so
layers of one shape share a compiled piece. Sums are kept in float32.

`batch_invariant` gives a row the same bits beside any number of others: one row alone then takes the kernel of many.
"""

import functools
import sys
from pathlib import Path

import torch
from torch.nn import functional

from lab.api import native

NAMESPACE = "lab_linear"
SOURCES = (Path(__file__).parent / "native" / "linear.cpp",)
BLOCK = 16  # outputs stored side by side
DEPTH = 32  # what the inputs are padded to a multiple of


@functools.cache
def ready() -> bool:
    """Whether the kernels are loaded; they are built when they never were. Says so when they cannot be."""
    reason = native.available()
    if reason is None:
        try:
            native.load(NAMESPACE, SOURCES)
        except native.BuildError as error:
            reason = str(error)
    if reason is not None:
        print(
            f"lab: linear layers run by oneDNN, at about half the speed for a few rows: {reason}", file=sys.stderr, flush=True
        )
        return False
    torch.library.register_fake(f"{NAMESPACE}::linear", _linear_fake)
    torch.library.register_fake(f"{NAMESPACE}::gated", _gated_fake)
    torch.library.register_fake(f"{NAMESPACE}::argmax", _argmax_fake)
    return True


def _linear_fake(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, batch_invariant: bool = False) -> torch.Tensor:
    return x_TI.new_empty((x_TI.shape[0], out_features))


def _argmax_fake(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, batch_invariant: bool = False) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape[0], dtype=torch.int64)


def _gated_fake(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, batch_invariant: bool = False) -> torch.Tensor:
    return x_TI.new_empty((x_TI.shape[0], out_features // 2))


def serves(weight: torch.Tensor) -> bool:
    """Whether the kernels multiply by this weight here."""
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16) and ready()


def pack(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight in the blocks that native/blocks.h describes: (blocks, padded inputs, 16)."""
    rows, inputs = weight_OI.shape
    over_rows, over_inputs = -rows % BLOCK, -inputs % DEPTH
    if over_rows or over_inputs:
        weight_OI = functional.pad(weight_OI, (0, over_inputs, 0, over_rows))
    group = _group(weight_OI.dtype)
    blocks = weight_OI.reshape(-1, BLOCK, weight_OI.shape[1] // group, group).transpose(1, 2)
    return blocks.contiguous().view(len(blocks), -1, BLOCK)


def unpack(packed: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
    """The weight (O, I) that was packed."""
    group = _group(packed.dtype)
    weight_OI = packed.view(len(packed), -1, BLOCK, group).transpose(1, 2).reshape(len(packed) * BLOCK, -1)
    return weight_OI[:out_features, :in_features]


def linear(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, *, batch_invariant: bool = False) -> torch.Tensor:
    """y_TO = x_TI @ w_OI^T, one opaque operator to torch.compile."""
    return torch.ops.lab_linear.linear(x_TI, packed, out_features, batch_invariant)


def argmax(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, *, batch_invariant: bool = False) -> torch.Tensor:
    """ids_T (int64): of each row of `linear` the index of the largest entry, as lab.contracts.quant.Quant.argmax says."""
    return torch.ops.lab_linear.argmax(x_TI, packed, out_features, batch_invariant)


def interleave(weight_OI: torch.Tensor) -> torch.Tensor:
    """Gate and up, one after the other, as blocks of 16 rows of each in turn: what `gated` multiplies by, once packed."""
    return weight_OI.view(2, -1, BLOCK, weight_OI.shape[1]).transpose(0, 1).reshape(weight_OI.shape)


def deinterleave(weight_OI: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave`."""
    return weight_OI.view(-1, 2, BLOCK, weight_OI.shape[1]).transpose(0, 1).reshape(weight_OI.shape)


def gated(x_TI: torch.Tensor, packed: torch.Tensor, out_features: int, *, batch_invariant: bool = False) -> torch.Tensor:
    """silu(gate) * up (T, O / 2) for the packed weight of `interleave`."""
    return torch.ops.lab_linear.gated(x_TI, packed, out_features, batch_invariant)


def _group(dtype: torch.dtype) -> int:
    """How many inputs of one output lie side by side."""
    return 2 if dtype == torch.bfloat16 else 1
