"""Every registered attention plugin keeps the contract, and the checks see the faults that they are there for."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from lab import registry
from lab.checks import CheckFailed, NotDeclared
from lab.checks import attention as checks
from lab.checks.attention import Case

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
USABLE = [entry for entry in registry.entries("attention") if entry.source == "built-in"]
Eager = registry.get("attention", "eager").load()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", USABLE, ids=lambda e: e.name)
def test_contract(entry, check):
    with suppress(NotDeclared):
        check(entry, entry.options())


class IgnoresBlockTable(Eager):
    def plan(self, batch, reuse=None):
        plan = super().plan(batch)
        in_order = torch.arange(plan.blocks_RM.numel(), dtype=torch.int32).view_as(plan.blocks_RM) % 8
        return type(plan)(plan.q_start, plan.ctx_len, in_order)


class ReadsPastContext(Eager):
    def plan(self, batch, reuse=None):
        plan = super().plan(batch)
        return type(plan)(plan.q_start, [n + 1 for n in plan.ctx_len], plan.blocks_RM)


class WrongScale(Eager):
    def attend(self, q_TNH, kv, plan, out_TNH):
        super().attend(q_TNH * 1.01, kv, plan, out_TNH)


class PaddingIntoLastBlock(Eager):
    def kv_shape(self, num_blocks, block_size):
        return super().kv_shape(num_blocks - 1, block_size)


class LeavesPaddingUnwritten(Eager):
    def attend(self, q_TNH, kv, plan, out_TNH):
        last = plan.q_start[-1]
        super().attend(q_TNH[:last], kv, plan, out_TNH[:last])


class ReadsForPaddingRows(Eager):
    """As a graph's kernel that takes every row to have a context: the last padding row's token sees block 0."""

    def attend(self, q_TNH, kv, plan, out_TNH):
        super().attend(q_TNH, kv, plan, out_TNH)
        if len(plan.blocks_RM) > len(plan.ctx_len):
            k_SKH, v_SKH = self._gather(kv, plan.blocks_RM[-1], 1)
            out_TNH[-1:] = self._attend_row(q_TNH[-1:], k_SKH, v_SKH)


class NotCausal(Eager):
    def _attend_row(self, q_QNH, k_SKH, v_SKH):
        return torch.cat([super(NotCausal, self)._attend_row(q[None], k_SKH, v_SKH) for q in q_QNH])


class ForgetsWindow(Eager):
    def __init__(self, options, spec):
        super().__init__(options, checks.replace(spec, sliding_window=None))


class SwapsKeyAndValue(Eager):
    def export_blocks(self, kv, block_ids):
        return super().export_blocks(kv, block_ids).flip(2)


FAULTS = [
    (IgnoresBlockTable, "check_mixed_batch"),
    (ReadsPastContext, "check_decode_at_block_edges"),
    (WrongScale, "check_fresh_prefill"),
    (PaddingIntoLastBlock, "check_padding"),
    (LeavesPaddingUnwritten, "check_padding"),
    (ReadsForPaddingRows, "check_padding"),
    (NotCausal, "check_chunk_after_prefix"),
    (ForgetsWindow, "check_sliding_window"),
    (SwapsKeyAndValue, "check_layout_agrees_with_write"),
]


@pytest.mark.parametrize(("faulty", "name"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_is_found(faulty, name):
    entry = SimpleNamespace(name="faulty", capabilities=Eager.capabilities, load=lambda: faulty)
    with pytest.raises((CheckFailed, IndexError)):
        getattr(checks, name)(entry, faulty.Options())


def test_the_definition_agrees_with_torch():
    """The oracle itself, against torch's own attention on one row."""
    trial = checks._Trial(Case(((0, 9),), num_heads=4, num_kv_heads=4), torch.device("cpu"), seed=3)
    found = trial._definition(trial.q_TNH, 0)
    q, k, v = (x.double().transpose(0, 1)[None] for x in (trial.q_TNH, trial.keys[0], trial.values[0]))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    assert torch.allclose(found, wanted)
