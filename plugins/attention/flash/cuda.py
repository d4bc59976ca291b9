"""The kernels of `flash` for CUDA: plans and launches of the Triton kernels.

A step's rows are of two sorts. Rows with few tokens go to the decode kernel, one program for each row, KV head and split of
the keys. Rows with more go to the prefill kernel, whose tiles are listed by the plan, the longest contexts first, so that
no long one is left for the end. A plan's launches depend on its batch's shape alone: a captured graph of them serves every
later batch whose rows are no longer than `max_q` of the batch it was captured with.

Keys that rows share are attended to by a kernel of its own, once for all of the rows, in steps that no graph holds: a captured
graph's launches may not depend on what its rows share. Layers with a sliding window do without.

A batch-invariant spec sends all rows to the prefill kernel, which cuts keys at multiples of its tile from the row's first
one and never splits them: the order in which a query's sums are made then follows from its position alone.
"""

from typing import Any

import numpy as np
import torch

from lab.api import AttentionSpec, UserError, dataclass

from .._quantized import fixed_scales
from . import kernels
from ._sinks import sinks_of
from .cascade import AUTO, NEVER, Prefix, PrefixSearch, least_shared
from .configs import Config, Gpu, decode_config, power_of_two, prefill_config

LEAST_M = 16  # rows of the smallest tile that tensor cores multiply
LARGEST_DECODE_M = 64  # tokens x heads of a group that the decode kernel takes in a step of short rows only
MAX_SPLITS = 32
FP8_CAPABILITY = (8, 9)  # of a GPU that converts fp8
PROGRAMS_WANTED = 4  # decode programs for each multiprocessor
KV_SCALES = {"none": kernels.NONE, "token_head": kernels.TOKEN_HEAD, "head": kernels.HEAD}
SPARED_BYTES = 32 << 20  # of keys and values that a prefix must spare a layer: less is read while two kernels are launched
LEAST_SHARED_SPLIT = 256  # keys of a prefix that a program attends to, at least
WRITE_TILE = 2048  # entries that one program of the write kernel stores, at most


@dataclass(slots=True)
class Shared:
    """Launches for the keys that rows share, in tiles of tokens and keys. A slot is where one token's result of a tile goes."""

    num_slots: int
    block_m: int
    key_first_R: torch.Tensor  # where each row's own keys begin
    tiles_Y6: torch.Tensor  # (row, first key, last key + 1, first token, tokens, first slot)
    tokens_Z: torch.Tensor  # the tokens of the tiles: places in the step
    slots_TX: torch.Tensor  # of each token, -1 where it has fewer


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
    shared: Shared | None = None
    trees: tuple[torch.Tensor, torch.Tensor] | None = None  # tree_start_R and ancestors_T, where there may be trees of drafts


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
        has_cascade = not spec.sliding_window and not spec.batch_invariant
        self._cascade = least_shared(options.cascade) if has_cascade else NEVER
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
            "SINKS": spec.has_sinks,
            "BLOCK_D": self._dim,
        }

    def plan(self, batch: Any, reuse: Plan | None = None) -> Plan:
        plan = reuse or self._new_plan(batch)
        if reuse is None and self._cascade != NEVER:
            plan.shared = self._find_shared(batch)
        assert reuse is None or plan.shared is None, "a plan for keys that rows share serves one step"
        assert (plan.num_tokens, plan.num_rows) == (batch.num_tokens, len(batch.ctx_len_R)), "the plan is of another shape"
        plan.q_start_R1, plan.ctx_len_R, plan.blocks_RM = batch.q_start_R1, batch.ctx_len_R, batch.blocks_RM
        assert reuse is None or (plan.trees is None) == (batch.trees is None), "a plan with trees is for steps that have them"
        plan.trees = None if batch.trees is None else (batch.trees.start_R, batch.trees.ancestors_T)
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
        self._attend(q_TNH, kv, plan, out_TNH, None)

    def attend_lse(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor
    ) -> None:
        self._attend(q_TNH, kv, plan, out_TNH, lse_TN)

    def _attend(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor | None
    ) -> None:
        if plan.shared is None:
            return self._attend_rows(q_TNH, kv, plan, out_TNH, lse_TN)
        own_TNH = torch.empty(q_TNH.shape, dtype=torch.float32, device=q_TNH.device)
        own_lse_TN = own_TNH.new_zeros(q_TNH.shape[:2])  # padding has none
        self._attend_rows(q_TNH, kv, plan, own_TNH, own_lse_TN)
        return self._add_shared(q_TNH, kv, plan, (own_TNH, own_lse_TN), out_TNH, lse_TN)

    def _attend_rows(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor | None
    ) -> None:
        """Each row by itself, without the keys that it shares."""
        if plan.tiles_X2 is not None:
            config = self._prefill
            kernels.prefill_kernel[(self._spec.num_kv_heads, len(plan.tiles_X2))](
                *(q_TNH, kv, self._scales(kv), self._sinks(kv), out_TNH, _lse_or(out_TNH, lse_TN), plan.tiles_X2),
                *(plan.q_start_R1, plan.ctx_len_R, plan.blocks_RM, _key_first(plan), *_trees(plan)),
                *(plan.num_rows, plan.num_tokens, len(plan.tiles_X2), *_strides(q_TNH, out_TNH, lse_TN, plan)),
                **self._layer,
                INVARIANT=self._spec.batch_invariant,
                WITH_LSE=lse_TN is not None,
                SHARED=plan.shared is not None,
                TREES=plan.trees is not None,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        if plan.decodes:
            self._attend_short_rows(q_TNH, kv, plan, out_TNH, lse_TN)

    def _attend_short_rows(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor | None
    ) -> None:
        padded_to = plan.num_tokens if plan.tiles_X2 is None else 0  # the prefill kernel sees to padding where it runs
        is_split = plan.num_splits > 1
        partial, partial_lse = (plan.partial, plan.lse) if is_split else (out_TNH, out_TNH)  # not touched without splits
        block_m = max(LEAST_M, power_of_two(plan.small_q * self._group))
        config = self._decode_config(block_m)
        kernels.decode_kernel[(self._spec.num_kv_heads, plan.num_splits, plan.num_rows)](
            *(q_TNH, kv, self._scales(kv), self._sinks(kv), out_TNH, partial, partial_lse, _lse_or(out_TNH, lse_TN)),
            *(plan.q_start_R1, plan.ctx_len_R, plan.blocks_RM, _key_first(plan), *_trees(plan)),
            *(plan.num_rows, padded_to, plan.small_q, plan.num_splits, *_strides(q_TNH, out_TNH, lse_TN, plan)),
            **self._layer,
            SPLIT=is_split,
            WITH_LSE=lse_TN is not None,
            SHARED=plan.shared is not None,
            TREES=plan.trees is not None,
            BLOCK_M=block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if is_split:
            kernels.reduce_kernel[(self._spec.num_heads, plan.small_q, plan.num_rows)](
                *(out_TNH, partial, partial_lse, _lse_or(out_TNH, lse_TN), plan.q_start_R1, plan.num_rows, padded_to),
                *(plan.small_q, plan.num_splits, *_strides(q_TNH, out_TNH, lse_TN, plan)[2:4]),
                NUM_HEADS=self._spec.num_heads,
                HEAD_DIM=self._spec.head_dim,
                MAX_SPLITS=MAX_SPLITS,
                WITH_LSE=lse_TN is not None,
                BLOCK_D=self._dim,
                num_warps=4,
            )

    def _add_shared(
        self,
        q_TNH: torch.Tensor,
        kv: torch.Tensor,
        plan: Plan,
        own: tuple[torch.Tensor, torch.Tensor],
        out_TNH: torch.Tensor,
        lse_TN: torch.Tensor | None,
    ) -> None:
        """The keys that rows share, and everything together into the outputs. `own`: each row's outputs by itself, and lse."""
        shared, spec = plan.shared, self._spec
        part_ZNH = own[0].new_empty(shared.num_slots, spec.num_heads, spec.head_dim)
        part_lse_ZN = part_ZNH.new_empty(part_ZNH.shape[:2])
        config = self._prefill if shared.block_m == self._prefill.block_m else self._decode_config(shared.block_m)
        kernels.shared_kernel[(spec.num_kv_heads, len(shared.tiles_Y6))](
            *(q_TNH, kv, self._scales(kv), part_ZNH, part_lse_ZN, shared.tiles_Y6, shared.tokens_Z, plan.blocks_RM),
            *(*q_TNH.stride()[:2], plan.blocks_RM.stride(0)),
            **self._layer,
            BLOCK_M=shared.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        kernels.merge_kernel[(spec.num_heads, len(q_TNH))](
            *(out_TNH, _lse_or(out_TNH, lse_TN), *own, part_ZNH, part_lse_ZN, shared.slots_TX),
            *_strides(q_TNH, out_TNH, lse_TN, plan)[2:4],
            NUM_HEADS=spec.num_heads,
            HEAD_DIM=spec.head_dim,
            NUM_PARTS=shared.slots_TX.shape[1],
            MAX_PARTS=power_of_two(shared.slots_TX.shape[1]),
            WITH_LSE=lse_TN is not None,
            BLOCK_D=self._dim,
            num_warps=4,
        )

    def _scales(self, kv: torch.Tensor) -> torch.Tensor:
        """The tensor that the kernels find scales in; that of a cache without any is not touched."""
        if self._spec.kv_scales == "token_head":
            return kv.view(torch.bfloat16)
        return fixed_scales(kv, self._spec.num_kv_heads) if self._spec.kv_scales == "head" else kv

    def _sinks(self, kv: torch.Tensor) -> torch.Tensor:
        """The layer's sinks; a tensor that is not touched where it has none."""
        return sinks_of(kv, self._spec) if self._spec.has_sinks else kv

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

    def _find_shared(self, batch: Any) -> Shared | None:
        """What the rows of the batch share, where it pays."""
        count_R = np.diff(batch.q_start_R1_cpu)
        limits_R = np.where(count_R > 0, (batch.ctx_len_R_cpu - count_R) // self._spec.block_size, 0)
        spec = self._spec
        key_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_dtype.itemsize

        def pays(rows: np.ndarray, num_keys: int) -> bool:
            if self._cascade != AUTO:
                return num_keys >= self._cascade
            tile = self._tile_tokens
            num_spared = int((-(-count_R[rows] // tile)).sum()) + int(count_R[rows].sum()) // -tile
            return num_spared * num_keys * key_bytes > SPARED_BYTES

        prefixes = PrefixSearch(batch.blocks_RM_cpu, limits_R, spec.block_size, pays).found
        return self._lay_out(batch, prefixes) if prefixes else None

    def _lay_out(self, batch: Any, prefixes: list[Prefix]) -> Shared:
        """The prefixes cut into tiles: of tokens, and of keys so many that a small batch fills the GPU."""
        starts, device = batch.q_start_R1_cpu, batch.ctx_len_R.device
        key_first_R = np.zeros(len(batch.ctx_len_R), np.int32)
        tokens = [np.concatenate([np.arange(*starts[row : row + 2]) for row in prefix.rows]) for prefix in prefixes]
        most_tokens = max(map(len, tokens))
        block_m = min(self._prefill.block_m, max(LEAST_M, power_of_two(most_tokens * self._group)))
        tile_tokens = block_m // self._group
        num_tiles = sum(-(-len(some) // tile_tokens) for some in tokens)
        splits = max(1, PROGRAMS_WANTED * self._gpu.num_sms // (num_tiles * self._spec.num_kv_heads))
        tiles, slots_of_tokens = [], [[] for _ in range(batch.num_tokens)]
        num_slots = num_placed = 0
        for prefix, some in zip(prefixes, tokens, strict=True):
            key_first_R[prefix.rows] = prefix.key_last
            num_keys = prefix.key_last - prefix.key_first
            share = max(LEAST_SHARED_SPLIT, -(-num_keys // splits))
            for key_first in range(prefix.key_first, prefix.key_last, share):
                key_last = min(prefix.key_last, key_first + share)
                for first in range(0, len(some), tile_tokens):
                    count = min(tile_tokens, len(some) - first)
                    tiles.append((prefix.rows[0], key_first, key_last, num_placed + first, count, num_slots + first))
                for place, token in enumerate(some.tolist()):
                    slots_of_tokens[token].append(num_slots + place)
                num_slots += len(some)
            num_placed += len(some)
        slots_TX = np.full((batch.num_tokens, max(map(len, slots_of_tokens))), -1, np.int32)
        for token, slots in enumerate(slots_of_tokens):
            slots_TX[token, : len(slots)] = slots
        arrays = key_first_R, np.array(tiles, np.int32), np.concatenate(tokens).astype(np.int32), slots_TX
        return Shared(num_slots, block_m, *(_pinned(array, device).to(device, non_blocking=True) for array in arrays))


def _lse_or(out_TNH: torch.Tensor, lse_TN: torch.Tensor | None) -> torch.Tensor:
    """Where the logsumexp goes; without it a tensor that is not touched."""
    return out_TNH if lse_TN is None else lse_TN


def _key_first(plan: Plan) -> torch.Tensor:
    """Where the rows' own keys begin; a tensor that is not touched where rows share none."""
    return plan.ctx_len_R if plan.shared is None else plan.shared.key_first_R


def _trees(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the rows' trees of drafts are; tensors that are not touched where there are none."""
    return (plan.ctx_len_R, plan.ctx_len_R) if plan.trees is None else plan.trees


def _strides(q_TNH: torch.Tensor, out_TNH: torch.Tensor, lse_TN: torch.Tensor | None, plan: Plan) -> tuple[int, ...]:
    lse_stride_t = 0 if lse_TN is None else lse_TN.stride(0)
    return q_TNH.stride(0), q_TNH.stride(1), out_TNH.stride(0), lse_stride_t, plan.blocks_RM.stride(0)


def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":  # Triton's interpreter
        return Gpu()
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array in memory from which it is copied without waiting."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor
