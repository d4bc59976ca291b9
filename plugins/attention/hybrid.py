"""Two backends over one cache: rows of one token go to one of them, all other rows to the other.

The backends must name the same cache layout (`kv_layout` of their capabilities), so that each reads what either wrote: eager,
sdpa, flex, fa and flashinfer share one, flash has its own. A step with one kind of row is handed on as it is, and its backend
may fill a plan anew for a captured graph; a mixed step is cut into two batches without padding.
"""

from dataclasses import dataclass as plain_dataclass
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lab.api import Attention, AttentionSpec, Capabilities, UserError, common, dataclass, field, find_plugin, plugins, register

GRAPHS = ("never", "decode", "uniform")  # a graph of mixed rows would fix which rows go where


@plain_dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that one backend serves: its plan, and where their tokens are."""

    name: str  # prefill or decode
    plan: Any
    tokens: slice | torch.Tensor


@register("attention", "hybrid")
class Hybrid(Attention):
    """One backend for rows of one token (decode), another for all others (prefill), on one cache."""

    @dataclass(frozen=True)
    class Options:
        prefill: str = "sdpa"  # the backend for rows of several tokens
        decode: str = "eager"  # the backend for rows of one token
        prefill_options: dict[str, Any] = field(default_factory=dict)  # options of the first: prefill_options.NAME=VALUE
        decode_options: dict[str, Any] = field(default_factory=dict)  # options of the second

    capabilities = Capabilities(  # with the default options; for others see capabilities_with
        devices={"cpu", "cuda"},
        dtypes={"float32", "bfloat16", "float16"},
        kv_dtypes={"float32", "bfloat16", "float16", "fp8", "int8"},
        features={"gqa", "sliding_window", "spec_verify", "tree_verify", "token_head_scales", "sinks"},
        kv_layout="2PBKH",
        priority=-10,
    )

    @classmethod
    def parts(cls, options: Any) -> dict[str, tuple[Any, Any]]:
        """The entry and the options of each backend. Raises UserError for a name or an option that does not exist."""
        given = {"prefill": (options.prefill, options.prefill_options), "decode": (options.decode, options.decode_options)}
        found = {}
        for part, (name, its_options) in given.items():
            try:
                entry = find_plugin("attention", name)
                made = entry.make_options(its_options)
                found[part] = (entry.with_options(made), made)
            except UserError as error:
                raise UserError(f"attention.{part}={name}: {error}") from None
        return found

    @classmethod
    def capabilities_with(cls, options: Any) -> Capabilities:
        """What both backends can do. Raises UserError when they cannot share a cache, or have nothing in common."""
        (prefill, _), (decode, _) = cls.parts(options).values()
        its, others = prefill.capabilities, decode.capabilities
        if prefill.name != decode.name and (not its.kv_layout or its.kv_layout != others.kv_layout):
            raise _no_shared_cache(prefill, decode)
        both = common(its, others, f"attention.prefill={prefill.name} and attention.decode={decode.name}")
        graph = both.graph if both.graph in GRAPHS else "uniform"
        if graph == "never" and others.graph != "never":
            graph = "decode"  # such a graph holds nothing of the prefill backend
        return replace(
            both, features=both.features - {"lse", "batch_invariant"}, graph=graph, priority=cls.capabilities.priority
        )

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options, spec)
        self.capabilities = self.capabilities_with(options)
        self._backends = {part: entry.load()(its, spec) for part, (entry, its) in self.parts(options).items()}
        shapes = {part: backend.kv_shape(3, spec.block_size) for part, backend in self._backends.items()}
        if shapes["prefill"] != shapes["decode"]:
            raise UserError(
                f"attention.prefill={options.prefill} and attention.decode={options.decode} name the same cache layout, "
                f"but give 3 blocks different shapes: {list(shapes['prefill'])} and {list(shapes['decode'])}."
            )
        self._cache = self._backends["prefill"]  # either would do

    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return self._cache.kv_shape(num_blocks, block_size)

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        self._cache.write(k_TKH, v_TKH, kv, slots_T)

    def export_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return self._cache.export_blocks(kv, block_ids)

    def load_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor, x_XB2KH: torch.Tensor) -> None:
        self._cache.load_blocks(kv, block_ids, x_XB2KH)

    def set_scales(self, kv: torch.Tensor, scales_2K: torch.Tensor) -> None:
        self._cache.set_scales(kv, scales_2K)

    def set_sinks(self, kv: torch.Tensor, sinks_N: torch.Tensor) -> None:
        self._cache.set_sinks(kv, sinks_N)

    def plan(self, batch: Any, reuse: Any = None) -> list[Part]:
        decodes_R = np.diff(batch.q_start_R1_cpu) == 1
        if decodes_R.all() or not decodes_R.any():
            name = "decode" if decodes_R.all() else "prefill"
            if reuse is None:
                return [Part(name, self._backends[name].plan(batch), slice(0, batch.num_tokens))]
            (part,) = reuse
            assert part.name == name, f"a plan of {part.name} rows is to be reused for {name} rows"
            self._backends[name].plan(batch, part.plan)
            return reuse
        assert reuse is None, "no graph holds a mixed step"
        return [self._part("decode", batch, decodes_R), self._part("prefill", batch, ~decodes_R)]

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: list[Part], out_TNH: torch.Tensor) -> None:
        done = 0
        for part in plan:
            q_XNH = q_TNH[part.tokens]
            done += len(q_XNH)
            if isinstance(part.tokens, slice):
                self._backends[part.name].attend(q_XNH, kv, part.plan, out_TNH[part.tokens])
                continue
            out_XNH = torch.empty_like(q_XNH)
            self._backends[part.name].attend(q_XNH, kv, part.plan, out_XNH)
            out_TNH[part.tokens] = out_XNH
        out_TNH[done:] = 0  # padding of a mixed step

    def move(self, kv: torch.Tensor, from_X: torch.Tensor, to_X: torch.Tensor) -> None:
        self._backends["prefill"].move(kv, from_X, to_X)

    def _part(self, name: str, batch: Any, chosen_R: np.ndarray) -> Part:
        """The chosen rows of a mixed step as a batch of their own, planned by their backend."""
        rows = np.flatnonzero(chosen_R)
        begins, ends = batch.q_start_R1_cpu[:-1][rows], batch.q_start_R1_cpu[1:][rows]
        counts = ends - begins
        tokens: slice | torch.Tensor = slice(int(begins[0]), int(ends[-1]))
        if int(counts.sum()) != int(ends[-1] - begins[0]):
            tokens = self._to_device(np.concatenate([np.arange(b, e) for b, e in zip(begins, ends, strict=True)]))
        q_start_R1 = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        ctx_len_R = batch.ctx_len_R_cpu[rows]
        own = replace(
            batch,
            num_tokens=int(q_start_R1[-1]),
            num_rows=len(rows),
            max_q=int(counts.max()),
            max_ctx=int(ctx_len_R.max()),
            input_ids_T=batch.input_ids_T[tokens],
            positions_T=batch.positions_T[tokens],
            slots_T=batch.slots_T[tokens],
            q_start_R1=self._to_device(q_start_R1),
            ctx_len_R=self._to_device(ctx_len_R),
            blocks_RM=batch.blocks_RM[self._to_device(rows)],
            logits_idx_L=batch.logits_idx_L[:0],  # of no use to attention
            q_start_R1_cpu=q_start_R1,
            ctx_len_R_cpu=ctx_len_R,
            blocks_RM_cpu=batch.blocks_RM_cpu[rows],
            trees=None if batch.trees is None else self._trees(batch.trees, rows, tokens),
        )
        return Part(name, self._backends[name].plan(own), tokens)

    def _trees(self, trees: Any, rows: np.ndarray, tokens: slice | torch.Tensor) -> Any:
        places = tokens if isinstance(tokens, slice) else tokens.cpu().numpy()
        of_device = trees.start_R[self._to_device(rows)], trees.ancestors_T[tokens]
        return replace(
            trees,
            start_R=of_device[0],
            ancestors_T=of_device[1],
            start_R_cpu=trees.start_R_cpu[rows],
            ancestors_T_cpu=trees.ancestors_T_cpu[places],
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.spec.device, non_blocking=True)


def _no_shared_cache(prefill: Any, decode: Any) -> UserError:
    """Which layouts they have, and what each could stand beside."""

    def layout(entry: Any) -> str:
        return f"{entry.name} keeps it as {entry.capabilities.kv_layout or 'it likes (its capabilities name no kv_layout)'}"

    def beside(entry: Any) -> str:
        names = {e.name for e in plugins("attention") if e.static_capabilities and e.name != Hybrid.name}
        own = entry.capabilities.kv_layout
        like = {name for name in names if own and find_plugin("attention", name).capabilities.kv_layout == own}
        return ", ".join(sorted(like | {entry.name}))

    return UserError(
        f"attention.prefill={prefill.name} and attention.decode={decode.name} cannot share one cache: {layout(prefill)}, "
        f"{layout(decode)}.\nBeside prefill={prefill.name} can stand decode={beside(prefill)}; "
        f"beside decode={decode.name} can stand prefill={beside(decode)}."
    )
