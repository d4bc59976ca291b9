"""Contract checks of attention plugins: against the definition, written out densely in float64."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lab import registry
from lab.capabilities import GRAPH_SUPPORT, Needs, unmet
from lab.checks import CheckFailed, NotDeclared
from lab.checks.attention_trial import Case, Trial, compare, devices_of, dtypes_of, make_backend, spec_of
from lab.contracts.attention import AttentionSpec
from lab.registry import Entry

QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # KV dtypes by the names that capabilities have for them
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025, 4095, 4096, 4097)
HEAD_DIMS = (64, 80, 96, 128, 256)


def check_decode_at_block_edges(entry: Entry, options: Any) -> None:
    """One token a row, contexts of 1 to 4,097 tokens around the edges of blocks."""
    for block_size in _block_sizes(entry):
        compare(entry, options, Case(tuple((n - 1, 1) for n in EDGES), block_size=block_size, head_dim=_dim(entry)))


def check_fresh_prefill(entry: Entry, options: Any) -> None:
    """Whole prompts with nothing before them, from 1 to 700 tokens."""
    for block_size in _block_sizes(entry):
        rows = tuple((0, n) for n in (1, 2, 15, 16, 17, 63, 64, 65, 700))
        compare(entry, options, Case(rows, block_size=block_size, head_dim=_dim(entry)))


def check_chunk_after_prefix(entry: Entry, options: Any) -> None:
    """Chunks of a prompt whose beginning is in the cache already: causal by absolute position."""
    rows = ((1, 2), (15, 1), (16, 16), (17, 40), (300, 33), (33, 300), (1000, 17), (4000, 97))
    for block_size in _block_sizes(entry):
        compare(entry, options, Case(rows, block_size=block_size, head_dim=_dim(entry)))


def check_mixed_batch(entry: Entry, options: Any) -> None:
    """Prefills, chunks, decodes and rows of a few tokens in one step, in any order."""
    rows = ((0, 33), (100, 1), (64, 20), (5, 1), (0, 1), (250, 6), (31, 6), (512, 1), (16, 100))
    compare(entry, options, Case(rows, head_dim=_dim(entry)))
    compare(entry, options, Case(rows[::-1], head_dim=_dim(entry)))


def check_drafts(entry: Entry, options: Any) -> None:
    """If declared: every row with the same few tokens, as drafts are verified, contexts around the edges of blocks."""
    _ask_for(entry, "spec_verify")
    for num_q in (2, 4, 9):
        rows = tuple((n, num_q) for n in (1, 14, 15, 16, 31, 32, 127, 1023))
        compare(entry, options, Case(rows, head_dim=_dim(entry)))


WIDE = (-1, -1, -1, 0, 0, 1, 3, 3, 4, 7, 7, 2)  # trees by the parents of their nodes
DEEP = (-1, 0, 0, 1, 2, 3, 5, 6, 4, 8)
BUSH = tuple(-1 if node < 5 else node // 4 for node in range(50))


def check_trees(entry: Entry, options: Any) -> None:
    """If declared: a node of a tree of drafts sees the text and its own path, and no other node, whatever else there is."""
    _ask_for(entry, "tree_verify")
    features = entry.capabilities.features
    rows = ((300, 13), (0, 20), (31, 11), (100, 1), (15, 51), (64, 4), (1, 1 + 12), (1023, 11))
    case = Case(rows, head_dim=_dim(entry), trees=(WIDE, (), DEEP, (), BUSH, (), WIDE, DEEP))
    few = Case(((40, 3), (16, 3), (250, 3)), head_dim=_dim(entry), trees=((-1, -1), (-1, -1), (-1, 0)))
    uniform = Case(((47, 13), (3, 13), (600, 13)), head_dim=_dim(entry), trees=(WIDE, WIDE, ()))
    cases = [case, few, uniform, replace(case, rows=rows[::-1], trees=case.trees[::-1], num_padding=3)]
    cases += [replace(case, dtype=dtype) for dtype in dtypes_of(entry)]
    cases += [replace(each, num_heads=group, num_kv_heads=1) for each in (few, uniform) for group in (1, 3, 8)]
    cases += [replace(each, block_size=_block_sizes(entry)[0]) for each in (case, few)]
    if "sliding_window" in features:
        cases += [replace(each, sliding_window=window) for each in (case, few) for window in (8, 33, 400)]
    if "softcap" in features:
        cases += [replace(each, softcap=2.0) for each in (case, few)]
    if "sinks" in features:
        cases.append(replace(case, sinks=True))
    for kv_dtype in _quantized(entry):
        cases += [replace(each, kv_dtype=kv_dtype, kv_scales=kind) for each in (case, few) for kind in _kinds_of_scales(entry)]
    cases.append(replace(uniform, prefixes=(((0, 2), 32),)))
    for each in cases:
        compare(entry, options, each)
    if "lse" in features:
        compare(entry, options, case, lse=True)
    if GRAPH_SUPPORT.index(entry.capabilities.graph) > 1:
        chains = replace(uniform, rows=((20, 13), (90, 13), (10, 13)), trees=())
        compare(entry, options, uniform, reuse_of=replace(chains, trees=(DEEP, (), ())))


def check_move(entry: Entry, options: Any) -> None:
    """If trees are declared: `move` copies what slots hold, as it was before, in caches of every KV dtype, and nothing else."""
    _ask_for(entry, "tree_verify")
    case = Case(((60, 1), (5, 1)), head_dim=_dim(entry))
    kinds = [(None, "none")]
    if _quantized(entry):
        kinds += list(itertools.product(_quantized(entry), _kinds_of_scales(entry)))
    sources, targets = [20, 7, 59, 13, 33], [7, 3, 21, 14, 32]  # what is at 7 is overwritten, and read as it was
    for (kv_dtype, kind), device in itertools.product(kinds, devices_of(entry)):
        trial = Trial(replace(case, kv_dtype=kv_dtype, kv_scales=kind), device, seed=0)
        spec = spec_of(trial.case, device)
        backend = make_backend(entry, options, spec)
        kv = trial.poisoned(backend)
        trial.write_contexts(backend, kv)
        everything = torch.arange(trial.num_blocks, device=device)
        before = backend.export_blocks(kv, everything).flatten(0, 1).nan_to_num(7.0)
        slots = [torch.from_numpy(trial.slots(0, np.array(places))).to(device) for places in (sources, targets)]
        backend.move(kv, *slots)
        wanted = before.clone()
        wanted[slots[1]] = before[slots[0]]
        if not torch.equal(backend.export_blocks(kv, everything).flatten(0, 1).nan_to_num(7.0), wanted):
            raise CheckFailed(f"move did not copy the slots as they were, or changed others (KV dtype {spec.kv_dtype})")


def check_shared_prefixes(entry: Entry, options: Any) -> None:
    """Rows that begin with the same blocks, in several groups and in groups within groups: each sees these and its own."""
    features = entry.capabilities.features
    few = 4 if "spec_verify" in features else 1
    rows = ((320, 1), (0, 20), (300, 1), (70, few), (288, 33), (100, 1), (319, 1), (96, few), (65, 1), (290, 2 * few), (400, 1))
    prefixes = (((0, 2, 4, 6, 9, 10), 64), ((3, 7, 8), 64), ((2, 4, 6, 10), 288), ((6, 10), 304))
    case = Case(rows, prefixes=prefixes, head_dim=_dim(entry))
    backwards = tuple((tuple(len(rows) - 1 - row for row in some), num_tokens) for some, num_tokens in prefixes)
    cases = [replace(case, rows=rows[::-1], prefixes=backwards)]
    cases += [replace(case, dtype=dtype, num_padding=2) for dtype in dtypes_of(entry)]
    if "gqa" in features:
        cases += [replace(case, num_heads=group, num_kv_heads=1) for group in range(1, 17)]
    if "sliding_window" in features:
        cases += [replace(case, sliding_window=window) for window in (1, 50, 330, 10_000)]
    if "softcap" in features:
        cases.append(replace(case, softcap=2.0))
    for each in cases:
        compare(entry, options, each)


def check_head_groups(entry: Entry, options: Any) -> None:
    """Query heads per KV head: 1 (all heads their own), and if declared 2 to 16 (GQA), and one KV head for all (MQA)."""
    groups = range(1, 17) if "gqa" in entry.capabilities.features else (1,)
    for group in groups:
        rows = ((40, 1), (0, 19), (17, 20), (3, 4))
        num_kv_heads = 3 if group <= 5 else 1
        case = Case(rows, num_heads=group * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=_dim(entry))
        compare(entry, options, case)


def check_head_dims(entry: Entry, options: Any) -> None:
    """Every head dim that is declared; 64, 80, 96, 128 and 256 when none is."""
    for head_dim in sorted(entry.capabilities.head_dims) or HEAD_DIMS:
        compare(entry, options, Case(((50, 1), (0, 21), (20, 18)), head_dim=head_dim))


def check_dtypes(entry: Entry, options: Any) -> None:
    """Every declared dtype, within the rounding of that dtype."""
    for dtype in dtypes_of(entry):
        compare(entry, options, Case(((99, 1), (0, 40), (33, 30), (7, 3)), dtype=dtype, head_dim=_dim(entry)))


def check_padding(entry: Entry, options: Any) -> None:
    """Padding tokens (slot -1) and rows (no context) write nowhere, change no row, and padding gets finite outputs."""
    for rows in (((20, 1), (40, 1), (3, 1)), ((0, 18), (40, 1))):
        for num_padding_rows in (0, 5):
            compare(entry, options, Case(rows, head_dim=_dim(entry), num_padding=5, num_padding_rows=num_padding_rows))


def check_sliding_window(entry: Entry, options: Any) -> None:
    """If declared: a token sees itself and the window - 1 tokens before it, across block edges."""
    _ask_for(entry, "sliding_window")
    for window in (1, 16, 50, 10_000):
        rows = ((200, 1), (0, 90), (60, 40), (10, 3))
        compare(entry, options, Case(rows, head_dim=_dim(entry), sliding_window=window))


def check_softcap(entry: Entry, options: Any) -> None:
    """If declared: scores are capped as cap * tanh(score / cap) before the mask."""
    _ask_for(entry, "softcap")
    compare(entry, options, Case(((200, 1), (0, 40), (30, 20)), head_dim=_dim(entry), softcap=2.0))


def check_sinks(entry: Entry, options: Any) -> None:
    """If declared: each query head's sink counts in the softmax's denominator, unscaled, whatever else the layer has."""
    _ask_for(entry, "sinks")
    features = entry.capabilities.features
    case = Case(((90, 1), (0, 40), (25, 20), (10, 3), (0, 1)), head_dim=_dim(entry), sinks=True, num_padding=2)
    cases = [replace(case, dtype=dtype) for dtype in dtypes_of(entry)]
    cases += [replace(case, block_size=_block_sizes(entry)[0], sliding_window=16)] if "sliding_window" in features else []
    cases += [replace(case, softcap=2.0)] if "softcap" in features else []
    cases += [replace(case, kv_dtype=kv_dtype, kv_scales="head") for kv_dtype in _quantized(entry)[:1]]
    for one in cases:
        compare(entry, options, one, lse="lse" in features)


def check_export_and_load(entry: Entry, options: Any) -> None:
    """Blocks exported in the canonical format and loaded elsewhere in the pool come back as they were."""
    for device in devices_of(entry):
        spec = spec_of(Case((), head_dim=_dim(entry)), device)
        backend = make_backend(entry, options, spec)
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
    for device in devices_of(entry):
        spec = spec_of(Case((), head_dim=_dim(entry)), device)
        backend = make_backend(entry, options, spec)
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
    declared, kinds = _quantized(entry), _kinds_of_scales(entry)
    rows = ((0, 33), (100, 1), (64, 20), (5, 1), (0, 1), (250, 6), (31, 3), (700, 1), (16, 100))
    for kv_dtype, kv_scales, dtype in itertools.product(declared, kinds, dtypes_of(entry)):
        case = Case(rows, head_dim=_dim(entry), dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales, num_padding=2)
        compare(entry, options, case)
        compare(entry, options, replace(case, prefixes=(((7, 1, 2, 5), 64), ((1, 7), 96))))


def check_quantized_export_and_load(entry: Entry, options: Any) -> None:
    """If declared: blocks loaded into an fp8 or int8 cache are given back within the format's rounding, and no others."""
    declared, kinds = _quantized(entry), _kinds_of_scales(entry)
    for kv_dtype, kv_scales, device in itertools.product(declared, kinds, devices_of(entry)):
        trial = Trial(Case(((0, 32),), head_dim=_dim(entry), kv_dtype=kv_dtype, kv_scales=kv_scales), device, seed=0)
        backend = make_backend(entry, options, spec_of(trial.case, device))
        kv = trial.poisoned(backend)
        before = backend.export_blocks(kv, torch.from_numpy(trial.unowned).to(device))
        x_XB2KH = torch.stack((trial.keys[0], trial.values[0]), 1).unflatten(0, (2, -1)).to(device)
        backend.load_blocks(kv, torch.from_numpy(trial.tables[0]).to(device), x_XB2KH)
        trial.read_back(backend, kv)
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
        compare(entry, options, replace(case, rows=rows), reuse_of=case)


def check_lse(entry: Entry, options: Any) -> None:
    """If declared: `attend_lse` gives attend's outputs, and the logsumexp of the scores that each query sees."""
    _ask_for(entry, "lse")
    rows = ((40, 1), (0, 19), (17, 20), (255, 2))
    case = Case(rows, head_dim=_dim(entry), num_padding=3)
    cases = [case, replace(case, prefixes=(((3, 0), 32),))]
    if "sliding_window" in entry.capabilities.features:
        cases.append(replace(case, sliding_window=16))
    for each in cases:
        compare(entry, options, each, lse=True)


def check_operators(entry: Entry, options: Any) -> None:
    """If the work comes down to operators on the CPU: called one after another, they give what `write` and `attend` give."""
    case = Case(((40, 1), (0, 19), (17, 20), (255, 2)), head_dim=_dim(entry), num_padding=3)
    cpu = torch.device("cpu")
    if cpu not in devices_of(entry) or make_backend(entry, options, spec_of(case, cpu)).operators() is None:
        raise NotDeclared("no operators on the CPU")
    for dtype in dtypes_of(entry):
        compare(entry, options, replace(case, dtype=dtype), by_operators=True)


def check_batch_invariance(entry: Entry, options: Any) -> None:
    """If declared: asked to, it gives a token the same bits alone, beside any others, and in whatever chunk it comes."""
    _ask_for(entry, "batch_invariant")
    rows = ((0, 130), (1030, 1), (700, 17), (0, 1), (40, 3), (470, 90))
    steps = [[(row, *span)] for row, span in enumerate(rows)]  # each row alone
    steps += [[(0, first, min(7, 130 - first)), (4, 40, 3)] for first in range(0, 130, 7)]
    steps += [[(2, 700 + i, 1), (1, 1030, 1), (0, 10 * i, 10)] for i in range(13)]
    steps += [[(5, 470, 41), (2, 700, 9)], [(5, 511, 1)], [(5, 512, 1)], [(5, 505, 30), (0, 0, 1)]]
    window = 100 if "sliding_window" in entry.capabilities.features else None
    cases = [Case(rows, head_dim=_dim(entry), dtype=dtype, batch_invariant=True) for dtype in dtypes_of(entry)]
    cases.append(replace(cases[0], sliding_window=window))
    for case, device in itertools.product(cases, devices_of(entry)):
        backend = make_backend(entry, options, spec_of(case, device))
        trial = Trial(case, device, seed=0)
        together_TNH = trial.outputs(backend)
        for chunks in steps:
            wanted_TNH, found_TNH = together_TNH[trial.places(chunks)], trial.of(chunks).outputs(backend)
            if not torch.equal(found_TNH, wanted_TNH):
                token = int((found_TNH != wanted_TNH).flatten(1).any(1).nonzero()[0])
                raise CheckFailed(
                    f"in a step of the chunks (row, tokens before, tokens) {chunks}, token {token} has other bits than in the "
                    f"step of all rows. Case: {case}"
                )


def check_layout_is_shared(entry: Entry, options: Any) -> None:
    """If a layout is named: lab's own plugins of that layout find in the cache what this one writes there."""
    layout = entry.capabilities.kv_layout
    if not layout:
        raise NotDeclared("no kv_layout")
    for device in devices_of(entry):
        spec = spec_of(Case((), head_dim=_dim(entry), dtype=dtypes_of(entry)[0]), device)
        backend = make_backend(entry, options, spec)
        kv = torch.zeros(backend.kv_shape(4, spec.block_size), dtype=spec.kv_dtype, device=device)
        slots = torch.arange(2 * spec.block_size, 4 * spec.block_size, device=device)
        generator = torch.Generator().manual_seed(6)
        shape = (len(slots), spec.num_kv_heads, spec.head_dim)
        k_TKH, v_TKH = (torch.randn(shape, generator=generator).to(device, spec.dtype) for _ in range(2))
        backend.write(k_TKH, v_TKH, kv, slots)
        for other in registry.entries("attention"):
            if not _is_like(other, layout, spec) or other.name == entry.name:
                continue
            peer = make_backend(other, other.options(), spec)
            if peer.kv_shape(4, spec.block_size) != kv.shape:
                wanted = peer.kv_shape(4, spec.block_size)
                raise CheckFailed(f"kv_layout={layout}: {other.name} gives 4 blocks the shape {wanted}, not {tuple(kv.shape)}")
            found = peer.export_blocks(kv, torch.tensor([2, 3], device=device)).flatten(0, 1)
            if not (torch.equal(found[:, 0], k_TKH) and torch.equal(found[:, 1], v_TKH)):
                raise CheckFailed(f"kv_layout={layout}: {other.name} does not find in the cache what was written there")


def _ask_for(entry: Entry, feature: str) -> None:
    if feature not in entry.capabilities.features:
        raise NotDeclared(f"no feature {feature}")


def _quantized(entry: Entry) -> list[torch.dtype]:
    return [dtype for name, dtype in QUANTIZED.items() if name in entry.capabilities.kv_dtypes]


def _kinds_of_scales(entry: Entry) -> tuple[str, ...]:
    """Of a quantized cache. Raises NotDeclared where there is none."""
    if not _quantized(entry):
        raise NotDeclared("no KV dtype fp8 or int8")
    return ("token_head", "head") if "token_head_scales" in entry.capabilities.features else ("head",)


def _block_sizes(entry: Entry) -> list[int]:
    multiple = entry.capabilities.block_multiple
    return [multiple] if multiple > 16 else sorted({multiple, 16 // multiple * multiple})


def _dim(entry: Entry) -> int:
    dims = entry.capabilities.head_dims
    return 64 if not dims or 64 in dims else min(dims)


def _is_like(other: Entry, layout: str, spec: AttentionSpec) -> bool:
    """One of lab's own that keeps its cache in that layout and can serve the spec on this machine."""
    if other.source != "built-in" or other.capabilities.kv_layout != layout:
        return False
    dtype = str(spec.dtype).removeprefix("torch.")
    needs = Needs(device=spec.device.type, dtype=dtype, kv_dtype=dtype, head_dim=spec.head_dim, block_size=spec.block_size)
    return not unmet(other.capabilities, needs)
