"""The kernels of `flash` for the CPU: C++ operators over the sources in cpu/, built on first use.

Each call into C++ costs about two microseconds, so `plan` prepares all that the layers of a step have in common.
"""

from pathlib import Path
from typing import Any

import torch

from lab.api import AttentionSpec, UserError, dataclass, native

LIBRARY = "lab_flash"
SOURCES = sorted((Path(__file__).parent / "cpu").glob("*.cpp"))


@dataclass(slots=True)
class Plan:
    """A step cut into work items. Nothing on the CPU keeps the addresses of its tensors, so reuse puts new ones in."""

    items: torch.Tensor  # see Item in flash.h
    partials: torch.Tensor
    arrived: torch.Tensor
    blocks_RM: torch.Tensor
    num_tokens: int


class CpuKernels:
    """Plans, writes and attends for one layer's shape."""

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        native.load(LIBRARY, SOURCES)
        ops = torch.ops.lab_flash
        self._write, self._attend, self._plan = ops.write.default, ops.attend.default, ops.plan.default
        self._spec = spec
        self._num_splits = options.num_splits
        self._group = spec.num_heads // spec.num_kv_heads
        self._window = spec.sliding_window or 0
        self._softcap = spec.softcap or 0.0
        self._isa = _index_of(options.isa)

    def plan(self, batch: Any, reuse: Plan | None = None) -> Plan:
        spec = self._spec
        tables = torch.from_numpy(batch.q_start_R1_cpu), torch.from_numpy(batch.ctx_len_R_cpu)
        shape = spec.num_kv_heads, self._group, spec.head_dim, self._window
        cut = self._plan(*tables, *shape, self._num_splits, torch.get_num_threads())
        num_tokens = int(batch.q_start_R1_cpu[-1])
        if reuse is None:
            return Plan(*cut, batch.blocks_RM, num_tokens)
        reuse.items, reuse.partials, reuse.arrived = cut
        reuse.blocks_RM, reuse.num_tokens = batch.blocks_RM, num_tokens
        return reuse

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: torch.Tensor, slots_T: torch.Tensor) -> None:
        self._write(k_TKH, v_TKH, kv, slots_T)

    def attend(self, q_TNH: torch.Tensor, kv: torch.Tensor, plan: Plan, out_TNH: torch.Tensor) -> None:
        work = plan.blocks_RM, plan.items, plan.partials, plan.arrived
        self._attend(q_TNH, kv, *work, out_TNH, self._spec.scale, self._softcap, self._window, plan.num_tokens, self._isa)


def _index_of(isa: str) -> int:
    """The kernels' place in the library's list, which begins with the fastest. Raises UserError when they are not there."""
    usable = torch.ops.lab_flash.isas()
    if isa == "auto":
        return 0
    if isa not in usable:
        raise UserError(f"attention.isa={isa}: this machine has no such kernels.\nAvailable: auto, {', '.join(usable)}.")
    return usable.index(isa)
