"""Proposers are held to their contract in a run, and the distributions of drafts reach verification."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab import LLM, SamplingParams, registry
from lab.api import Capabilities, Draft, Proposer, register
from lab.errors import PluginFault
from lab.runner.batch import Share
from lab.runner.drafting import Drafting
from lab.runner.rows import Rows
from tests import rigs
from tests.runner.test_batch import new_row

VOCAB = 64


class Fixed(Proposer):
    """Proposes what it is told to."""

    name = "fixed"
    num_drafts = 3

    def __init__(self, draft):
        self.draft = draft

    def propose(self, view):
        return self.draft


def drafting(draft, length=None):
    rows = Rows(4, 40, 4)
    for name in "ab":
        rows.add(new_row(name, [1, 2, 3], [ord(name)]))
    return Drafting(Fixed(draft), rows, VOCAB, length), rows


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([[1]]), "proposed for 1 rows of 2"),
        (Draft([[1, 2], [3, 4]]), "proposed 2 drafts for row 1 of its view, whose limit is 1"),
        (Draft([[VOCAB], []]), f"token id {VOCAB} for row 0"),
        (Draft([[], [-1]]), "token id -1 for row 1"),
        (Draft([[1, 2], []], torch.zeros(2, 1, VOCAB)), "probabilities of the shape"),
        (Draft([[1], []], torch.zeros(2, 1, VOCAB + 1)), "probabilities of the shape"),
    ],
)
def test_a_broken_contract_names_the_plugin(draft, message):
    found, _ = drafting(draft)
    with pytest.raises(PluginFault, match=message) as error:
        found.propose([0, 1], np.array([20, 5]))
    assert "spec plugin 'fixed'" in str(error.value)


def test_drafts_go_into_the_rows_and_their_distributions_to_verification():
    probs_RSV = torch.rand(2, 3, VOCAB)
    found, rows = drafting(Draft([[5, 6], [7]], probs_RSV))
    ids = [rows["a"], rows["b"]]
    assert found.propose(ids, np.array([20, 20])) == {ids[0]: [5, 6], ids[1]: [7]}
    assert rows.drafts(ids[0], 2) == [5, 6]
    shares = [Share(ids[1], 2, 2, 1, True), Share(ids[0], 2, 3, 2, True)]
    kept = found.probs(shares)
    assert kept.shape == (2, 2, VOCAB)
    assert torch.equal(kept[0, 0], probs_RSV[1, 0]) and not kept[0, 1].any()
    assert torch.equal(kept[1], probs_RSV[0, :2])
    assert found.probs([Share(ids[0], 2, 1, 0, True)]) is None
    found._probs.pop(ids[1])  # as if its drafts were one-hot, of a step before
    kept = found.probs(shares)
    assert kept[0, 0].tolist() == [float(token == 7) for token in range(VOCAB)]
    assert torch.equal(kept[1], probs_RSV[0, :2])
    for row in ids:
        found.forget(row)
    assert found.probs(shares) is None


class Scripted:
    """A draft length that says what it is told to, and notes what it is told."""

    def __init__(self, lengths, dry):
        self.given, self.dry, self.seen = lengths, dry, []

    def start(self, row):
        self.seen.append(row)

    def observe(self, step):
        self.seen.append(step)

    def lengths(self, rows_R):
        return np.array(self.given)

    def dry_runs(self, rows_R):
        return np.array(self.dry)


@pytest.mark.parametrize(("came", "accepted"), [(7, 1), (8, 0)])
def test_a_dry_run_is_proposed_and_not_verified_but_compared_with_what_comes(came, accepted):
    length = Scripted([1, 0], [True, True])
    found, rows = drafting(Draft([[5], [7]]), length)
    ids = [rows["a"], rows["b"]]
    assert found.propose(ids, np.array([20, 20])) == {ids[0]: [5], ids[1]: []}
    assert (rows.num_drafts_R[ids[0]], rows.num_drafts_R[ids[1]]) == (1, 0)
    shares = [Share(ids[0], 2, 2, 1, True), Share(ids[1], 2, 1, 0, True)]
    found.observe(shares, [[5, 9], [came]], 3.5)
    (step,) = length.seen
    assert (step.offered_R.tolist(), step.accepted_R.tolist()) == ([1, 1], [1, accepted])
    assert (step.num_tokens, step.ms, step.is_decode, step.num_asked) == (3, 3.5, True, 1)
    found.observe([*shares, Share(3, 0, 8, 0, False)], [[5, 9], [came]], 3.5)
    step = length.seen[-1]
    assert step.offered_R.tolist() == [1, 0] and not step.is_decode and step.num_tokens == 11


def test_a_request_may_ask_for_fewer_drafts_than_there_are():
    found, rows = drafting(Draft([[5, 6, 7], [5, 6]]))
    ids = [rows["a"], rows["b"]]
    found.start(ids[1], replace(new_row("b", [1, 2, 3], [5]), params=SamplingParams(max_drafts=1)))
    with pytest.raises(PluginFault, match="proposed 2 drafts for row 1 of its view, whose limit is 1"):
        found.propose(ids, np.array([20, 20]))


@pytest.fixture
def sampling_proposer():
    """A registered proposer that draws its drafts from a distribution far from the target's."""

    @register("spec", "drawn-in-test")
    class Drawn(Proposer):
        """Draws from a fixed distribution."""

        capabilities = Capabilities()
        num_drafts = 2

        def __init__(self, options):
            super().__init__(options)
            self.generator = torch.Generator().manual_seed(0)
            self.q_V = torch.rand(256, generator=self.generator).softmax(0)

        def propose(self, view):
            drawn = [torch.multinomial(self.q_V, int(limit), generator=self.generator).tolist() if limit else []
                     for limit in view.limits_R]  # fmt: skip
            return Draft(drawn, self.q_V.expand(len(drawn), self.num_drafts, -1))

    yield "drawn-in-test"
    registry._entries.pop(("spec", "drawn-in-test"))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_drawn_drafts_leave_the_distribution_alone(tmp_path, sampling_proposer, async_scheduling):
    """The first verified token of many seeds, with and without drafts: one distribution by a two-sample chi-square."""
    folder = rigs.mix(tmp_path / "mix")
    overrides = ["model.dtype=float32", "model.max_model_len=64", "cache.num_blocks=2000", "num_threads=1"]
    overrides += ["draft_length=fixed"]
    overrides += [f"scheduler.async_scheduling={async_scheduling}", "compile.mode=none"]
    prompt = {"prompt_token_ids": [3, 1, 4, 1, 5]}
    params = [SamplingParams(temperature=0.5, top_k=6, max_tokens=3, seed=seed, ignore_eos=True) for seed in range(1500)]
    counts = []
    for spec in (None, sampling_proposer):
        with LLM(str(folder), spec=spec, overrides=overrides) as llm:
            outs = llm.generate([prompt] * len(params), params)
        tokens = np.array([out.outputs[0].token_ids[1] for out in outs])
        counts.append(np.bincount(tokens, minlength=256))
    assert sum(sum(out.outputs[0].timeline.accepted_counts) for out in outs) > 0
    first, second = counts
    seen = first + second > 10
    statistic = ((first - second)[seen] ** 2 / (first + second)[seen]).sum()
    degrees = int(seen.sum()) - 1
    assert degrees >= 5
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5 + 8, (statistic, degrees)
