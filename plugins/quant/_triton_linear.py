"""Linear layers on CUDA whose rows do not depend on their number: debug.batch_invariant.

cuBLAS takes another kernel, and with it another order of sums, for another number of rows. Here a layer has one tile for all
numbers of them: each output is summed in float32 over its inputs from the first to the last, with no split among programs,
and products of float32 are those of float32 (no tf32). Rows past the last are zeros in the tile and are not stored. The tile
follows from the dtype and the layer's width alone.

Names: M rows and N outputs of a tile, K inputs that are multiplied in one step.
"""

import torch
import triton
import triton.language as tl

from lab.api import dataclass

LEAST_PROGRAMS = 44  # for one row: tiles are narrower where a layer would give fewer, a third of an H100's multiprocessors
ALIGNMENT = 16  # bytes; what begins elsewhere is copied, for Triton makes another kernel for it


@dataclass(frozen=True, slots=True)
class Tile:
    """How a layer is cut, and how Triton runs it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_of(dtype: torch.dtype, out_features: int) -> Tile:
    """Of a layer; the number of rows is not asked."""
    if dtype == torch.float32:  # by ordinary arithmetic: from registers
        return Tile(32, 64 if out_features >= 64 * LEAST_PROGRAMS else 32, 16, 4, 3)
    block_n = next((n for n in (128, 64) if out_features >= n * LEAST_PROGRAMS), 32)
    return Tile(64, block_n, 64, 4, 4)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y (rows, OUT) = x (rows, IN) @ w (OUT, IN)^T, all dense. Grid: (tiles of rows, tiles of outputs)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = tl.arange(0, BLOCK_K)
    is_row = (rows < num_rows)[:, None]
    is_output = (outputs < OUT)[:, None]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * IN + inputs[None, :]
    w_ptrs = w_ptr + outputs.to(tl.int64)[:, None] * IN + inputs[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        is_input = (first + inputs < IN)[None, :]
        x = tl.load(x_ptrs + first, mask=is_row & is_input, other=0.0)
        w = tl.load(w_ptrs + first, mask=is_output & is_input, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * OUT + outputs[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_row & (outputs < OUT)[None, :])


def multiply(x_TI: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    """y_TO = x_TI @ w_OI^T, each row by itself to the last bit."""
    (num_rows, in_features), out_features = x_TI.shape, len(w_OI)
    x_TI = x_TI.contiguous()
    if x_TI.data_ptr() % ALIGNMENT:
        x_TI = x_TI.clone()
    y_TO = x_TI.new_empty(num_rows, out_features)
    if not num_rows:
        return y_TO
    tile = tile_of(x_TI.dtype, out_features)
    linear_kernel[(triton.cdiv(num_rows, tile.block_m), triton.cdiv(out_features, tile.block_n))](
        *(x_TI, w_OI, y_TO, num_rows),
        IN=in_features,
        OUT=out_features,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y_TO


_library = torch.library.Library("lab_rows_linear", "DEF")
_library.define("linear(Tensor x, Tensor weight) -> Tensor")
_library.impl("linear", multiply, "CUDA")


def _linear_fake(x_TI: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    return x_TI.new_empty((x_TI.shape[0], w_OI.shape[0]))


torch.library.register_fake("lab_rows_linear::linear", _linear_fake, lib=_library)
