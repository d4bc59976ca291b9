"""What an attention plugin is tried on: the rows of a step and the shape of a layer."""

import dataclasses
from dataclasses import dataclass

import torch

from lab.contracts.attention import AttentionSpec
from lab.sample.tree import Tree

ROWS_TOLD = 8
ALWAYS_TOLD = ("num_heads", "num_kv_heads", "head_dim", "block_size", "dtype")


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
    batch_invariant: bool = False
    sinks: bool = False
    trees: tuple[tuple[int, ...], ...] = ()  # of each row: the parents of its last tokens, which are a tree of drafts; () none

    def tree_of(self, row: int) -> Tree | None:
        return Tree.of(self.trees[row]) if self.trees and self.trees[row] else None

    def __str__(self) -> str:
        """What is not as it is by default, and the first rows."""
        rows = ", ".join(f"{before}+{count}" for before, count in self.rows[:ROWS_TOLD])
        told = [f"rows (context+tokens) {rows}" + (f" and {len(self.rows) - ROWS_TOLD} more" if self.rows[ROWS_TOLD:] else "")]
        for one in dataclasses.fields(self)[1:]:
            value = getattr(self, one.name)
            if one.name in ALWAYS_TOLD or value != one.default:
                told.append(f"{one.name} {value}")
        return ", ".join(told)


def spec_of(case: Case, device: torch.device) -> AttentionSpec:
    """The layer that a case is about."""
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
        batch_invariant=case.batch_invariant,
        has_sinks=case.sinks,
    )
