"""Contract checks of attention plugins: against the definition, written out densely in float64."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lab import registry
from lab.capabilities import GRAPH_SUPPORT, Needs, unmet
from lab.checks import CheckFailed, NotDeclared
from lab.contracts.attention import Attention, AttentionSpec
from lab.registry import Entry
from lab.runner.batch import Batch, BatchBuilder, Share
from lab.runner.rows import Rows

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # KV dtypes by the names that capabilities have for them
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097)
HEAD_DIMS = (64, 80, 96, 128, 256)


@dataclass(frozen=True)
class Case:
    """Rows given as (tokens in the cache before the step, tokens of the step), and the shape of the layer."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    softcap: float | None = None
    kv_dtype: torch.dtype | None = None  # None: dtype
    kv_scales: str = "none"
    num_padding: int = 0  # tokens with slot -1 after the last row
    num_padding_rows: int = 0  # rows of no tokens and no context behind the real ones, as a captured graph has them
    prefixes: tuple[tuple[tuple[int, ...], int], ...] = ()  # (rows, tokens): they begin with the same ones


def check_decode_at_block_edges(entry: Entry, options: Any) -> None:
    """One token a row, contexts of 1 to 4,097 tokens around the edges of blocks."""
    for block_size in _block_sizes(entry):
        _compare(entry, options, Case(tuple((n - 1, 1) for n in EDGES), block_size=block_size, head_dim=_dim(entry)))


def check_fresh_prefill(entry: Entry, options: Any) -> None:
    """Whole prompts with nothing before them, from 1 to 700 tokens."""
    for block_size in _block_sizes(entry):
        rows = tuple((0, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 700))
        _compare(entry, options, Case(rows, block_size=block_size, head_dim=_dim(entry)))


def check_chunk_after_prefix(entry: Entry, options: Any) -> None:
    """Chunks of a prompt whose beginning is in the cache already: causal by absolute position."""
    rows = ((1, 2), (15, 1), (16, 16), (17, 40), (300, 33), (33, 300), (1000, 17), (4000, 97))
    for block_size in _block_sizes(entry):
        _compare(entry, options, Case(rows, block_size=block_size, head_dim=_dim(entry)))


def check_mixed_batch(entry: Entry, options: Any) -> None:
    """Prefills, chunks, decodes and rows of a few tokens in one step, in any order."""
    rows = ((0, 33), (100, 1), (64, 20), (5, 1), (0, 1), (250, 6), (31, 6), (512, 1), (16, 100))
    _compare(entry, options, Case(rows, head_dim=_dim(entry)))
    _compare(entry, options, Case(rows[::-1], head_dim=_dim(entry)))


def check_drafts(entry: Entry, options: Any) -> None:
    """If declared: every row with the same few tokens, as drafts are verified, contexts around the edges of blocks."""
    _ask_for(entry, "spec_verify")
    for num_q in (2, 4, 9):
        rows = tuple((n, num_q) for n in (1, 14, 15, 16, 31, 32, 127, 1023))
        _compare(entry, options, Case(rows, head_dim=_dim(entry)))


def check_shared_prefixes(entry: Entry, options: Any) -> None:
    """Rows that begin with the same blocks, in several groups and in groups within groups: each sees these and its own."""
    features = entry.capabilities.features
    few = 4 if "spec_verify" in features else 1
    rows = ((320, 1), (0, 20), (300, 1), (70, few), (288, 33), (100, 1), (319, 1), (96, few), (65, 1), (290, 2 * few), (400, 1))
    prefixes = (((0, 2, 4, 6, 9, 10), 64), ((3, 7, 8), 64), ((2, 4, 6, 10), 288), ((6, 10), 304))
    case = Case(rows, prefixes=prefixes, head_dim=_dim(entry))
    backwards = tuple((tuple(len(rows) - 1 - row for row in some), num_tokens) for some, num_tokens in prefixes)
    cases = [replace(case, rows=rows[::-1], prefixes=backwards)]
    cases += [replace(case, dtype=dtype, num_padding=2) for dtype in _dtypes(entry)]
    if "gqa" in features:
        cases += [replace(case, num_heads=group, num_kv_heads=1) for group in range(1, 17)]
    if "sliding_window" in features:
        cases += [replace(case, sliding_window=window) for window in (1, 50, 330, 10_000)]
    if "softcap" in features:
        cases.append(replace(case, softcap=2.0))
    for each in cases:
        _compare(entry, options, each)


def check_head_groups(entry: Entry, options: Any) -> None:
    """Query heads per KV head: 1 (all heads their own), and if declared 2 to 16 (GQA), and one KV head for all (MQA)."""
    groups = range(1, 17) if "gqa" in entry.capabilities.features else (1,)
    for group in groups:
        rows = ((40, 1), (0, 19), (17, 20), (3, 4))
        num_kv_heads = 3 if group <= 5 else 1
        case = Case(rows, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=_dim(entry))
        _compare(entry, options, case)


def check_head_dims(entry: Entry, options: Any) -> None:
    """Every head dim that is declared; 64, 80, 96, 128 and 256 when none is."""
    for head_dim in sorted(entry.capabilities.head_dims) or HEAD_DIMS:
        _compare(entry, options, Case(((50, 1), (0, 21), (20, 18)), head_dim=head_dim))


def check_dtypes(entry: Entry, options: Any) -> None:
    """Every declared dtype, within the rounding of that dtype."""
    for dtype in _dtypes(entry):
        _compare(entry, options, Case(((99, 1), (0, 40), (33, 30), (7, 3)), dtype=dtype, head_dim=_dim(entry)))


def check_padding(entry: Entry, options: Any) -> None:
    """Padding tokens (slot -1) and rows (no context) write nowhere, change no row, and padding gets finite outputs."""
    for rows in (((20, 1), (40, 1), (3, 1)), ((0, 18), (40, 1))):
        for num_padding_rows in (0, 5):
            _compare(entry, options, Case(rows, head_dim=_dim(entry), num_padding=5, num_padding_rows=num_padding_rows))


def check_sliding_window(entry: Entry, options: Any) -> None:
    """If declared: a token sees itself and the window - 1 tokens before it, across block edges."""
    _ask_for(entry, "sliding_window")
    for window in (1, 16, 50, 10_000):
        rows = ((200, 1), (0, 90), (60, 40), (10, 3))
        _compare(entry, options, Case(rows, head_dim=_dim(entry), sliding_window=window))


def check_softcap(entry: Entry, options: Any) -> None:
    """If declared: scores are capped as cap * tanh(score / cap) before the mask."""
    _ask_for(entry, "softcap")
    _compare(entry, options, Case(((200, 1), (0, 40), (30, 20)), head_dim=_dim(entry), softcap=2.0))


def check_export_and_load(entry: Entry, options: Any) -> None:
    """Blocks exported in the canonical format and loaded elsewhere in the pool come back as they were."""
    for device in _devices(entry):
        spec = _spec(Case((), head_dim=_dim(entry)), device)
        backend = _make(entry, options, spec)
        kv = torch.zeros(backend.kv_shape(6, spec.block_size), dtype=spec.kv_dtype, device=device)
        shape = (2, spec.block_size, 2, spec.num_kv_heads, spec.head_dim)
        blocks = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
        backend.load_blocks(kv, torch.tensor([4, 1], device=device), blocks)
        found = backend.export_blocks(kv, torch.tensor([4, 1, 0], device=device))
        if found.shape != (3, *shape[1:]):
            wanted = (3, *shape[1:])
            raise CheckFailed(f"export_blocks of 3 blocks gave the shape {tuple(found.shape)}, not {wanted} (X B 2 K H)")
        if not torch.equal(found[:2].float(), blocks.to(spec.kv_dtype).float()):
            raise CheckFailed("load_blocks then export_blocks did not give the same values back")
        if found[2].any():
            raise CheckFailed("load_blocks wrote into a block that it was not given")


def check_layout_agrees_with_write(entry: Entry, options: Any) -> None:
    """What `write` stores at a slot is what `export_blocks` gives for that block and offset."""
    for device in _devices(entry):
        spec = _spec(Case((), head_dim=_dim(entry)), device)
        backend = _make(entry, options, spec)
        kv = torch.zeros(backend.kv_shape(5, spec.block_size), dtype=spec.kv_dtype, device=device)
        generator = torch.Generator().manual_seed(2)
        k_TKH, v_TKH = (torch.randn(3, spec.num_kv_heads, spec.head_dim, generator=generator).to(device) for _ in range(2))
        slots = [3 * spec.block_size + 1, 0, 4 * spec.block_size + spec.block_size - 1]
        backend.write(k_TKH.to(spec.dtype), v_TKH.to(spec.dtype), kv, torch.tensor(slots, device=device))
        blocks = backend.export_blocks(kv, torch.arange(5, device=device)).flatten(0, 1)
        for token, slot in enumerate(slots):
            for half, wanted in enumerate((k_TKH[token], v_TKH[token])):
                if not torch.equal(blocks[slot, half].float(), wanted.to(spec.kv_dtype).float()):
                    what = ("key", "value")[half]
                    raise CheckFailed(f"the {what} written to slot {slot} is not what export_blocks shows there")


def check_quantized_cache(entry: Entry, options: Any) -> None:
    """If declared: fp8 and int8 caches hold what was written within the format's rounding, and attention reads just that."""
    declared = [dtype for name, dtype in QUANTIZED.items() if name in entry.capabilities.kv_dtypes]
    if not declared:
        raise NotDeclared("no KV dtype fp8 or int8")
    kinds = ("token_head", "head") if "token_head_scales" in entry.capabilities.features else ("head",)
    rows = ((0, 33), (100, 1), (64, 20), (5, 1), (0, 1), (250, 6), (31, 3), (700, 1), (16, 100))
    for kv_dtype, kv_scales, dtype in itertools.product(declared, kinds, _dtypes(entry)):
        case = Case(rows, head_dim=_dim(entry), dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales, num_padding=2)
        _compare(entry, options, case)
        _compare(entry, options, replace(case, prefixes=(((7, 1, 2, 5), 64), ((1, 7), 96))))


def check_quantized_export_and_load(entry: Entry, options: Any) -> None:
    """If declared: blocks loaded into an fp8 or int8 cache are given back within the format's rounding, and no others."""
    declared = [dtype for name, dtype in QUANTIZED.items() if name in entry.capabilities.kv_dtypes]
    if not declared:
        raise NotDeclared("no KV dtype fp8 or int8")
    kinds = ("token_head", "head") if "token_head_scales" in entry.capabilities.features else ("head",)
    for kv_dtype, kv_scales, device in itertools.product(declared, kinds, _devices(entry)):
        trial = _Trial(Case(((0, 32),), head_dim=_dim(entry), kv_dtype=kv_dtype, kv_scales=kv_scales), device, seed=0)
        backend = _make(entry, options, _spec(trial.case, device))
        kv = trial._poisoned(backend)
        before = backend.export_blocks(kv, torch.from_numpy(trial.unowned).to(device))
        x_XB2KH = torch.stack((trial.keys[0], trial.values[0]), 1).unflatten(0, (2, -1)).to(device)
        backend.load_blocks(kv, torch.from_numpy(trial.tables[0]).to(device), x_XB2KH)
        trial._read_back(backend, kv)
        after = backend.export_blocks(kv, torch.from_numpy(trial.unowned).to(device))
        if not torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0)):
            raise CheckFailed("load_blocks wrote into a block that it was not given")


def check_plan_reuse(entry: Entry, options: Any) -> None:
    """If graphs are declared: plan(batch, reuse) fills the given plan in place, and the result is still right."""
    level = GRAPH_SUPPORT.index(entry.capabilities.graph)
    if not level:
        raise NotDeclared("graph=never")
    captured_and_step = (  # for graphs of decodes, of uniform rows, of any
        (((40, 1), (90, 1), (10, 1)), ((55, 1), (30, 1), (91, 1))),
        (((40, 4), (90, 4), (10, 4)), ((55, 4), (30, 4), (88, 4))),
        (((0, 8), (90, 1), (5, 3)), ((3, 5), (80, 6), (9, 1))),
    )
    for first, rows in captured_and_step[:level]:
        case = Case(first, head_dim=_dim(entry))
        _compare(entry, options, replace(case, rows=rows), reuse_of=case)


def check_lse(entry: Entry, options: Any) -> None:
    """If declared: `attend_lse` gives attend's outputs, and the logsumexp of the scores that each query sees."""
    _ask_for(entry, "lse")
    rows = ((40, 1), (0, 19), (17, 20), (255, 2))
    case = Case(rows, head_dim=_dim(entry), num_padding=3)
    cases = [case, replace(case, prefixes=(((3, 0), 32),))]
    if "sliding_window" in entry.capabilities.features:
        cases.append(replace(case, sliding_window=16))
    for each in cases:
        _compare(entry, options, each, lse=True)


def check_layout_is_shared(entry: Entry, options: Any) -> None:
    """If a layout is named: lab's own plugins of that layout find in the cache what this one writes there."""
    layout = entry.capabilities.kv_layout
    if not layout:
        raise NotDeclared("no kv_layout")
    for device in _devices(entry):
        spec = _spec(Case((), head_dim=_dim(entry), dtype=_dtypes(entry)[0]), device)
        backend = _make(entry, options, spec)
        kv = torch.zeros(backend.kv_shape(4, spec.block_size), dtype=spec.kv_dtype, device=device)
        slots = torch.arange(2 * spec.block_size, 4 * spec.block_size, device=device)
        generator = torch.Generator().manual_seed(6)
        shape = (len(slots), spec.num_kv_heads, spec.head_dim)
        k_TKH, v_TKH = (torch.randn(shape, generator=generator).to(device, spec.dtype) for _ in range(2))
        backend.write(k_TKH, v_TKH, kv, slots)
        for other in registry.entries("attention"):
            if not _is_like(other, layout, spec) or other.name == entry.name:
                continue
            peer = _make(other, other.options(), spec)
            if peer.kv_shape(4, spec.block_size) != kv.shape:
                wanted = peer.kv_shape(4, spec.block_size)
                raise CheckFailed(f"kv_layout={layout}: {other.name} gives 4 blocks the shape {wanted}, not {tuple(kv.shape)}")
            found = peer.export_blocks(kv, torch.tensor([2, 3], device=device)).flatten(0, 1)
            if not (torch.equal(found[:, 0], k_TKH) and torch.equal(found[:, 1], v_TKH)):
                raise CheckFailed(f"kv_layout={layout}: {other.name} does not find in the cache what was written there")


def _ask_for(entry: Entry, feature: str) -> None:
    if feature not in entry.capabilities.features:
        raise NotDeclared(f"no feature {feature}")


def _devices(entry: Entry) -> list[torch.device]:
    declared = entry.capabilities.devices or {"cpu"}
    devices = [torch.device("cpu")] if "cpu" in declared else []
    if "cuda" in declared and torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    if not devices:
        raise CheckFailed(f"it runs on {', '.join(sorted(declared))}, and this machine has none of these")
    return devices


def _dtypes(entry: Entry) -> list[torch.dtype]:
    names = entry.capabilities.dtypes or {"float32", "bfloat16", "float16"}
    return [getattr(torch, name) for name in sorted(names)]


def _block_sizes(entry: Entry) -> list[int]:
    multiple = entry.capabilities.block_multiple
    return [multiple] if multiple > 16 else sorted({multiple, 16 // multiple * multiple})


def _dim(entry: Entry) -> int:
    dims = entry.capabilities.head_dims
    return 64 if not dims or 64 in dims else min(dims)


def _spec(case: Case, device: torch.device) -> AttentionSpec:
    return AttentionSpec(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        scale=case.head_dim**-0.5,
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.dtype if case.kv_dtype is None else case.kv_dtype,
        device=device,
        sliding_window=case.sliding_window,
        softcap=case.softcap,
        kv_scales=case.kv_scales,
    )


def _make(entry: Entry, options: Any, spec: AttentionSpec) -> Attention:
    return entry.load()(options, spec)


def _is_like(other: Entry, layout: str, spec: AttentionSpec) -> bool:
    """One of lab's own that keeps its cache in that layout and can serve the spec on this machine."""
    if other.source != "built-in" or other.capabilities.kv_layout != layout:
        return False
    dtype = str(spec.dtype).removeprefix("torch.")
    needs = Needs(device=spec.device.type, dtype=dtype, kv_dtype=dtype, head_dim=spec.head_dim, block_size=spec.block_size)
    return not unmet(other.capabilities, needs)


def _compare(entry: Entry, options: Any, case: Case, reuse_of: Case | None = None, *, lse: bool = False) -> None:
    """Run the case on every declared device in a poisoned, shuffled pool and hold the outputs against the definition."""
    case = replace(case, block_size=max(case.block_size, entry.capabilities.block_multiple))
    if case.dtype not in _dtypes(entry):
        case = replace(case, dtype=_dtypes(entry)[0])
    for device in _devices(entry):
        backend = _make(entry, options, _spec(case, device))
        reuse = backend.plan(_Trial(reuse_of, device, seed=5).batch) if reuse_of else None
        trial = _Trial(case, device, seed=0)
        trial.run(backend, reuse, lse=lse)


class _Trial:
    """One case with its random keys, values and queries, and a pool whose unused slots hold NaN."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(seed)
        totals = [before + count for before, count in case.rows]
        shape = (case.num_kv_heads, case.head_dim)
        self.keys = [torch.randn(n, *shape, generator=generator).to(case.dtype) for n in totals]
        self.values = [torch.randn(n, *shape, generator=generator).to(case.dtype) for n in totals]
        num_tokens = sum(count for _, count in case.rows) + case.num_padding
        self.q_TNH = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=generator).to(case.dtype)
        self.scales_2K = torch.empty(2, case.num_kv_heads)
        if case.kv_scales != "none":
            self._vary(generator)
        needs = [-(-n // case.block_size) for n in totals]
        self.num_blocks = sum(needs) + 3
        # block 0, which the tables of padding rows name, is nobody's
        order = 1 + np.random.default_rng(seed).permutation(self.num_blocks - 1)
        self.tables = np.split(order[: sum(needs)], np.cumsum(needs)[:-1])
        self._share_prefixes()
        self.unowned = np.setdiff1d(np.arange(self.num_blocks), np.concatenate(self.tables))
        self.batch = self._batch(max(totals))

    def _vary(self, generator: torch.Generator) -> None:
        """Magnitudes that differ, so that a wrong scale shows: with KV head and half, and where scales do, with the token."""
        case = self.case
        by_head_2K = torch.exp2(torch.rand(2, case.num_kv_heads, generator=generator) * 2 - 2)
        highest_2K = torch.zeros(2, case.num_kv_heads)
        for half, rows in enumerate((self.keys, self.values)):
            for row, x_SKH in enumerate(rows):
                sizes = by_head_2K[half].expand(len(x_SKH), -1)
                if case.kv_scales == "token_head":
                    sizes = sizes * torch.exp2(torch.randint(-3, 1, sizes.shape, generator=generator))
                rows[row] = (x_SKH.float() * sizes[..., None]).to(case.dtype)
                if len(x_SKH):
                    highest_2K[half] = torch.maximum(highest_2K[half], rows[row].float().abs().amax((0, 2)))
        if case.kv_dtype is not None:
            self.scales_2K = highest_2K / _largest(case.kv_dtype)

    def _share_prefixes(self) -> None:
        """The blocks of the first row of each prefix, whole ones, take the place of the others', with what is in them."""
        size = self.case.block_size
        for (first, *others), num_tokens in self.case.prefixes:
            num_blocks = num_tokens // size
            for row in others:
                self.tables[row][:num_blocks] = self.tables[first][:num_blocks]
                for of_rows in (self.keys, self.values):
                    of_rows[row][: num_blocks * size] = of_rows[first][: num_blocks * size]

    def _batch(self, longest: int) -> Batch:
        case = self.case
        rows = Rows(len(case.rows), longest, case.block_size)
        for row, table in enumerate(self.tables):
            rows.blocks_RM[row, : len(table)] = table
        shares = [Share(row, before, count, 0, True) for row, (before, count) in enumerate(case.rows)]
        builder = BatchBuilder(rows, case.block_size, self.device)
        return builder.build(shares, len(self.q_TNH), len(case.rows) + case.num_padding_rows)

    def run(self, backend: Attention, reuse: Any, *, lse: bool = False) -> None:
        case, device = self.case, self.device
        kv = self._poisoned(backend)
        before_X = backend.export_blocks(kv, torch.from_numpy(self.unowned).to(device))
        for table, k_SKH, v_SKH, (before, _) in zip(self.tables, self.keys, self.values, case.rows, strict=True):
            if before:
                positions = np.arange(before)
                slots = table[positions // case.block_size] * case.block_size + positions % case.block_size
                backend.write(k_SKH[:before].to(device), v_SKH[:before].to(device), kv, torch.from_numpy(slots).to(device))
        k_TKH, v_TKH = self._step_tokens(self.keys), self._step_tokens(self.values)
        plan = backend.plan(self.batch) if reuse is None else backend.plan(self.batch, reuse)
        if reuse is not None and plan is not reuse:
            raise CheckFailed("plan(batch, reuse) returned another plan; a captured graph would go on reading the old one")
        out_TNH = torch.full_like(self.q_TNH, float("nan")).to(device)
        backend.write(k_TKH, v_TKH, kv, self.batch.slots_T)
        if lse:
            lse_TN = torch.full(out_TNH.shape[:2], float("nan"), device=device)
            backend.attend_lse(self.q_TNH.to(device), kv, plan, out_TNH, lse_TN)
        else:
            backend.attend(self.q_TNH.to(device), kv, plan, out_TNH)
        if case.kv_scales != "none":
            self._read_back(backend, kv)
        if lse:
            self._judge_lse(lse_TN.cpu())
        self._judge(out_TNH.cpu())
        strangers = backend.export_blocks(kv, torch.from_numpy(self.unowned).to(device))
        if not torch.equal(strangers.nan_to_num(7.0), before_X.nan_to_num(7.0)):
            raise CheckFailed("a block that belongs to no row of the step was written to")

    def _poisoned(self, backend: Attention) -> torch.Tensor:
        """A pool of bytes that are NaN in every float dtype, scales included, with its fixed scales in place."""
        spec, device = backend.spec, self.device
        shape = backend.kv_shape(self.num_blocks, spec.block_size)
        num_bytes = math.prod(shape) * spec.kv_dtype.itemsize
        kv = torch.full((num_bytes,), 255, dtype=torch.uint8, device=device).view(spec.kv_dtype).view(shape)
        if spec.kv_scales == "head":
            backend.set_scales(kv, self.scales_2K.to(device))
        return kv

    def _read_back(self, backend: Attention, kv: torch.Tensor) -> None:
        """Hold what the cache gives back against what was written; the attention is then judged by what it gives back."""
        spec = backend.spec
        for row, table in enumerate(self.tables):
            blocks = backend.export_blocks(kv, torch.from_numpy(table).to(self.device)).flatten(0, 1).cpu()
            if blocks.dtype != spec.dtype:
                raise CheckFailed(f"export_blocks of a quantized cache gave {blocks.dtype}, not the values in {spec.dtype}")
            for half, (written, what) in enumerate(((self.keys, "key"), (self.values, "value"))):
                found_SKH, wanted_SKH = blocks[: len(written[row]), half], written[row]
                scales = self.scales_2K[half] if spec.kv_scales == "head" else None
                beyond = (found_SKH.double() - wanted_SKH.double()).abs() > _rounding(wanted_SKH, spec, scales)
                if not found_SKH.isfinite().all() or beyond.any():
                    token, head = beyond.any(-1).nonzero()[0].tolist() if beyond.any() else (0, 0)
                    raise CheckFailed(
                        f"row {row}, token {token}, KV head {head}: the {what} that was read back is not the one written, "
                        f"within the rounding of {spec.kv_dtype} with scales of each {spec.kv_scales}"
                    )
                written[row] = found_SKH

    def _step_tokens(self, per_row: list[torch.Tensor]) -> torch.Tensor:
        parts = [x[before:] for x, (before, _) in zip(per_row, self.case.rows, strict=True)]
        padding = torch.full((self.case.num_padding, *parts[0].shape[1:]), 7.0, dtype=self.case.dtype)
        return torch.cat([*parts, padding]).to(self.device)

    def _diagnosis(self, found_QNH: torch.Tensor, q_QNH: torch.Tensor, row: int) -> str:
        """What the wrong outputs look like."""
        if found_QNH.isnan().any():
            return _hint(found_QNH)

        def fits(**changed: Any) -> float:
            return float((found_QNH - self._definition(q_QNH, row, **changed)).abs().max())

        for words, ahead in (("keys after the query, as if it were not causal", len(self.keys[row])), ("one key too many", 1)):
            if fits(ahead=ahead) <= self.tolerance:
                return f"its values are those of a query that sees {words}"
        low, high = 0.05, 20.0
        for _ in range(40):  # the right factor has the least error: close in on it from both sides, by ratios
            third = (high / low) ** (1 / 3)
            if fits(scale=low * third) < fits(scale=high / third):
                high /= third
            else:
                low *= third
        if fits(scale=low) <= self.tolerance:
            right = self.case.head_dim**-0.5
            return f"its values are those of a wrong scale: about {right * low:.3g}, where {right:.3g} is asked for"
        return _hint(found_QNH)

    def _judge(self, out_TNH: torch.Tensor) -> None:
        first = 0
        for row, (before, count) in enumerate(self.case.rows):
            found = out_TNH[first : first + count].double()
            q_QNH = self.q_TNH[first : first + count]
            worst = (found - self._definition(q_QNH, row)).abs().amax((1, 2))
            token = int(worst.nan_to_num(torch.inf).argmax())
            if not worst[token] <= self.tolerance:
                raise CheckFailed(
                    f"row {row} (context {before} + {count} tokens): token {token} is off by {worst[token]:.2g}, over "
                    f"{self.tolerance:.0e} for {self.case.dtype}; {self._diagnosis(found, q_QNH, row)}. Case: {self.case}"
                )
            first += count
        if not out_TNH[first:].isfinite().all():
            raise CheckFailed("a padding token's output is not finite")

    def _judge_lse(self, lse_TN: torch.Tensor) -> None:
        first = 0
        for row, (_, count) in enumerate(self.case.rows):
            scores_NQS = self._scores(self.q_TNH[first : first + count], row)
            off = (lse_TN[first : first + count].double() - scores_NQS.logsumexp(-1).T).abs().max()
            if not off <= 10 * self.tolerance:
                raise CheckFailed(f"row {row}: the logsumexp is off by {off:.2g}; it is of the scaled scores, and natural")
            first += count

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.case.dtype]

    def _definition(self, q_QNH: torch.Tensor, row: int, **changed: Any) -> torch.Tensor:
        group = self.case.num_heads // self.case.num_kv_heads
        v_SNH = self.values[row].double().repeat_interleave(group, 1)
        return torch.einsum("nqs,snh->qnh", self._scores(q_QNH, row, **changed).softmax(-1), v_SNH)

    def _scores(self, q_QNH: torch.Tensor, row: int, *, scale: float = 1.0, ahead: int = 0) -> torch.Tensor:
        """The scores by the definition; `scale` times the right scale, and `ahead` keys after the query seen, are faults."""
        case = self.case
        k_SNH = self.keys[row].double().repeat_interleave(case.num_heads // case.num_kv_heads, 1)
        scores = torch.einsum("qnh,snh->nqs", q_QNH.double(), k_SNH) * case.head_dim**-0.5 * scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        num_q, num_ctx = scores.shape[1:]
        distance = torch.arange(num_ctx - num_q, num_ctx)[:, None] - torch.arange(num_ctx)
        seen = (distance >= -ahead) & (distance < (case.sliding_window or num_ctx + 1))
        return scores.masked_fill(~seen, -torch.inf)


def _largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


def _rounding(x_SKH: torch.Tensor, spec: AttentionSpec, scales_K: torch.Tensor | None) -> torch.Tensor:
    """How far each value may be off: half a step of int8, or of e4m3 (3 bits of mantissa); more by what scales are rounded."""
    x = x_SKH.double().abs()
    scale = x.amax(-1, keepdim=True) / _largest(spec.kv_dtype) if scales_K is None else scales_K.double()[:, None]
    step = scale.expand_as(x) if spec.kv_dtype == torch.int8 else torch.maximum(x / 8, scale * 2.0**-9)
    return step * 0.51 + x * torch.finfo(spec.dtype).eps


def _hint(found_NH: torch.Tensor) -> str:
    if found_NH.isnan().any():
        return "it holds NaN: a slot that nobody wrote was read, or the output was not written"
    return "its values are finite: a wrong block, position, mask or scale"
