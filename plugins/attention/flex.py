"""torch's FlexAttention over gathered keys and values, with the user's own score and mask functions.

The rows' keys are gathered as sdpa does, and the block mask is over the gathered ones, not over the pool: flex reads whole
blocks of a pool, what nobody wrote into the last of a row included, and on the CPU the block mask does not bound the work.

The user's functions are torch's, and see one request: `score_mod(score, b, h, q_idx, kv_idx)` gives a score of the scaled
(and capped) score, `mask_mod(b, h, q_idx, kv_idx)` says whether the query sees the key, in place of the causal mask. `q_idx`
and `kv_idx` are positions in the request, prompt and output counted together, whatever was cached or in which chunks it
came; `h` is the query head; `b` is 0. They may index tensors of their module. Keys behind what has been computed of the request
are hidden whatever `mask_mod` says, so a mask that looks ahead (prefix-LM) needs its prefix in one step, and no prefix cache:
scheduler.enable_chunked_prefill=false cache.enable_prefix_caching=false. The window of a layer holds besides `mask_mod`.

Uncompiled, flex writes all scores out in float32, and the Python of it costs some milliseconds a call. Compiled, each power of
two of query tokens is compiled, for seconds, once for one row and once for several: rows are padded to it, contexts are free.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.fx.experimental._config
from torch.nn.attention import flex_attention as flex

from lab.api import AttentionSpec, Capabilities, UserError, dataclass, register

from ._functions import check_reference, load_function
from ._trees import RowTree
from .sdpa import Group, Sdpa

TILE = 128  # queries and keys of a block of the mask
MOST_COMPILATIONS = 64  # powers of two, times the shapes of layers, times one row or several


@plain_dataclass(frozen=True, slots=True)
class Mods:
    """What a group of rows attends by."""

    num_q: int  # queries a row, padding included
    block_mask: flex.BlockMask
    score_mod: Callable[..., torch.Tensor] | None


@register("attention", "flex")
class Flex(Sdpa):
    """torch's FlexAttention: score_mod and mask_mod of your own, for variants of attention; slow on the CPU."""

    @dataclass(frozen=True)
    class Options:
        score_mod: str | None = None  # FILE.py:FUNCTION or MODULE:FUNCTION, of (score, b, h, q_idx, kv_idx)
        mask_mod: str | None = None  # FILE.py:FUNCTION or MODULE:FUNCTION, of (b, h, q_idx, kv_idx), in place of causal
        compiled: bool | None = None  # by torch.compile, which on the CPU needs a C++ compiler; null: on CUDA only

    capabilities = Capabilities(
        devices={"cpu", "cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        kv_dtypes={"float32", "bfloat16", "float16", "fp8", "int8"},
        features={"gqa", "sliding_window", "softcap", "spec_verify", "tree_verify", "token_head_scales", "sinks"},
        packages=("cuda:triton",),
        kv_layout="2PBKH",
        priority=5,
    )

    @classmethod
    def capabilities_with(cls, options: Any) -> Capabilities:
        """Functions of the user's own go by positions, which the nodes of a tree of drafts do not have one by one."""
        functions = {name: getattr(options, name) for name in ("score_mod", "mask_mod") if getattr(options, name) is not None}
        if not functions:
            return cls.capabilities
        for name, reference in functions.items():
            check_reference(reference, f"attention.{name}")  # before the model is loaded
        return replace(cls.capabilities, features=cls.capabilities.features - {"tree_verify"})

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options, spec)
        query_and_key = ("b", "h", "q_idx", "kv_idx")
        self._score_mod = self._mask_mod = None
        if options.score_mod is not None:
            self._score_mod = load_function(options.score_mod, "attention.score_mod", ("score", *query_and_key))
        if options.mask_mod is not None:
            self._mask_mod = load_function(options.mask_mod, "attention.mask_mod", query_and_key)
        self._is_compiled = spec.device.type == "cuda" if options.compiled is None else options.compiled
        if self._is_compiled and spec.has_sinks and spec.device.type == "cpu":
            raise UserError("attention.compiled=true: attention sinks need a logsumexp, which torch compiles for CUDA only.")
        self._flex = torch.compile(flex.flex_attention, dynamic=True) if self._is_compiled else flex.flex_attention

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: list[Group], out_TNH: torch.Tensor) -> None:
        num_heads, dim = self.spec.num_heads, self.spec.head_dim
        sinks_N = self.sinks(kv) if self.spec.has_sinks else None
        done = 0
        for group in plan:
            num_rows, mods = group.num_rows, group.mask
            k_RKSH, v_RKSH = self._gathered(kv, group, q_TNH.dtype)
            q_RQNH = q_TNH[group.q_index].view(num_rows, -1, num_heads, dim)
            num_q = q_RQNH.shape[1]
            q_RNQH = torch.nn.functional.pad(q_RQNH, (0, 0, 0, 0, 0, mods.num_q - num_q)).transpose(1, 2)
            out_RNQH = self._call(q_RNQH, k_RKSH, v_RKSH, mods, sinks_N)[:, :, :num_q]
            out_TNH[group.q_index] = out_RNQH.transpose(1, 2).reshape(-1, num_heads, dim)
            done += num_rows * num_q
        out_TNH[done:] = 0  # padding tokens stand at the end

    def _call(
        self, q_RNQH: torch.Tensor, k_RKSH: torch.Tensor, v_RKSH: torch.Tensor, mods: Mods, sinks_N: torch.Tensor | None
    ) -> torch.Tensor:
        if self._is_compiled:
            torch._dynamo.mark_static(q_RNQH, 2)
        with _compiling() if self._is_compiled else _interpreted():
            found = self._flex(
                q_RNQH,
                k_RKSH,
                v_RKSH,
                score_mod=mods.score_mod,
                block_mask=mods.block_mask,
                scale=self.spec.scale,
                enable_gqa=True,
                return_aux=None if sinks_N is None else flex.AuxRequest(lse=True),
            )
        if sinks_N is None:
            return found
        out_RNQH, aux = found  # of the denominator the keys' share is what remains of the outputs
        return (out_RNQH * (aux.lse - sinks_N[:, None]).sigmoid()[..., None]).to(out_RNQH.dtype)

    def _mask(self, num_q: int, contexts_R: np.ndarray, trees: list[RowTree | None]) -> Mods:
        """How these rows of `num_q` tokens attend, the last tokens of their contexts."""
        padded_q = 1 << (num_q - 1).bit_length() if self._is_compiled else num_q
        ctx_R = self._to_device(contexts_R.astype(np.int64))
        first_R = ctx_R - num_q  # position of the first query
        mask_mod = self._mask_over(first_R, ctx_R)
        if any(tree is not None for tree in trees):
            mask_mod = self._mask_over_trees(contexts_R, num_q, padded_q, trees)
        tiles = self._tiles(padded_q, contexts_R - num_q, contexts_R)
        num_tiles, tile_index = (self._to_device(array[:, None]) for array in tiles)
        block_mask = flex.BlockMask.from_kv_blocks(
            num_tiles, tile_index, BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=(padded_q, int(contexts_R.max()))
        )
        return Mods(padded_q, block_mask, self._score_over(first_R))

    def _mask_over(self, first_R: torch.Tensor, ctx_R: torch.Tensor) -> Callable[..., torch.Tensor]:
        users, window = self._mask_mod, self.spec.sliding_window

        def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            position = q + first_R[b]
            seen = k <= position if users is None else (k < ctx_R[b]) & users(torch.zeros_like(b), h, position, k)
            return seen if window is None else seen & (k > position - window)

        return mask

    def _mask_over_trees(
        self, contexts_R: np.ndarray, num_q: int, padded_q: int, trees: list[RowTree | None]
    ) -> Callable[..., torch.Tensor]:
        window = self.spec.sliding_window
        starts_R = contexts_R.astype(np.int64)
        places_RQ = starts_R[:, None] - num_q + np.arange(padded_q)
        positions_RQ, nodes_RQ = places_RQ.copy(), np.zeros_like(places_RQ)
        for row, tree in enumerate(trees):
            if tree is not None:
                starts_R[row] = tree.start
                positions_RQ[row, :num_q] = tree.positions_Q
                nodes_RQ[row, :num_q] = (tree.seen_QN << np.arange(tree.seen_QN.shape[1])).sum(1)
        start_R, place_RQ, position_RQ, bits_RQ = map(self._to_device, (starts_R, places_RQ, positions_RQ, nodes_RQ))

        def mask(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            node = k - start_R[b]
            on_path = (bits_RQ[b, q] >> node.clamp(0, 62)) & 1 == 1
            seen = (k <= place_RQ[b, q]) & ((node < 0) | on_path)
            return seen if window is None else seen & ((node >= 0) | (k > position_RQ[b, q] - window))

        return mask

    def _score_over(self, first_R: torch.Tensor) -> Callable[..., torch.Tensor] | None:
        users, cap = self._score_mod, self.spec.softcap
        if users is None and cap is None:
            return None

        def score_of(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            return score if users is None else users(score, torch.zeros_like(b), h, q + first_R[b], k)

        return score_of

    def _tiles(self, num_q: int, first_R: np.ndarray, ctx_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which tiles of keys each tile of queries reads: how many [R, U], and their numbers [R, U, W], the rest zero."""
        q_begin_U = np.arange(0, num_q, TILE)
        first_RU = first_R[:, None] + q_begin_U
        end_RU = np.broadcast_to(ctx_R[:, None], first_RU.shape)
        if self._mask_mod is None:
            end_RU = np.minimum(end_RU, first_RU + TILE)
        begin_RU = np.zeros_like(first_RU)
        if self.spec.sliding_window is not None:
            begin_RU = np.clip(first_RU - self.spec.sliding_window + 1, 0, end_RU - 1) // TILE
        count_RU = -(-end_RU // TILE) - begin_RU
        offset_W = np.arange(max(2, -(-int(ctx_R.max()) // TILE)))  # a dimension of one would be compiled for itself
        index_RUW = np.where(offset_W < count_RU[..., None], begin_RU[..., None] + offset_W, 0)
        return count_RU.astype(np.int32), index_RUW.astype(np.int32)


@contextmanager
def _compiling() -> Iterator[None]:
    """Dynamo compiles a new shape up to a limit, behind which it would quietly run uncompiled: raise it, and fail there.

    Sizes that happen to be equal stay apart, lest the number of rows be fixed to that of heads. Floats are constants: as
    symbols in the functions they cannot be compiled.
    """
    limits = {"recompile_limit": MOST_COMPILATIONS, "fail_on_recompile_limit_hit": True, "specialize_float": True}
    with torch._dynamo.config.patch(limits), torch.fx.experimental._config.patch(use_duck_shape=False):
        yield


@contextmanager
def _interpreted() -> Iterator[None]:
    """Call flex as plain Python: without this switch of torch's, its uncompiled form is traced again for every new shape."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before
