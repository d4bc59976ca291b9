"""The kernels of `flash` for the CPU: C++ operators over the sources in cpu/, built on first use.

Each call into C++ costs some microseconds, more with every argument, so `plan` prepares all that a step's layers share.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lab.api import AttentionSpec, OperatorCall, UserError, dataclass, native

from .cascade import least_shared

LIBRARY = "lab_flash"  # the kernels that this CPU runs fastest
EVERY_ISA = "lab_flash_every_isa", ("-DFLASH_EVERY_ISA",)  # with those for lesser instruction sets, for who asks for one
SOURCES = sorted((Path(__file__).parent / "cpu").glob("*.cpp"))


@dataclass(slots=True)
class Plan:
    """A step cut into work items, and its block tables. Nothing on the CPU keeps the addresses of its tensors."""

    work: torch.Tensor  # see Plan in cpu/ops.cpp
    blocks_RM: torch.Tensor


class CpuKernels:
    """Plans, writes and attends for one layer's shape."""

    dim_multiple = 32

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        self._isa = options.isa
        self.num_kv_heads = spec.num_kv_heads
        self._head_dim = spec.head_dim
        shape = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.block_size
        scores = float(spec.scale), spec.softcap or 0.0, spec.sliding_window or 0
        isa = 0 if options.isa == "auto" else _index_of(options.isa, self._ops.isas())
        self._how = (
            *shape,
            *scores,
            options.num_splits,
            least_shared(options.cascade),
            isa,
            spec.batch_invariant,
            spec.has_sinks,
        )

    @cached_property
    def _ops(self) -> Any:
        """Loaded when first asked for: until then a cold start has them built while the model is compiled."""
        name, flags = (LIBRARY, ()) if self._isa == "auto" else EVERY_ISA
        native.load(name, SOURCES, flags=flags)
        return getattr(torch.ops, name)

    @cached_property
    def write(self) -> Any:
        return self._ops.write.default

    @cached_property
    def _attend(self) -> Any:
        return self._ops.attend.default

    @cached_property
    def _plan(self) -> Any:
        return self._ops.plan.default

    def operators(self) -> list[OperatorCall]:
        return [
            OperatorCall(self.write, ("k", "v", "kv", "slots")),
            OperatorCall(self._attend, ("q", "kv", "blocks_RM", "work", "out")),
        ]

    def plan(self, batch: Any, reuse: Plan | None = None) -> Plan:
        starts, contexts = torch.from_numpy(batch.q_start_R1_cpu), torch.from_numpy(batch.ctx_len_R_cpu)
        trees = (None, None) if batch.trees is None else (batch.trees.start_R, batch.trees.ancestors_T)
        work = self._plan(starts, contexts, batch.blocks_RM, *self._how, *trees)
        if reuse is None:
            return Plan(work, batch.blocks_RM)
        reuse.work, reuse.blocks_RM = work, batch.blocks_RM
        return reuse

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        self._attend(q_TNH, kv, plan.blocks_RM, plan.work, out_TNH)

    def move(self, kv: torch.Tensor, from_X: torch.Tensor, to_X: torch.Tensor) -> None:
        self._ops.move.default(kv, from_X, to_X, self._head_dim)

    def attend_lse(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor
    ) -> None:
        self._ops.attend_lse.default(q_TNH, kv, plan.blocks_RM, plan.work, out_TNH, lse_TN)


def _index_of(isa: str, usable: Sequence[str]) -> int:
    """The kernels' place in the library's list, which begins with the fastest. Raises UserError when they are not there."""
    if isa not in usable:
        raise UserError(f"attention.isa={isa}: this machine has no such kernels.\nAvailable: auto, {', '.join(usable)}.")
    return usable.index(isa)
