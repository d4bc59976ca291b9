"""The kernels of `flash` for the CPU: C++ operators over the sources in cpu/, built on first use.

Each call into C++ costs some microseconds, more with every argument, so `plan` prepares all that a step's layers share.
"""

from pathlib import Path
from typing import Any

import torch

from lab.api import AttentionSpec, UserError, dataclass, native

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
        self._plan, self._attend, self.write = ops.plan.default, ops.attend.default, ops.write.default
        shape = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim
        scores = float(spec.scale), spec.softcap or 0.0, spec.sliding_window or 0
        self._how = (*shape, *scores, options.num_splits, _index_of(options.isa), spec.batch_invariant)

    def plan(self, batch: Any, reuse: Plan | None = None) -> Plan:
        work = self._plan(torch.from_numpy(batch.q_start_R1_cpu), torch.from_numpy(batch.ctx_len_R_cpu), *self._how)
        if reuse is None:
            return Plan(work, batch.blocks_RM)
        reuse.work, reuse.blocks_RM = work, batch.blocks_RM
        return reuse

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        self._attend(q_TNH, kv, plan.blocks_RM, plan.work, out_TNH)


def _index_of(isa: str) -> int:
    """The kernels' place in the library's list, which begins with the fastest. Raises UserError when they are not there."""
    usable = torch.ops.lab_flash.isas()
    if isa == "auto":
        return 0
    if isa not in usable:
        raise UserError(f"attention.isa={isa}: this machine has no such kernels.\nAvailable: auto, {', '.join(usable)}.")
    return usable.index(isa)
