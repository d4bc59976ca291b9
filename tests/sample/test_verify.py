"""Acceptance is exact: the distribution of the output is the target's, whoever drafts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.sample.verify import accept, rejection_targets
from lab.sampling_params import SamplingParams
from tests.sample.reference import chi_square_p
from tests.sample.rig import GREEDY, count_logits, generate, make

TARGET, PROPOSAL = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
NUM_DRAWS, BATCH = 200_000, 4000


def verify_many(params, target, draft_of, proposal=None):
    """Verify one draft in each of NUM_DRAWS draws: the drafts and the first tokens put out, as arrays."""
    rng = np.random.default_rng(17)
    sampler = make([(params, [0], []) for _ in range(BATCH)], len(target))
    logits_LV = torch.tensor(target).log().expand(2 * BATCH, len(target)).contiguous()
    probs = None if proposal is None else torch.tensor(proposal).expand(BATCH, 1, len(target))
    all_drafts, first_tokens = [], []
    for _ in range(NUM_DRAWS // BATCH):
        drafts = [[int(token)] for token in draft_of(rng, BATCH)]
        out = sampler.run(logits_LV, list(range(BATCH)), [1] * BATCH, drafts, probs)
        assert all(len(tokens) == 1 + (tokens[0] == draft) for tokens, (draft,) in zip(out.token_ids, drafts, strict=True))
        all_drafts += [draft for (draft,) in drafts]
        first_tokens += [tokens[0] for tokens in out.token_ids]
    return np.array(all_drafts), np.array(first_tokens)


def from_proposal(rng, num):
    return rng.choice(3, num, p=PROPOSAL)


def always_one(rng, num):
    return np.ones(num, int)


def fits(values, wanted):
    return chi_square_p(np.bincount(values, minlength=len(wanted)).tolist(), wanted) > 1e-4


def test_drafts_drawn_from_a_distribution():
    drafts, tokens = verify_many(SamplingParams(), TARGET, from_proposal, PROPOSAL)
    assert fits(tokens, TARGET)
    for draft, rate in enumerate([1.0, 0.6, 2 / 3]):
        assert fits((tokens == draft)[drafts == draft].astype(int), [1 - rate, rate])
    assert fits((tokens != drafts).astype(int), [0.7, 0.3])
    assert (tokens[tokens != drafts] == 0).all()  # the residual has token 0 alone


def test_replacements_are_independent_of_the_rejection():
    """A residual of several tokens: a replacement drawn with the uniform that rejected would lean to the last ones."""
    target, proposal = [0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.4, 0.4]
    drafts, tokens = verify_many(SamplingParams(), target, lambda rng, num: rng.choice(4, num, p=proposal), proposal)
    assert fits(tokens, target)
    for draft in (2, 3):
        assert fits(tokens[(drafts == draft) & (tokens != draft)], [0.6, 0.4, 0, 0])


def test_one_hot_drafts():
    drafts, tokens = verify_many(SamplingParams(), TARGET, always_one)
    assert fits(tokens, TARGET)
    assert fits((tokens == 1).astype(int), [0.7, 0.3])
    assert fits(tokens[tokens != 1], [0.5 / 0.7, 0, 0.2 / 0.7])


@pytest.mark.parametrize(("draft_of", "proposal"), [(always_one, None), (from_proposal, PROPOSAL)], ids=["one-hot", "drawn"])
def test_target_is_the_transformed_distribution(draft_of, proposal):
    drafts, tokens = verify_many(SamplingParams(temperature=0.5, top_k=2), TARGET, draft_of, proposal)
    assert fits(tokens, [0.25 / 0.34, 0.09 / 0.34, 0])
    assert not (tokens == 2).any()
    assert proposal is None or (drafts == 2).any()


def test_two_drafts_and_the_bonus_follow_the_target():
    """Positions two and three are conditional on what was accepted before them: all triples, against the product."""
    target = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
    proposal = torch.tensor([[0.3, 0.7], [0.8, 0.2]])
    rng, batch = np.random.default_rng(3), 4000
    sampler = make([(SamplingParams(), [0], []) for _ in range(batch)], 2)
    lengths, tokens_of = np.zeros(4), {n: [] for n in (1, 2, 3)}
    for _ in range(20):
        drafts = np.stack([rng.random(batch) > proposal[i, 0].item() for i in range(2)], 1).astype(int).tolist()
        out = sampler.run(
            target.log().repeat(batch, 1), list(range(batch)), [2] * batch, drafts, proposal.expand(batch, 2, 2)
        ).token_ids
        for tokens in out:
            lengths[len(tokens)] += 1
            for place, token in enumerate(tokens):
                tokens_of[place + 1].append(token)
    for place in (1, 2, 3):
        assert fits(np.array(tokens_of[place]), target[place - 1].tolist())
    first = 1 - 0.3  # total variation distance of target and proposal at the first draft
    second = 1 - 0.5
    assert fits(np.repeat([0, 1, 2], lengths[1:].astype(int)), [1 - first, first * (1 - second), first * second])


def test_requests_with_and_without_drafts_share_a_step():
    """Proposals given for a batch in which some rows are greedy, some have no drafts, some fewer than others."""
    requests = [(SamplingParams(), [1], []), (GREEDY, [1], []), (SamplingParams(top_k=1), [1], []), (SamplingParams(), [1], [])]
    sampler = make(requests, 64)
    num_drafts, drafts = [0, 2, 3, 1], [[], [2, 9], [2, 3, 9], [2]]
    history = [[1], [1, 2, 9], [1, 2, 3, 9], [1, 2]]
    logits_LV = 4 * torch.stack([count_logits(token) for tokens in history for token in tokens])
    probs_RSV = torch.full((4, 3, 64), 1 / 64)
    out = sampler.run(logits_LV, [0, 1, 2, 3], num_drafts, drafts, probs_RSV).token_ids
    assert out == [[2], [2, 3], [2, 3, 4], [2, 3]]


def test_proposal_equal_to_the_target_is_always_accepted():
    target = [0.25, 0.75]
    drafts, tokens = verify_many(SamplingParams(), target, lambda rng, num: rng.choice(2, num, p=target), target)
    assert (drafts == tokens).all()


def test_a_proposal_without_overlap_is_never_accepted():
    drafts, tokens = verify_many(SamplingParams(), [0.0, 0.3, 0.7], lambda rng, num: np.zeros(num, int), [1.0, 0.0, 0.0])
    assert (tokens != 0).all() and fits(tokens - 1, [0.3, 0.7])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.8, frequency_penalty=0.3), GREEDY])
def test_one_hot_drafts_give_the_tokens_of_plain_decoding(params):
    """Not only the same distribution: the same tokens for the same seed, whatever is proposed."""
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)) * 2
    params = replace(params, seed=None)

    def oracle(tokens):
        return plain[len(tokens) - 1 : len(tokens) + 3]

    plain, _ = generate(params, [7], lambda token: table[token], 60)
    for propose in (
        oracle,
        lambda tokens: [int(table[tokens[-1]].argmax())],
        lambda tokens: [1, 2],
        lambda t: oracle(t)[:2] + [9],
    ):
        found, accepted = generate(params, [7], lambda token: table[token], 60, propose)
        assert found == plain
        assert accepted > 0 or propose(plain)[:1] == [1]
    assert len(set(plain)) > 5 or params.greedy


def test_a_rejection_without_a_residual_falls_back_to_the_target():
    """A proposal that sums to a little over one can reject where it is nowhere below the target."""
    target, proposal = torch.tensor([[0.0, 0.25, 0.75]]), torch.tensor([[0.0, 0.26, 0.76]])
    found = [
        rejection_targets(target, proposal, np.array([2]), np.array([0.999]), np.array([u]))[0] for u in (0.0, 0.2, 0.3, 0.9)
    ]
    assert found == [1, 1, 2, 2]


def test_accept():
    assert accept([1, 2, 3, 4, 5, 6], [2, 0, 1], [[1, 2], [], [9]]) == [[1, 2, 3], [4], [5]]
    assert accept([1, 2, 3], [2], [[7, 2]]) == [[1]]
    assert accept([], [], []) == []
