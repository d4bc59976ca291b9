"""The kernels of `flash` for CUDA: plans and launches of the Triton kernels.

A step's rows are of two sorts. Rows with few tokens go to the decode kernel, one program for each row, KV head and split of
the keys. Rows with more go to the prefill kernel, whose tiles are listed by the plan, the longest contexts first, so that
no long one is left for the end. A plan's launches depend on its batch's shape alone: a captured graph of them serves every
later batch whose rows are no longer than `max_q` of the batch it was captured with.

A batch-invariant spec sends all rows to the prefill kernel, which cuts keys at multiples of its tile from the row's first
one and never splits them: the order in which a query's sums are made then follows from its position alone.
"""

from typing import Any

import numpy as np
import torch

from lab.api import AttentionSpec, UserError, dataclass

from .._quantized import fixed_scales
from . import kernels
from .configs import Config, Gpu, decode_config, power_of_two, prefill_config

LEAST_M = 16  # rows of the smallest tile that tensor cores multiply
LARGEST_DECODE_M = 64  # tokens x heads of a group that the decode kernel takes in a step of short rows only
MAX_SPLITS = 32
FP8_CAPABILITY = (8, 9)  # of a GPU that converts fp8
PROGRAMS_WANTED = 4  # decode programs for each multiprocessor
KV_SCALES = {"none": kernels.NONE, "token_head": kernels.TOKEN_HEAD, "head": kernels.HEAD}
WRITE_TILE = 2048  # entries that one program of the write kernel stores, at most


@dataclass(slots=True)
class Plan:
    """A step's launches. The tensors of the batch are at the same addresses in every step that replays a captured graph."""

    num_tokens: int  # padding included
    num_rows: int  # padding included
    small_q: int  # rows with at most so many tokens go to the decode kernel
    decodes: bool  # whether there may be such rows
    num_splits: int
    q_start_R1: torch.Tensor
    ctx_len_R: torch.Tensor
    blocks_RM: torch.Tensor
    tiles_X2: torch.Tensor | None  # (row, first token) of each prefill tile, row -1 is none; None: no row has many tokens
    partial: torch.Tensor | None  # the splits' results and their log-sum-exp (log2), where there are splits
    lse: torch.Tensor | None


class CudaKernels:
    """Plans, writes and attends for one layer's shape. `gpu` is that of the spec's device if it is not given."""

    dim_multiple = 1

    def __init__(self, options: Any, spec: AttentionSpec, gpu: Gpu | None = None) -> None:
        if spec.kv_dtype == torch.float8_e4m3fn and spec.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(spec.device)
            if (major, minor) < FP8_CAPABILITY:
                raise UserError(
                    f"cache.dtype=fp8: attention plugin 'flash' needs a GPU of compute capability 8.9 for it, and this one has "
                    f"{major}.{minor}. Use cache.dtype=int8, or +attention=sdpa."
                )
        self._spec = spec
        self._gpu = gpu or _gpu(spec.device)
        self._num_splits = options.num_splits
        self._group = spec.num_heads // spec.num_kv_heads
        self._dim = max(16, power_of_two(spec.head_dim))
        self._bytes = spec.dtype.itemsize, max(spec.kv_dtype.itemsize, spec.dtype.itemsize)
        self._prefill = prefill_config(self._gpu, self._group, self._dim, *self._bytes)
        self._decode: dict[int, Config] = {}
        self._write_heads = min(power_of_two(spec.num_kv_heads), max(1, WRITE_TILE // self._dim))
        with_scales = spec.head_dim + 2 * (spec.kv_scales == "token_head")  # bytes of a row and its scale
        self._cache = {
            "NUM_KV": spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "BLOCK_SIZE": spec.block_size,
            "HEAD_SIZE": 2 * spec.block_size * with_scales,
            "KV_SCALES": KV_SCALES[spec.kv_scales],
        }
        self._layer = {
            **self._cache,
            "GROUP": self._group,
            "SCALE": float(spec.scale),
            "SOFTCAP": float(spec.softcap or 0.0),
            "WINDOW": spec.sliding_window or 0,
            "BLOCK_D": self._dim,
        }

    def plan(self, batch: Any, reuse: Plan | None = None) -> Plan:
        plan = reuse or self._new_plan(batch)
        assert (plan.num_tokens, plan.num_rows) == (batch.num_tokens, len(batch.ctx_len_R)), "the plan is of another shape"
        plan.q_start_R1, plan.ctx_len_R, plan.blocks_RM = batch.q_start_R1, batch.ctx_len_R, batch.blocks_RM
        if plan.tiles_X2 is not None:
            tiles_X2 = np.full(plan.tiles_X2.shape, -1, np.int32)
            found_Y2 = self._tiles(batch, plan.small_q)
            tiles_X2[: len(found_Y2)] = found_Y2
            plan.tiles_X2.copy_(_pinned(tiles_X2, plan.tiles_X2.device), non_blocking=True)
        return plan

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        num_tokens, num_kv_heads, _ = k_TKH.shape
        numbers = kv if self._spec.kv_scales == "none" else kv.view(torch.int8)
        kernels.write_kernel[(num_tokens, -(-num_kv_heads // self._write_heads))](
            *(k_TKH, v_TKH, numbers, self._scales(kv), slots_T, *k_TKH.stride()[:2], *v_TKH.stride()[:2]),
            **self._cache,
            FP8=kv.dtype == torch.float8_e4m3fn,
            BLOCK_H=self._write_heads,
            BLOCK_D=self._dim,
            num_warps=4,
        )

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        if plan.tiles_X2 is not None:
            config = self._prefill
            kernels.prefill_kernel[(self._spec.num_kv_heads, len(plan.tiles_X2))](
                *(q_TNH, kv, self._scales(kv), out_TNH, plan.tiles_X2, plan.q_start_R1, plan.ctx_len_R, plan.blocks_RM),
                *(plan.num_rows, plan.num_tokens, len(plan.tiles_X2), *self._strides(q_TNH, out_TNH, plan)),
                **self._layer,
                INVARIANT=self._spec.batch_invariant,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        if plan.decodes:
            self._attend_short_rows(q_TNH, kv, plan, out_TNH)

    def _attend_short_rows(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        padded_to = plan.num_tokens if plan.tiles_X2 is None else 0  # the prefill kernel sees to padding where it runs
        is_split = plan.num_splits > 1
        partial, lse = (plan.partial, plan.lse) if is_split else (out_TNH, out_TNH)  # not touched without splits
        block_m = max(LEAST_M, power_of_two(plan.small_q * self._group))
        config = self._decode_config(block_m)
        kernels.decode_kernel[(self._spec.num_kv_heads, plan.num_splits, plan.num_rows)](
            *(q_TNH, kv, self._scales(kv), out_TNH, partial, lse, plan.q_start_R1, plan.ctx_len_R, plan.blocks_RM),
            *(plan.num_rows, padded_to, plan.small_q, plan.num_splits, *self._strides(q_TNH, out_TNH, plan)),
            **self._layer,
            SPLIT=is_split,
            BLOCK_M=block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if is_split:
            kernels.reduce_kernel[(self._spec.num_heads, plan.small_q, plan.num_rows)](
                *(out_TNH, partial, lse, plan.q_start_R1, plan.num_rows, padded_to, plan.small_q, plan.num_splits),
                out_TNH.stride(0),
                NUM_HEADS=self._spec.num_heads,
                HEAD_DIM=self._spec.head_dim,
                MAX_SPLITS=MAX_SPLITS,
                BLOCK_D=self._dim,
                num_warps=4,
            )

    def _scales(self, kv: torch.Tensor) -> torch.Tensor:
        """The tensor that the kernels find scales in; that of a cache without any is not touched."""
        if self._spec.kv_scales == "token_head":
            return kv.view(torch.bfloat16)
        return fixed_scales(kv, self._spec.num_kv_heads) if self._spec.kv_scales == "head" else kv

    def _new_plan(self, batch: Any) -> Plan:
        num_rows, device, group = len(batch.ctx_len_R), batch.ctx_len_R.device, self._group
        if self._spec.batch_invariant:
            is_short, small_q, decodes = False, 0, False
        else:
            is_short = batch.max_q <= max(1, LARGEST_DECODE_M // group)
            small_q = batch.max_q if is_short else max(1, LEAST_M // group)
            decodes = is_short or int(np.diff(batch.q_start_R1_cpu).min()) <= small_q
        num_splits = self._splits(num_rows) if decodes else 1
        tiles_X2 = None if is_short else torch.empty(self._most_tiles(batch, small_q), 2, dtype=torch.int32, device=device)
        partial = lse = None
        if num_splits > 1:
            lse = torch.empty(num_rows, small_q, self._spec.num_heads, num_splits, dtype=torch.float32, device=device)
            partial = lse.new_empty(*lse.shape, self._spec.head_dim)
        return Plan(
            num_tokens=batch.num_tokens,
            num_rows=num_rows,
            small_q=small_q,
            decodes=decodes,
            num_splits=num_splits,
            q_start_R1=batch.q_start_R1,
            ctx_len_R=batch.ctx_len_R,
            blocks_RM=batch.blocks_RM,
            tiles_X2=tiles_X2,
            partial=partial,
            lse=lse,
        )

    def _splits(self, num_rows: int) -> int:
        """So many that a small batch fills the GPU; contexts are not asked, for a captured graph outlives them."""
        if self._num_splits:
            return min(self._num_splits, MAX_SPLITS)
        wanted = PROGRAMS_WANTED * self._gpu.num_sms // (num_rows * self._spec.num_kv_heads)
        return min(max(wanted, 1), MAX_SPLITS)

    def _most_tiles(self, batch: Any, small_q: int) -> int:
        """Prefill tiles of the batch of this shape that has the most of them."""
        num_tokens = batch.num_tokens
        return num_tokens // self._tile_tokens + min(len(batch.ctx_len_R), num_tokens // (small_q + 1))

    @property
    def _tile_tokens(self) -> int:
        return self._prefill.block_m // self._group

    def _tiles(self, batch: Any, small_q: int) -> np.ndarray:
        """(row, first token) of each tile of the rows with many tokens, the one with the most keys first."""
        count_R = np.diff(batch.q_start_R1_cpu)
        rows = np.flatnonzero(count_R > small_q)
        num_tiles = -(-count_R[rows] // self._tile_tokens)
        row_Y = np.repeat(rows, num_tiles)
        first_Y = (np.arange(len(row_Y)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * self._tile_tokens
        num_keys_Y = batch.ctx_len_R_cpu[row_Y] - count_R[row_Y] + first_Y
        return np.stack([row_Y, first_Y], 1)[np.argsort(-num_keys_Y, kind="stable")]

    def _decode_config(self, block_m: int) -> Config:
        if block_m not in self._decode:
            self._decode[block_m] = decode_config(self._gpu, self._dim, *self._bytes, block_m)
        return self._decode[block_m]

    @staticmethod
    def _strides(q_TNH: torch.Tensor, out_TNH: torch.Tensor, plan: Plan) -> tuple[int, int, int, int]:
        return q_TNH.stride(0), q_TNH.stride(1), out_TNH.stride(0), plan.blocks_RM.stride(0)


def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":  # Triton's interpreter
        return Gpu()
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array in memory from which it is copied without waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
