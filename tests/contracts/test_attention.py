"""Every registered attention plugin keeps the contract, and the checks see the faults that they are there for."""

from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab import registry
from lab.checks import CheckFailed, NotDeclared
from lab.checks import attention as checks
from lab.checks.attention_trial import Case, Trial
from lab.cli.machine import unusable

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
BUILT_IN = [entry for entry in registry.entries("attention") if entry.source == "built-in"]
USABLE = [entry for entry in BUILT_IN if not unusable(entry)]
OF_PACKAGES = {"fa", "flashinfer"}  # adapters of packages for CUDA: tests/attention/test_adapters.py
Eager = registry.get("attention", "eager").load()
Flash = registry.get("attention", "flash").load()


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", USABLE, ids=lambda e: e.name)
def test_contract(entry, check):
    with suppress(NotDeclared):
        check(entry, entry.options())


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize(("prefill", "decode"), [("flex", "sdpa"), ("eager", "flex"), ("flash", "flash")])
def test_contract_of_pairs(prefill, decode, check):
    hybrid = registry.get("attention", "hybrid")
    options = hybrid.make_options({"prefill": prefill, "decode": decode})
    with suppress(NotDeclared):
        check(hybrid.with_options(options), options)


def test_only_adapters_may_lack_what_they_need():
    assert {entry.name for entry in BUILT_IN} - {entry.name for entry in USABLE} <= OF_PACKAGES


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
            out_TNH[-1:] = self._attend_row(q_TNH[-1:], k_SKH, v_SKH, None)


class NotCausal(Eager):
    def _attend_row(self, q_QNH, k_SKH, v_SKH, *others):
        return torch.cat([super(NotCausal, self)._attend_row(q[None], k_SKH, v_SKH, *others) for q in q_QNH])


class ForgetsWindow(Eager):
    def __init__(self, options, spec):
        super().__init__(options, checks.replace(spec, sliding_window=None))


class ForgetsScale(Eager):
    def __init__(self, options, spec):
        super().__init__(options, checks.replace(spec, scale=1.0))


class SharesToTheEnd(Eager):
    """As one that takes rows with the same first block to have all blocks before the step in common."""

    def plan(self, batch, reuse=None):
        plan = super().plan(batch)
        blocks_RM = plan.blocks_RM.clone()
        for row in range(len(plan.ctx_len)):
            leader = int((blocks_RM[:, 0] == blocks_RM[row, 0]).nonzero()[0])
            before = plan.ctx_len[row] - (plan.q_start[row + 1] - plan.q_start[row])
            blocks_RM[row, : before // self.spec.block_size] = blocks_RM[leader, : before // self.spec.block_size]
        return type(plan)(plan.q_start, plan.ctx_len, blocks_RM)


class OneKvHeadForAll(Eager):
    """As a kernel that divides the query heads wrongly."""

    def _gather(self, kv, blocks_M, ctx_len):
        k_SKH, v_SKH = super()._gather(kv, blocks_M, ctx_len)
        return k_SKH[:, :1].expand_as(k_SKH), v_SKH[:, :1].expand_as(v_SKH)


class OneTokenOfDrafts(Eager):
    """As a decode kernel that sees every query of a row at the row's end."""

    def _attend_row(self, q_QNH, k_SKH, v_SKH, *others):
        if len(q_QNH) > 10:
            return super()._attend_row(q_QNH, k_SKH, v_SKH, *others)
        return torch.cat([super(OneTokenOfDrafts, self)._attend_row(q[None], k_SKH, v_SKH, *others) for q in q_QNH])


class LogsumexpUnscaled(Eager):
    def attend_lse(self, q_TNH, kv, plan, out_TNH, lse_TN):
        super().attend_lse(q_TNH, kv, plan, out_TNH, lse_TN)
        lse_TN /= torch.tensor(2.0).log()


class OperatorsBeforeTheirKeys(Flash):
    """Attends before the step's own keys are written."""

    def operators(self):
        return super().operators()[::-1]


class OtherOrderOfSlots(Eager):
    """Right by itself, but not the layout that it names."""

    def write(self, k_TKH, v_TKH, kv, slots_T):
        super().write(k_TKH, v_TKH, kv, slots_T ^ 1)

    def _gather(self, kv, blocks_M, ctx_len):
        k_SKH, v_SKH = super()._gather(kv, blocks_M, ctx_len + ctx_len % 2)
        swapped = torch.arange(len(k_SKH)) ^ 1
        return k_SKH[swapped][:ctx_len], v_SKH[swapped][:ctx_len]

    def export_blocks(self, kv, block_ids):
        return super().export_blocks(kv, block_ids)[:, torch.arange(kv.shape[2]) ^ 1]


class NewPlanForReuse(Eager):
    capabilities = checks.replace(Eager.capabilities, graph="decode")


class SwapsKeyAndValue(Eager):
    def export_blocks(self, kv, block_ids):
        return super().export_blocks(kv, block_ids).flip(2)


class IgnoresSinks(Eager):
    def sinks(self, kv):
        return super().sinks(kv) - torch.inf


class ScalesSinks(Eager):
    def sinks(self, kv):
        return super().sinks(kv) * self.spec.scale


class SinksOfOtherHeads(Eager):
    def sinks(self, kv):
        return super().sinks(kv).roll(1)


class TakesTreesForChains(Eager):
    def plan(self, batch, reuse=None):
        return super().plan(checks.replace(batch, trees=None))


class WindowsBySlots(Eager):
    """As one that takes the slot of a tree's node for its position."""

    def plan(self, batch, reuse=None):
        plan = super().plan(batch)
        trees = {
            row: checks.replace(tree, positions_Q=plan.ctx_len[row] - len(tree.positions_Q) + np.arange(len(tree.positions_Q)))
            for row, tree in plan.trees.items()
        }
        return type(plan)(plan.q_start, plan.ctx_len, plan.blocks_RM, trees)


class MovesOneByOne(Eager):
    def move(self, kv, from_X, to_X):
        for i in range(len(from_X)):
            super().move(kv, from_X[i : i + 1], to_X[i : i + 1])


class MovesKeysAlone(Eager):
    def move(self, kv, from_X, to_X):
        super().move(kv[:1], from_X, to_X)


class SpreadsHeads(Eager):
    """Query heads that share a KV head stand apart, as where the heads of a projection are taken in another order."""

    def _attend_row(self, q_QNH, *others):
        groups = self.spec.num_heads // self.spec.num_kv_heads, self.spec.num_kv_heads
        out_QNH = super()._attend_row(q_QNH.unflatten(1, groups).transpose(1, 2).flatten(1, 2), *others)
        return out_QNH.unflatten(1, groups[::-1]).transpose(1, 2).flatten(1, 2)


class ReadsTheNextRow(Eager):
    def plan(self, batch, reuse=None):
        plan = super().plan(batch)
        return type(plan)(plan.q_start, plan.ctx_len, plan.blocks_RM.roll(-1, 0), plan.trees)


FAULTS = [  # the fault, a check that finds it, and what the reason says
    (TakesTreesForChains, "check_trees", "its values are those of a chain: nodes see others that are not on their path"),
    (WindowsBySlots, "check_trees", "a wrong block, position, mask or scale"),
    (MovesOneByOne, "check_move", "move did not copy the slots as they were"),
    (MovesKeysAlone, "check_move", "move did not copy the slots as they were"),
    (IgnoresSinks, "check_sinks", "off by"),
    (ScalesSinks, "check_sinks", "off by"),
    (SinksOfOtherHeads, "check_sinks", "off by"),
    (IgnoresBlockTable, "check_mixed_batch", "it holds NaN: a slot that nobody wrote was read"),
    (
        ReadsPastContext,
        "check_decode_at_block_edges",
        r"context 0 \+ 1 tokens(.|\n)*it holds NaN: a slot that nobody wrote was read",
    ),
    (WrongScale, "check_fresh_prefill", "of a wrong scale: about 0.126, where 0.125 is asked for"),
    (ForgetsScale, "check_fresh_prefill", "of a wrong scale: about 1, where 0.125 is asked for"),
    (
        PaddingIntoLastBlock,
        "check_padding",
        "a wrong block, position|a block that belongs to no row of the step was written to",
    ),
    (LeavesPaddingUnwritten, "check_padding", "a padding token's output is not finite"),
    (ReadsForPaddingRows, "check_padding", "a padding token's output is not finite"),
    (NotCausal, "check_chunk_after_prefix", "a query that sees keys after the query, as if it were not causal"),
    (OneTokenOfDrafts, "check_drafts", "a query that sees keys after the query, as if it were not causal"),
    (SharesToTheEnd, "check_shared_prefixes", "it holds NaN: a slot that nobody wrote|a wrong block, position, mask or scale"),
    (SpreadsHeads, "check_mixed_batch", "of query heads n over KV heads n % 2, where head n is over n // 2"),
    (
        ReadsTheNextRow,
        "check_mixed_batch",
        "of the keys of row 1: another row's block table was read. Case: rows .* and 1 more, ",
    ),
    (OneKvHeadForAll, "check_head_groups", "a wrong block, position, mask or scale"),
    (ForgetsWindow, "check_sliding_window", "a wrong block, position, mask or scale"),
    (SwapsKeyAndValue, "check_layout_agrees_with_write", "the key written to slot 49 is not what export_blocks shows there"),
    (OtherOrderOfSlots, "check_layout_is_shared", "kv_layout=2PBKH: eager does not find in the cache what was written"),
    (NewPlanForReuse, "check_plan_reuse", "returned another plan"),
    (LogsumexpUnscaled, "check_lse", "row 0: the logsumexp is off by"),
    (OperatorsBeforeTheirKeys, "check_operators", "it holds NaN: a slot that nobody wrote was read"),
]


@pytest.mark.parametrize(("faulty", "name", "reason"), FAULTS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_fault_is_found(faulty, name, reason):
    entry = SimpleNamespace(name="faulty", capabilities=faulty.capabilities, load=lambda: faulty)
    with pytest.raises(CheckFailed, match=reason):
        getattr(checks, name)(entry, faulty.Options())


def test_a_subtle_layout_is_right_by_itself():
    """So that only the comparison with the others finds it."""
    entry = SimpleNamespace(name="subtle", capabilities=OtherOrderOfSlots.capabilities, load=lambda: OtherOrderOfSlots)
    for check in (checks.check_mixed_batch, checks.check_layout_agrees_with_write):
        check(entry, OtherOrderOfSlots.Options())


def test_the_definition_agrees_with_torch():
    """The oracle itself, against torch's own attention on one row."""
    trial = Trial(Case(((0, 9),), num_heads=4, num_kv_heads=4), torch.device("cpu"), seed=3)
    found = trial._definition(trial.q_TNH, 0)
    q, k, v = (x.double().transpose(0, 1)[None] for x in (trial.q_TNH, trial.keys[0], trial.values[0]))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
    assert torch.allclose(found, wanted)
