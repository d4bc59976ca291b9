"""Every registered proposer keeps the contract, and the checks see the faults that they are there for."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from lab import registry
from lab.api import Draft
from lab.checks import CheckFailed, NotDeclared
from lab.checks import spec as checks
from tests import draft_heads, rigs

registry.discover()
CHECKS = [function for name, function in vars(checks).items() if name.startswith("check_")]
BUILT_IN = [entry for entry in registry.entries("spec") if entry.source == "built-in"]
Ngram = registry.get("spec", "ngram").load()


@pytest.fixture(scope="module")
def needed(tmp_path_factory):
    """Options without which a proposer does nothing, by its name: heads and a draft model for the model of the checks."""
    folder = tmp_path_factory.mktemp("drafts")
    small = rigs.mix(folder / "small", vocab_size=49152, max_position_embeddings=8192)
    heads = draft_heads.medusa(folder / "heads", hidden_size=576, num_heads=3)
    module = draft_heads.mtp(folder / "mtp", rigs.smollm2(), "deepseek")
    return {"draft_model": {"model": str(small)}, "medusa": {"head": str(heads)}, "mtp": {"head": str(module)}}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("entry", BUILT_IN, ids=lambda e: e.name)
def test_contract(entry, check, needed):
    with suppress(NotDeclared):
        check(entry, entry.make_options(needed.get(entry.name, {})))


def test_a_run_with_dynamic_trees_keeps_the_contract():
    entry = registry.get("spec", "eagle")
    checks.check_outputs(entry, entry.make_options({"tree": "dynamic", "num_drafts": 12}))


class Fan(Ngram):
    """Each draft has the same one for a sibling."""

    tree_depth = 5

    def propose(self, view):
        token_ids, parents = [], []
        drafts = super().propose(view).token_ids
        for ids, limit, depth in zip(drafts, view.limits_R.tolist(), view.depths_R.tolist(), strict=True):
            token_ids.append([ids[i // 2] for i in range(min(2 * len(ids[:depth]), limit, self.num_drafts))])
            parents.append([i // 2 * 2 - 2 if i > 1 else -1 for i in range(len(token_ids[-1]))])
        return Draft(token_ids, parents=parents)


class TooDeep(Fan):
    def propose(self, view):
        return super().propose(checks.replace(view, depths_R=view.depths_R + 1))


class ChildrenBeforeParents(Fan):
    def propose(self, view):
        draft = super().propose(view)
        return Draft(draft.token_ids, parents=[parents[::-1] for parents in draft.parents])


class LacksParents(Fan):
    def propose(self, view):
        draft = super().propose(view)
        return Draft(draft.token_ids, parents=[parents[1:] for parents in draft.parents])


class NeverBranches(Fan):
    def propose(self, view):
        draft = super().propose(view)
        return Draft([ids[:1] for ids in draft.token_ids], parents=[parents[:1] for parents in draft.parents])


def test_a_proposer_of_trees_keeps_the_contract():
    entry = SimpleNamespace(name="fan", capabilities=Fan.capabilities, load=lambda: Fan)
    for check in CHECKS:
        with suppress(NotDeclared):
            check(entry, Fan.Options())
    checks.check_trees(entry, Fan.Options())


@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        (TooDeep, "a tree of depth 1 where at most 0 is allowed"),
        (ChildrenBeforeParents, "node 0 has the parent"),
        (LacksParents, "parents must have an entry for each draft"),
        (NeverBranches, "no row's drafts branch"),
    ],
)
def test_a_tree_that_is_wrong_is_found(faulty, reason):
    entry = SimpleNamespace(name="faulty", capabilities=faulty.capabilities, load=lambda: faulty)
    with pytest.raises(CheckFailed, match=reason):
        checks.check_trees(entry, faulty.Options())


def test_some_drafts_are_proposed():
    """Else the checks would prove nothing of the one proposer that proposes."""
    drafts = Ngram(Ngram.Options()).propose(checks._view(checks._texts())).token_ids
    assert sum(len(token_ids) == 5 for token_ids in drafts) >= 3


class IgnoresLimits(Ngram):
    def propose(self, view):
        return super().propose(checks.ProposeView(view.tokens_RC, view.rows_R, view.lengths_R, view.limits_R + 9))


class MoreThanItSays(Ngram):
    def __init__(self, options):
        super().__init__(options)
        self.num_drafts = 2

    def propose(self, view):
        self.num_drafts = 5
        found = super().propose(view)
        self.num_drafts = 2
        return found


class ReadsPastTheEnd(Ngram):
    def _continuation(self, text, count):
        return super()._continuation(text, count)[:-1] + [checks.UNWRITTEN] if count and len(text) > 90 else []


class NumpyInts(Ngram):
    def propose(self, view):
        return Draft([list(checks.np.array(ids, dtype=checks.np.int64)) for ids in super().propose(view).token_ids])


class OutsideVocabulary(Ngram):
    def propose(self, view):
        return Draft([[token + 50 for token in ids] for ids in super().propose(view).token_ids])


class Forgetful(Ngram):
    def propose(self, view):
        self.calls = getattr(self, "calls", 0) + 1
        found = super().propose(view)
        return found if self.calls == 1 else Draft([[] for _ in found.token_ids])


class IgnoresRowIndex(Ngram):
    def propose(self, view):
        in_order = checks.np.sort(view.rows_R)
        return super().propose(checks.ProposeView(view.tokens_RC, in_order, view.lengths_R, view.limits_R))


class WritesToView(Ngram):
    def propose(self, view):
        view.lengths_R[:] = 1
        return super().propose(view)


class DropsARow(Ngram):
    def propose(self, view):
        return Draft(super().propose(view).token_ids[:-1])


class WrongProbabilities(Ngram):
    def propose(self, view):
        token_ids = super().propose(view).token_ids
        return Draft(token_ids, torch.full((len(token_ids), 5, checks.VOCAB_SIZE), 0.5))


class ImpossibleDrafts(Ngram):
    def propose(self, view):
        token_ids = super().propose(view).token_ids
        probs_RSV = torch.zeros(len(token_ids), 5, checks.VOCAB_SIZE)
        for row, ids in enumerate(token_ids):
            for place, token in enumerate(ids):
                probs_RSV[row, place, (token + 1) % checks.VOCAB_SIZE] = 1.0
        return Draft(token_ids, probs_RSV)


@pytest.mark.parametrize(
    ("faulty", "name"),
    [
        (IgnoresLimits, "check_limits"),
        (MoreThanItSays, "check_limits"),
        (ReadsPastTheEnd, "check_ids"),
        (NumpyInts, "check_ids"),
        (OutsideVocabulary, "check_ids"),
        (Forgetful, "check_deterministic"),
        (IgnoresRowIndex, "check_rows_are_addressed"),
        (WritesToView, "check_view_is_left_alone"),
        (DropsARow, "check_short_contexts"),
        (WrongProbabilities, "check_probabilities"),
        (ImpossibleDrafts, "check_probabilities"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_planted_fault_is_found(faulty, name):
    entry = SimpleNamespace(name="faulty", load=lambda: faulty)
    with pytest.raises(CheckFailed):
        getattr(checks, name)(entry, faulty.Options())
