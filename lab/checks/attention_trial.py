"""A trial of an attention plugin: a case with random values in a poisoned pool, judged by the definition in float64."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lab.checks import CheckFailed
from lab.checks.attention_case import Case, spec_of
from lab.contracts.attention import Attention, AttentionSpec
from lab.registry import Entry
from lab.runner.batch import Batch, BatchBuilder, Share
from lab.runner.rows import Rows

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def compare(
    entry: Entry, options: Any, case: Case, reuse_of: Case | None = None, *, lse: bool = False, by_operators: bool = False
) -> None:
    """Run the case on every declared device in a poisoned, shuffled pool and hold the outputs against the definition.

    Operators are for the CPU alone.
    """
    case = replace(case, block_size=max(case.block_size, entry.capabilities.block_multiple))
    if case.dtype not in dtypes_of(entry):
        case = replace(case, dtype=dtypes_of(entry)[0])
    for device in [device for device in devices_of(entry) if device.type == "cpu" or not by_operators]:
        backend = make_backend(entry, options, spec_of(case, device))
        reuse = backend.plan(Trial(reuse_of, device, seed=5).batch) if reuse_of else None
        trial = Trial(case, device, seed=0)
        trial.run(backend, reuse, lse=lse, by_operators=by_operators)


class Trial:
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
        self.sinks_N = 2 * torch.randn(case.num_heads, generator=generator) + 2 if case.sinks else None
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
        is_full = sum(case.rows[0]) >= case.block_size
        for row, (table, (before, _)) in enumerate(zip(self.tables, case.rows, strict=True)):
            rows.blocks_RM[row, : len(table)] = table
            if case.sliding_window is not None and is_full:  # what lies behind the window was given back, and is another's
                passed = max(0, before - case.sliding_window + 1) // case.block_size
                rows.blocks_RM[row, :passed] = self.tables[0][0]
        shares = []
        for row, (before, count) in enumerate(case.rows):
            tree = case.tree_of(row)
            shares.append(Share(row, before, count, 0 if tree is None else len(tree.parents), True, tree))
        builder = BatchBuilder(rows, case.block_size, self.device)
        return builder.build(shares, len(self.q_TNH), len(case.rows) + case.num_padding_rows)

    def of(self, chunks: Sequence[tuple[int, int, int]]) -> "Trial":
        """A trial of some of its tokens: of each chunk the row, the tokens before it and its own tokens, of the row's step."""
        made = copy.copy(self)
        made.case = replace(self.case, rows=tuple((before, count) for _, before, count in chunks), num_padding=0)
        rows = [row for row, _, _ in chunks]
        ends = [before + count for _, before, count in chunks]
        made.keys = [self.keys[row][:end] for row, end in zip(rows, ends, strict=True)]
        made.values = [self.values[row][:end] for row, end in zip(rows, ends, strict=True)]
        made.tables = [self.tables[row][: -(-end // self.case.block_size)] for row, end in zip(rows, ends, strict=True)]
        made.q_TNH = self.q_TNH[self.places(chunks)]
        made.batch = made._batch(max(ends))
        return made

    def places(self, chunks: Sequence[tuple[int, int, int]]) -> list[int]:
        """Where the tokens of these chunks stand among those of this trial."""
        starts = np.cumsum([0, *(count for _, count in self.case.rows)])
        firsts = [int(starts[row]) + before - self.case.rows[row][0] for row, before, _ in chunks]
        return [first + i for first, (_, _, count) in zip(firsts, chunks, strict=True) for i in range(count)]

    def outputs(self, backend: Attention) -> torch.Tensor:
        """out_TNH, not judged."""
        kv = self.poisoned(backend)
        self.write_contexts(backend, kv)
        out_TNH = torch.full_like(self.q_TNH, float("nan")).to(self.device)
        plan = backend.plan(self.batch)
        backend.write(self._step_tokens(self.keys), self._step_tokens(self.values), kv, self.batch.slots_T)
        backend.attend(self.q_TNH.to(self.device), kv, plan, out_TNH)
        return out_TNH.cpu()

    def slots(self, row: int, places: np.ndarray) -> np.ndarray:
        """Where these tokens of a row lie."""
        size = self.case.block_size
        return self.tables[row][places // size] * size + places % size

    def write_contexts(self, backend: Attention, kv: torch.Tensor) -> None:
        """Write what the rows have in the cache before the step."""
        device = self.device
        for row, (k_SKH, v_SKH, (before, _)) in enumerate(zip(self.keys, self.values, self.case.rows, strict=True)):
            if before:
                slots = self.slots(row, np.arange(before))
                backend.write(k_SKH[:before].to(device), v_SKH[:before].to(device), kv, torch.from_numpy(slots).to(device))

    def run(self, backend: Attention, reuse: Any, *, lse: bool = False, by_operators: bool = False) -> None:
        """Attend, and judge all that came of it."""
        case, device = self.case, self.device
        kv = self.poisoned(backend)
        before_X = backend.export_blocks(kv, torch.from_numpy(self.unowned).to(device))
        self.write_contexts(backend, kv)
        k_TKH, v_TKH = self._step_tokens(self.keys), self._step_tokens(self.values)
        plan = backend.plan(self.batch) if reuse is None else backend.plan(self.batch, reuse)
        if reuse is not None and plan is not reuse:
            raise CheckFailed("plan(batch, reuse) returned another plan; a captured graph would go on reading the old one")
        out_TNH = torch.full_like(self.q_TNH, float("nan")).to(device)
        given = {"q": self.q_TNH.to(device), "k": k_TKH, "v": v_TKH, "kv": kv, "slots": self.batch.slots_T, "out": out_TNH}
        if by_operators:
            for call in backend.operators():
                call.operator(*(given[name] if name in given else getattr(plan, name) for name in call.arguments))
        else:
            backend.write(k_TKH, v_TKH, kv, self.batch.slots_T)
            if lse:
                lse_TN = torch.full(out_TNH.shape[:2], float("nan"), device=device)
                backend.attend_lse(given["q"], kv, plan, out_TNH, lse_TN)
            else:
                backend.attend(given["q"], kv, plan, out_TNH)
        if case.kv_scales != "none":
            self.read_back(backend, kv)
        if lse:
            self._judge_lse(lse_TN.cpu())
        self._judge(out_TNH.cpu())
        strangers = backend.export_blocks(kv, torch.from_numpy(self.unowned).to(device))
        if not torch.equal(strangers.nan_to_num(7.0), before_X.nan_to_num(7.0)):
            raise CheckFailed("a block that belongs to no row of the step was written to")

    def poisoned(self, backend: Attention) -> torch.Tensor:
        """A pool of bytes that are NaN in every float dtype, scales included, with its fixed scales in place."""
        spec, device = backend.spec, self.device
        shape = backend.kv_shape(self.num_blocks, spec.block_size)
        num_bytes = math.prod(shape) * spec.kv_dtype.itemsize
        kv = torch.full((num_bytes,), 255, dtype=torch.uint8, device=device).view(spec.kv_dtype).view(shape)
        if spec.kv_scales == "head":
            backend.set_scales(kv, self.scales_2K.to(device))
        if self.sinks_N is not None:
            backend.set_sinks(kv, self.sinks_N.to(device))
        return kv

    def read_back(self, backend: Attention, kv: torch.Tensor) -> None:
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

        if self.case.tree_of(row) is not None and fits(chained=True) <= self.tolerance:
            return "its values are those of a chain: nodes see others that are not on their path"
        for words, ahead in (("keys after the query, as if it were not causal", len(self.keys[row])), ("one key too many", 1)):
            if fits(ahead=ahead) <= self.tolerance:
                return f"its values are those of a query that sees {words}"
        if fits(spread=True) <= self.tolerance:
            kv_heads, group = self.case.num_kv_heads, self.case.num_heads // self.case.num_kv_heads
            return f"its values are those of query heads n over KV heads n % {kv_heads}, where head n is over n // {group}"
        for other, k_SKH in enumerate(self.keys):
            if other != row and len(k_SKH) >= len(self.keys[row]) and fits(other=other) <= self.tolerance:
                return f"its values are those of the keys of row {other}: another row's block table was read"
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
            off = (lse_TN[first : first + count].double() - self._with_sinks(scores_NQS).logsumexp(-1).T).abs().max()
            if not off <= 10 * self.tolerance:
                raise CheckFailed(f"row {row}: the logsumexp is off by {off:.2g}; it is of the scaled scores, and natural")
            first += count

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.case.dtype]

    def _definition(self, q_QNH: torch.Tensor, row: int, **changed: Any) -> torch.Tensor:
        v_SNH = _by_heads(self.case, self.values, row, **changed)
        weights_NQS = self._with_sinks(self._scores(q_QNH, row, **changed)).softmax(-1)[..., : len(v_SNH)]
        return torch.einsum("nqs,snh->qnh", weights_NQS, v_SNH)

    def _with_sinks(self, scores_NQS: torch.Tensor) -> torch.Tensor:
        if self.sinks_N is None:
            return scores_NQS
        return torch.cat((scores_NQS, self.sinks_N.double()[:, None, None].expand(-1, scores_NQS.shape[1], 1)), -1)

    def _scores(
        self, q_QNH: torch.Tensor, row: int, *, scale: float = 1.0, ahead: int = 0, chained: bool = False, **whose: Any
    ) -> torch.Tensor:
        """The scores by the definition; `scale` times the right scale, `ahead` keys after the query seen, and a tree as if it
        were a chain are faults.
        """
        case = self.case
        k_SNH = _by_heads(self.case, self.keys, row, **whose)
        scores = torch.einsum("qnh,snh->nqs", q_QNH.double(), k_SNH) * case.head_dim**-0.5 * scale
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        num_q, num_ctx = scores.shape[1:]
        tree = None if chained else case.tree_of(row)
        positions = torch.arange(num_ctx)
        if tree is not None:  # a node stands behind its parent
            before = num_ctx - len(tree.parents)
            positions[before:] = before - 1 + torch.tensor(tree.depths)
        distance = positions[num_ctx - num_q :, None] - positions
        seen = (distance >= -ahead) & (distance < (case.sliding_window or num_ctx + 1))
        for node, path in enumerate(tree.ancestors if tree is not None else ()):
            seen[num_q - len(tree.parents) + node, before:] &= torch.tensor(
                [bool(path >> i & 1) for i in range(num_ctx - before)]
            )
        if tree is not None:
            seen[: num_q - len(tree.parents), before:] = False
        return scores.masked_fill(~seen, -torch.inf)


def _by_heads(
    case: Case, of_rows: list[torch.Tensor], row: int, *, other: int | None = None, spread: bool = False, **_: Any
) -> torch.Tensor:
    """Keys or values of a row, those that each query head takes. Those of an `other` row are a fault, and so are heads that
    stand `spread`: every so many of them share a KV head, in place of neighbours.
    """
    group = case.num_heads // case.num_kv_heads
    x_SKH = of_rows[row if other is None else other][: len(of_rows[row])].double()
    return x_SKH.repeat(1, group, 1) if spread else x_SKH.repeat_interleave(group, 1)


def make_backend(entry: Entry, options: Any, spec: AttentionSpec) -> Attention:
    """The plugin for a layer."""
    return entry.load()(options, spec)


def devices_of(entry: Entry) -> list[torch.device]:
    """Those that it declares and this machine has. Raises CheckFailed when there are none."""
    declared = entry.capabilities.devices or {"cpu"}
    devices = [torch.device("cpu")] if "cpu" in declared else []
    if "cuda" in declared and torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    if not devices:
        raise CheckFailed(f"it runs on {', '.join(sorted(declared))}, and this machine has none of these")
    return devices


def dtypes_of(entry: Entry) -> list[torch.dtype]:
    """Those that it declares, by name."""
    names = entry.capabilities.dtypes or {"float32", "bfloat16", "float16"}
    return [getattr(torch, name) for name in sorted(names)]


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
