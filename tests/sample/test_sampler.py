"""The sampler as a whole: against the rules written out, and each request on its own."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lab.sample.randomness import Purpose, uniforms
from lab.sampling_params import SamplingParams
from tests.sample.reference import argmax, distribution, draw, edited
from tests.sample.rig import CPU, GREEDY, Sampler, count_logits, generate, make
from tests.sample.test_penalties import random_request


@pytest.mark.parametrize("seed", range(4))
def test_same_as_the_rules_written_out(seed):
    """Batches of random requests with drafts: the very tokens that one row at a time in plain Python gives."""
    rng = np.random.default_rng(seed)
    vocab_size, checked = 23, 0
    for _ in range(25):
        requests, eos = [], []
        for _ in range(6):
            params, prompt, outputs, eos_ids = random_request(rng, vocab_size)
            requests.append((replace(params, temperature=0.0) if rng.random() < 0.25 else params, prompt, outputs))
            eos.append(eos_ids)
        rows = rng.permutation(9)[:6].tolist()
        sampler = Sampler(9, vocab_size, CPU)
        for row, (params, prompt, outputs), eos_ids in zip(rows, requests, eos, strict=True):
            sampler.add(row, params, params.seed, eos_ids, prompt + outputs, len(prompt))
        drafts = [rng.integers(0, vocab_size, rng.integers(0, 4)).tolist() for _ in rows]
        logits_LV = torch.from_numpy(rng.normal(0, 3, (sum(len(d) + 1 for d in drafts), vocab_size))).float()
        before = logits_LV.clone()
        found = sampler.run(logits_LV, rows, [len(d) for d in drafts], drafts).token_ids
        assert torch.equal(logits_LV, before)
        first = 0
        for tokens, request, eos_ids, draft in zip(found, requests, eos, drafts, strict=True):
            wanted, sure = written_out(logits_LV[first : first + len(draft) + 1].tolist(), request, eos_ids, draft)
            assert tokens == wanted or not sure
            checked += sure
            first += len(draft) + 1
    assert checked > 145


def written_out(logits, request, eos_ids, drafts):
    """The tokens of one request, and whether no draw was so near an edge that rounding decides."""
    params, prompt, outputs = request
    tokens, sure = [], True
    for index in range(len(drafts) + 1):
        history = outputs + drafts[:index]
        x = edited(logits[index], params, prompt, history, eos_ids)
        if params.greedy:
            token = argmax(x)
        else:
            uniform = uniforms(np.array([params.seed], np.uint64), np.array([len(history)]), Purpose.SAMPLE)[0]
            token, margin = draw(distribution(x, params), uniform)
            sure &= margin > 1e-6
        tokens.append(token)
        if index == len(drafts) or token != drafts[index]:
            return tokens, sure
    raise AssertionError


def model_logits(token):
    table = torch.randn(256, 256, generator=torch.Generator().manual_seed(99))
    return table[token] * 1.5


TABLE = torch.stack([model_logits(token) for token in range(256)])
SEEDED = SamplingParams(temperature=0.8, seed=42)


def generate_beside(neighbours, row, num=16, leave_at=()):
    """The seeded request in `row`, with neighbours (params by row) that may leave at given steps."""
    sampler = Sampler(8, 256, CPU)
    last = {}
    for r, params in {**neighbours, row: SEEDED}.items():
        sampler.add(r, params, params.seed if params.seed is not None else 1000 + r, frozenset(), [17], 1)
        last[r] = 17
    found = []
    for step in range(num):
        if step in leave_at:
            gone = next(r for r in last if r != row)
            sampler.remove(gone)
            del last[gone]
        order = sorted(last, key=lambda r: (r * 7 + step) % 8)
        out = sampler.run(torch.stack([TABLE[last[r]] for r in order]), order, [0] * len(order), [[]] * len(order))
        for r, tokens in zip(order, out.token_ids, strict=True):
            last[r] = tokens[0]
        found.append(last[row])
    return found


def test_a_seed_fixes_the_draws_whatever_is_beside():
    alone = generate_beside({}, 0)
    assert len(set(alone)) > 8
    unseeded = replace(SEEDED, seed=None)
    filtered = SamplingParams(temperature=1.3, top_k=5, frequency_penalty=1.0)
    assert generate_beside({1: unseeded}, 0) == alone
    assert generate_beside({1: replace(SEEDED, seed=7)}, 0) == alone
    for row in (0, 2):
        others = [r for r in range(4) if r != row]
        assert generate_beside(dict(zip(others, (unseeded, filtered, GREEDY), strict=True)), row) == alone
    assert generate_beside({1: filtered, 2: unseeded}, 0, leave_at=(2, 5)) == alone
    assert generate(SEEDED, [17], lambda token: TABLE[token], 16, resume_every=3)[0] == alone
    assert generate(SEEDED, [17], lambda token: TABLE[token], 16, propose=lambda t: [3, 4])[0] == alone


def test_two_requests_with_one_seed_agree_and_others_do_not():
    requests = [(replace(SEEDED, seed=s), [17], []) for s in (42, 42, 43, 2**64 - 1, 0)]
    sampler = make(requests, 256)
    tokens = [[17] for _ in requests]
    for _ in range(20):
        out = sampler.run(torch.stack([TABLE[t[-1]] for t in tokens]), list(range(5)), [0] * 5, [[]] * 5)
        for mine, new in zip(tokens, out.token_ids, strict=True):
            mine += new
    assert tokens[0] == tokens[1]
    assert len({tuple(t) for t in tokens}) == 4


def test_a_greedy_row_with_minus_infinity_beside_warm_rows():
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    x[0, 10:] = -torch.inf
    x[2] = torch.tensor([50, 49.9] + [0] * 298)
    requests = [(GREEDY, [0], []), (SamplingParams(), [0], []), (SamplingParams(temperature=1e-4), [0], [])]
    requests.append((SamplingParams(temperature=1e-40), [0], []))
    sampler = make(requests, 300)
    alone = make(requests[1:2], 300)
    alone.add(0, SamplingParams(), 1, frozenset(), [0], 1)
    for _ in range(200):
        out = sampler.run(x, [0, 1, 2, 3], [0] * 4, [[]] * 4).token_ids
        assert out[0] == [int(x[0].argmax())] and out[2] == [0] and out[3] == [int(x[3].argmax())]
        assert out[1] == alone.run(x[1:2], [0], [0], [[]]).token_ids[0]


def test_plain_greedy_takes_the_lowest_of_equals():
    x = torch.zeros(3, 49152)
    x[1, [700, 300, 40000]] = 2.0
    x[2, 49151] = 1.0
    assert make([(GREEDY, [0], [])] * 3, 49152).run(x, [0, 1, 2], [0] * 3, [[]] * 3).token_ids == [[0], [300], [49151]]


def test_a_row_is_clean_for_its_next_request():
    """What a request asked for and its history must not reach the next one in the same row."""
    biased = SamplingParams(temperature=0.0, logit_bias={5: 100.0}, frequency_penalty=1.0, logprobs=1)
    sampler = make([(biased, [0], [])], 64)
    x = torch.zeros(1, 64)
    x[0, 9] = 1.0
    out = sampler.run(x, [0], [0], [[]])
    assert out.token_ids == [[5]] and out.logprobs is not None
    for remove in (True, False):
        if remove:
            sampler.remove(0)
        sampler.add(0, GREEDY, 1, frozenset(), [5, 5], 2)
        out = sampler.run(x, [0], [0], [[]])
        assert out.token_ids == [[9]] and out.logprobs is None
        sampler.add(0, biased, 1, frozenset(), [0], 1)
    sampler.remove(0)
    sampler.remove(0)


def test_works_on_inference_tensors_and_an_empty_step():
    sampler = make([(SamplingParams(top_p=0.5, logprobs=2, repetition_penalty=1.1), [1], [])], 64)
    with torch.inference_mode():
        out = sampler.run(torch.randn(1, 64), [0], [0], [[]])
        assert len(out.logprobs[0]) == 1
        assert sampler.run(torch.empty(0, 64), [], [], []).token_ids == []


def test_greedy_rows_may_be_given_ids_instead_of_logits():
    """Drafts are verified and the outputs are counted as with logits."""
    prompt, drafts = [1], [[2, 3], [], [9]]
    logits_LV = torch.stack([count_logits(token) for token in (1, 2, 3, 1, 1, 9)])
    by_logits, by_ids = (make([(GREEDY, prompt, [])] * 3, 64) for _ in range(2))
    expected = by_logits.run(logits_LV, [0, 1, 2], [2, 0, 1], drafts)
    assert expected.token_ids == [[2, 3, 4], [2], [2]]
    assert not by_ids.needs_logits([0, 1, 2])
    assert by_ids.run_greedy(logits_LV.argmax(-1), [0, 1, 2], [2, 0, 1], drafts) == expected
    assert by_ids._num_output_R.tolist() == by_logits._num_output_R.tolist() == [3, 1, 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, min_tokens=3),
    ],
    ids=["sampled", "logprobs", "penalty", "min_tokens"],
)
def test_rows_that_want_more_than_the_largest_logit_need_logits(params):
    sampler = make([(GREEDY, [1], []), (params, [1], [])], 64)
    assert sampler.needs_logits([0, 1]) and sampler.needs_logits([1]) and not sampler.needs_logits([0])
    with pytest.raises(AssertionError):
        sampler.run_greedy(torch.tensor([1, 2]), [0, 1], [0, 0], [[], []])


class Reductions(TorchDispatchMode):
    """Takes down what is summed, and of how many rows."""

    SUMS = ("sum", "cumsum", "logsumexp", "softmax", "_softmax", "mean", "cumprod", "std", "var", "norm", "mm", "bmm")

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in self.SUMS and args[0].is_floating_point():
            self.rows.append(len(args[0]))
        return function(*args, **(kwargs or {}))


def test_row_by_row_nothing_is_summed_among_other_rows():
    """Where the order of a sum follows from how many rows there are; tokens and log-probabilities are the same."""
    params = [
        SamplingParams(temperature=0.9, logprobs=3),
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=0),
        SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=1.0, min_p=0.05, presence_penalty=1.0),
    ] * 3
    logits_LV = torch.randn(len(params), 4000, generator=torch.Generator().manual_seed(3)) * 2
    outputs, most = [], []
    for row_by_row in (True, False):
        sampler = Sampler(len(params), 4000, CPU, row_by_row=row_by_row)
        for row, its in enumerate(params):
            sampler.add(row, its, row, frozenset(), [1, 2, 3], 3)
        with Reductions() as found:
            output = sampler.run(logits_LV, list(range(len(params))), [0] * len(params), [[]] * len(params))
            prompt = sampler.prompt_logprobs(logits_LV[:4], [5, 6, 7, 8], 2)
        outputs.append((output.token_ids, output.logprobs, prompt))
        most.append(max(found.rows))
        assert len(found.rows) > 5
    assert outputs[0] == outputs[1] and most[0] == 1 and most[1] > 1
