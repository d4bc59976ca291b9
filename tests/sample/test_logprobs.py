"""Log-probabilities: of the raw logits, in float32, with strict ranks and ordered alternatives."""

import math
from dataclasses import replace

import pytest
import torch

from lab.sample.logprobs import token_logprobs
from lab.sampling_params import SamplingParams
from tests.sample.rig import CPU, GREEDY, Sampler, count_logits, generate, make


def reference(row, chosen, num):
    x = [float(v) for v in row]
    most = max(x)
    log_total = most + math.log(sum(math.exp(v - most) for v in x))
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))[:num]
    return [chosen, *order], [x[i] - log_total for i in [chosen, *order]], 1 + sum(v > x[chosen] for v in x)


@pytest.mark.parametrize("size", [8, 1000, 49152])
def test_same_as_written_out(size):
    x = torch.randn(40, size, generator=torch.Generator().manual_seed(size)) * 4
    x[1] = x[1].round()
    x[2, ::2] = -torch.inf
    chosen = torch.randint(0, size, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    chosen[0] = int(x[0].argmax())
    chosen[2] |= 1
    nums = [[0, 1, 5, 8][i % 4] for i in range(40)]
    for row, found in enumerate(token_logprobs(x, chosen, nums)):
        ids, logprobs, rank = reference(x[row].tolist(), chosen[row], nums[row])
        assert (found.token_ids, found.rank) == (ids, rank)
        assert found.logprobs == pytest.approx(logprobs, abs=1e-5)


def test_a_chosen_token_of_probability_zero():
    x = torch.tensor([[0.0, -torch.inf, 0.0]])
    (found,) = token_logprobs(x, [1], [3])
    assert found.token_ids == [1, 0, 2, 1] and found.rank == 3
    assert found.logprobs == pytest.approx([-math.inf, -math.log(2), -math.log(2), -math.inf])


def test_ties_share_a_rank_and_are_listed_by_id():
    (found,) = token_logprobs(torch.tensor([[1.0, 5.0, 5.0, 1.0]]), [2], [4])
    assert found.rank == 1 and found.token_ids == [2, 1, 2, 0, 3]


def test_prompt_logprobs_of_a_counting_model():
    """Prompt 3 4 5 9 10 11 12: every token follows from the one before, but 9 after 5."""
    prompt = [3, 4, 5, 9, 10, 11, 12]
    logits_XV = torch.stack([count_logits(token) for token in prompt[:-1]])
    sampler = Sampler(1, 64, CPU)
    whole = sampler.prompt_logprobs(logits_XV, prompt[1:], 1)
    assert [entry.logprobs[0] for entry in whole] == pytest.approx([-0.02092] * 2 + [-8.02066] + [-0.02092] * 3, abs=1e-4)
    assert [entry.rank for entry in whole] == [1, 1, 2, 1, 1, 1]
    assert whole[2].token_ids == [9, 6]
    for size in range(1, 6):
        pieces = [(logits_XV[i : i + size], prompt[1 + i : 1 + i + size]) for i in range(0, 6, size)]
        assert [entry for x, ids in pieces for entry in sampler.prompt_logprobs(x, ids[: len(x)], 1)] == whole


@pytest.mark.parametrize("drafts", [[], [5, 6], [5, 9, 7]])
def test_every_token_of_a_verified_step_has_its_own(drafts):
    sampler = make([(replace(GREEDY, logprobs=2), [3, 4], []), (GREEDY, [8], [])], 64)
    logits_LV = torch.stack([count_logits(token) for token in [4, *drafts, 8]])
    out = sampler.run(logits_LV, [0, 1], [len(drafts), 0], [drafts, []])
    accepted = {0: 0, 2: 2, 3: 1}[len(drafts)]
    assert out.token_ids == [[5, 6, 7][: accepted + 1], [9]]
    assert out.logprobs[1] is None
    for token, entry in zip(out.token_ids[0], out.logprobs[0], strict=True):
        assert entry.token_ids == [token, token, 0] and entry.rank == 1
        assert entry.logprobs == pytest.approx([-0.02092, -0.02092, -8.02066], abs=1e-4)


def test_of_the_unchanged_logits_whatever_is_done_to_them():
    changed = SamplingParams(
        temperature=0.3, top_k=2, repetition_penalty=3.0, logit_bias={50: 30.0}, allowed_token_ids=(50, 5), logprobs=0
    )
    for params in (changed, replace(changed, temperature=0.0)):
        sampler = make([(params, [4], [])], 64)
        out = sampler.run(count_logits(4).unsqueeze(0), [0], [0], [[]])
        assert out.token_ids == [[50]]
        assert out.logprobs[0][0].token_ids == [50] and out.logprobs[0][0].rank == 2
        assert out.logprobs[0][0].logprobs == pytest.approx([-8.02066], abs=1e-4)


def test_none_when_no_one_asks():
    sampler = make([(GREEDY, [4], [])], 64)
    assert sampler.run(count_logits(4).unsqueeze(0), [0], [0], [[]]).logprobs is None
    assert generate(GREEDY, [4], count_logits, 2)[0] == [5, 6]
