"""The kernels of `flash` for the CPU: C++ operators over the sources in cpu/, built on first use.

Each call into C++ costs some microseconds, more with every argument, so `plan` prepares all that a step's layers share.
"""

from pathlib import Path
from typing import Any

import torch

from lab.api import AttentionSpec, UserError, dataclass, native

from .cascade import least_shared

LIBRARY = "lab_flash"
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
        native.load(LIBRARY, SOURCES)
        ops = torch.ops.lab_flash
        self._plan, self.write = ops.plan.default, ops.write.default
        self._attend, self._attend_lse = ops.attend.default, ops.attend_lse.default
        self.num_kv_heads = spec.num_kv_heads
        shape = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, spec.block_size
        scores = float(spec.scale), spec.softcap or 0.0, spec.sliding_window or 0
        self._how = (*shape, *scores, options.num_splits, least_shared(options.cascade), _index_of(options.isa))

    def plan(self, batch: Any, reuse: Plan | None = None) -> Plan:
        starts, contexts = torch.from_numpy(batch.q_start_R1_cpu), torch.from_numpy(batch.ctx_len_R_cpu)
        work = self._plan(starts, contexts, batch.blocks_RM, *self._how)
        if reuse is None:
            return Plan(work, batch.blocks_RM)
        reuse.work, reuse.blocks_RM = work, batch.blocks_RM
        return reuse

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        self._attend(q_TNH, kv, plan.blocks_RM, plan.work, out_TNH)

    def attend_lse(
        self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor, lse_TN: torch.Tensor
    ) -> None:
        self._attend_lse(q_TNH, kv, plan.blocks_RM, plan.work, out_TNH, lse_TN)


def _index_of(isa: str) -> int:
    """The kernels' place in the library's list, which begins with the fastest. Raises UserError when they are not there."""
    usable = torch.ops.lab_flash.isas()
    if isa == "auto":
        return 0
    if isa not in usable:
        raise UserError(f"attention.isa={isa}: this machine has no such kernels.\nAvailable: auto, {', '.join(usable)}.")
    return usable.index(isa)
