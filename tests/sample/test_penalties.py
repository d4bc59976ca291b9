"""Bias, penalties and bans: on exact histories, in draft rows too, and never into a neighbour's row."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.sample.penalties import EditBatch, History, RowEdits
from lab.sampling_params import SamplingParams
from tests.sample.reference import edited
from tests.sample.rig import GREEDY, count_logits, echo_logits, generate


def edit(x_WV, params, tokens, num_prompt, drafts=(), eos_ids=frozenset(), first_row=0):
    """Edit the rows of one request; the tensor may hold others around them."""
    batch = EditBatch(x_WV.shape[1])
    edits = RowEdits(params, eos_ids, tokens, num_prompt, x_WV.shape[1])
    edits.add_to(batch, first_row, len(tokens) - num_prompt, list(drafts))
    batch.apply(x_WV)
    return x_WV


ECHO_CASES = [
    (replace(GREEDY, frequency_penalty=2.0), 12, [7, 7, 7, 7, 0, 0, 0, 0, 1, 1, 1, 1]),
    (replace(GREEDY, presence_penalty=9.0), 12, [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]),
    (replace(GREEDY, repetition_penalty=2.0, logit_bias={9: 5.0}), 4, [9, 9, 9, 9]),
]
PROPOSERS = {
    "none": lambda tokens: [],
    "same": lambda tokens: [tokens[-1]] * 5,
    "right_then_wrong": lambda tokens: [tokens[-1], 0, 1],
    "wrong": lambda tokens: [63, 62],
}


@pytest.mark.parametrize("resume_every", [None, 1, 3])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(("params", "num", "wanted"), ECHO_CASES)
def test_penalties_see_the_history_as_it_is(params, num, wanted, proposer, resume_every):
    """A model that repeats itself is driven off by exact counts, the same with drafts and when its row is taken away."""

    found, accepted = generate(params, [7], echo_logits, num, PROPOSERS[proposer], resume_every=resume_every)
    assert found == wanted
    assert (accepted > 0) == (proposer in ("same", "right_then_wrong"))


def test_frequency_counts_outputs_only():
    found, _ = generate(replace(GREEDY, frequency_penalty=2.0), [7, 7, 7], echo_logits, 12)
    assert found == [7, 7, 7, 7, 0, 0, 0, 0, 1, 1, 1, 1]


def test_each_draft_row_counts_the_drafts_before_it():
    x = torch.full((4, 8), 10.0)
    params = replace(GREEDY, frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=2.0)
    edit(x, params, [1, 2, 2, 3], 2, drafts=[5, 5, 2])
    base = {0: 10, 1: 5, 2: 5 - 1.5, 3: 5 - 1.5, 4: 10, 5: 10, 6: 10, 7: 10}
    assert x[0].tolist() == list(base.values())
    assert x[1].tolist() == [*list(base.values())[:5], 5 - 1.5, 10, 10]
    assert x[2].tolist() == [*list(base.values())[:5], 5 - 2.5, 10, 10]
    assert x[3].tolist() == [10, 5, 5 - 2.5, 5 - 1.5, 10, 5 - 2.5, 10, 10]


def test_drafts_leave_no_trace_in_the_history():
    history = History([1], [2])
    history.after([3, 4, 2], [-1, 0, 1])
    ids, counts, seen = history.after([], [])
    assert dict(zip(ids.tolist(), counts[0].tolist(), strict=True)) == {1: 0, 2: 1, 3: 0, 4: 0}
    assert dict(zip(ids.tolist(), seen[0].tolist(), strict=True)) == {1: True, 2: True, 3: False, 4: False}


def test_history_grows_past_its_first_capacity():
    history = History([], [])
    tokens = np.random.default_rng(0).integers(0, 500, 5000).tolist()
    for first in range(0, 5000, 7):
        history.append(tokens[first : first + 7])
    ids, counts, seen = history.after([], [])
    assert sorted(ids.tolist()) == sorted(set(tokens)) and seen.all()
    assert counts[0].tolist() == [tokens.count(token) for token in ids.tolist()]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_exactly_the_rows_before_it(ignore_eos):
    """Three tokens are out and five are asked for: the next two rows may not end the request, the last two may."""
    params = SamplingParams(min_tokens=5, stop_token_ids=(4,), ignore_eos=ignore_eos)
    x = edit(torch.zeros(4, 8), params, [1, 2, 3, 3, 3], 2, drafts=[3, 3, 3], eos_ids=frozenset({6}))
    masked = [(row, token) for row in range(4) for token in range(8) if x[row, token] < -1e20]
    assert masked == [(row, token) for row in (0, 1) for token in ((4,) if ignore_eos else (4, 6))]


@pytest.mark.parametrize("proposer", [lambda tokens: [], lambda tokens: [(tokens[-1] + 1 + i) % 64 for i in range(4)]])
def test_min_tokens_delays_a_stop_token(proposer):
    params = replace(GREEDY, stop_token_ids=(5,), min_tokens=4)
    found, _ = generate(params, [0, 1, 2], count_logits, 6, proposer)
    assert found == [3, 4, 0, 1, 2, 3]  # 5 is masked as the third token, and the lowest of the equal others follows


@pytest.mark.parametrize(
    ("words", "tokens", "drafts", "wanted"),
    [
        ([(3,)], [1, 2], [], {0: {3}}),
        ([(2, 3)], [1, 2], [], {0: {3}}),
        ([(2, 3)], [2, 1], [], {0: set()}),
        ([(1, 2, 3), (9, 2, 4), (2, 5)], [0, 1, 2], [], {0: {3, 5}}),
        ([(2, 3)], [1, 1], [2, 1], {0: set(), 1: {3}, 2: set()}),  # a draft completes the beginning
        ([(1, 6, 7, 3)], [0, 1], [6, 7], {0: set(), 1: set(), 2: {3}}),  # across output and drafts
        ([(5, 6, 7, 8, 9)], [8], [], {0: set()}),  # longer than the history
    ],
)
def test_bad_words(words, tokens, drafts, wanted):
    x = edit(torch.zeros(1 + len(drafts), 10), SamplingParams(bad_words_ids=tuple(words)), tokens, 1, drafts)
    assert {row: set((x[row] < -1e20).nonzero().flatten().tolist()) for row in range(len(x))} == wanted


def test_bad_words_follow_the_outputs():
    """Counting up, '5 6' is banned: at 5 the lowest of the others comes, and counting begins again."""
    params = replace(GREEDY, bad_words_ids=((5, 6), (2, 3, 4, 0)))
    for proposer in (lambda tokens: [], lambda tokens: [(tokens[-1] + 1 + i) % 64 for i in range(3)]):
        for resume_every in (None, 1):
            found, _ = generate(params, [3], count_logits, 6, proposer, resume_every=resume_every)
            assert found == [4, 5, 0, 1, 2, 3]


def test_allowed_tokens_and_bias():
    x = edit(
        torch.arange(8.0).repeat(2, 1), SamplingParams(allowed_token_ids=(1, 5), logit_bias={1: 3.0, 7: 50.0}), [0], 1, [1]
    )
    assert x.tolist() == [[-torch.inf, 4.0, *[-torch.inf] * 3, 5.0, *[-torch.inf] * 2]] * 2


def test_bans_that_leave_nothing_keep_to_the_allowed_tokens():
    params = replace(GREEDY, allowed_token_ids=(6, 4), bad_words_ids=((4,), (6,)), logit_bias={6: 9.0})
    assert generate(params, [0], count_logits, 3)[0] == [4, 4, 4]
    warm = replace(params, temperature=1.0)
    found = set(generate(warm, [0], count_logits, 40)[0])
    assert found == {4, 6}


def test_a_bias_does_not_lift_a_ban():
    params = replace(GREEDY, bad_words_ids=((3,),), logit_bias={3: 1e29, 2: 1.0})
    assert generate(params, [2], count_logits, 2)[0] == [2, 2]


def test_ids_the_model_has_no_logit_for_touch_no_other_row():
    """A tokenizer may have more tokens than the model; written flat, token V would be token 0 of the next row."""
    params = SamplingParams(bad_words_ids=((8,), (1, 9)), min_tokens=3)
    x = edit(torch.zeros(3, 8), params, [1], 1, eos_ids=frozenset({8, 11, 2}))
    assert x.nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1e-300),
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(frequency_penalty=1e300),
        SamplingParams(frequency_penalty=-1e300, presence_penalty=1e300),
        SamplingParams(presence_penalty=-1e38, logit_bias={1: 1e38, 2: -1e300}),
        SamplingParams(frequency_penalty=-1e300, logit_bias={2: -1e300}),
        SamplingParams(repetition_penalty=1e-300, presence_penalty=-1e300, temperature=1e-5),
        SamplingParams(logit_bias={0: 1e300}, bad_words_ids=((0,), (1,), (2,), (3,))),
    ],
)
def test_extreme_values_give_no_nan(params):
    x = torch.tensor([[5.0, -5.0, 0.0, -torch.inf]]).repeat(2, 1)
    edit(x, params, [0, 1, 2, 3], 2, drafts=[0])
    assert not x.isnan().any() and not x.isposinf().any()
    found, _ = generate(params, [1, 2], lambda token: torch.tensor([5.0, -5.0, 0.0, -torch.inf]), 4)
    assert all(0 <= token < 4 for token in found)


def test_same_as_the_rules_written_out():
    """Random parameters and histories, requests side by side, against one row at a time in plain Python."""
    rng = np.random.default_rng(21)
    for _ in range(60):
        x_WV = torch.from_numpy(rng.normal(0, 3, (12, 23))).float()
        wanted = x_WV.tolist()
        batch, row = EditBatch(23), 0
        while row < 9:
            params, prompt, outputs, eos_ids = random_request(rng, 23)
            drafts = rng.integers(0, 23, rng.integers(0, 4)).tolist()
            edits = RowEdits(params, eos_ids, prompt + outputs[:2], len(prompt), 23)
            edits.append(outputs[2:])
            edits.add_to(batch, row, len(outputs), drafts)
            for index in range(1 + len(drafts)):
                wanted[row + index] = edited(wanted[row + index], params, prompt, outputs + drafts[:index], eos_ids)
            row += 1 + len(drafts) + int(rng.integers(0, 2))
            if row + 4 > 12:
                break
        batch.apply(x_WV)
        found = x_WV.masked_fill(x_WV < -1e20, -torch.inf)
        assert torch.allclose(found.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def random_request(rng, vocab_size):
    """Random parameters (each control off half of the time), prompt, outputs and EOS ids."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    def ids(num):
        return tuple(rng.choice(vocab_size, num, replace=False).tolist())

    params = SamplingParams(
        presence_penalty=maybe(float(rng.normal()), 0.0),
        frequency_penalty=maybe(float(rng.normal()), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=maybe({t: float(rng.normal(0, 5)) for t in ids(3)}, None),
        allowed_token_ids=maybe(ids(vocab_size - 3), None),
        bad_words_ids=maybe(tuple(ids(n) for n in rng.integers(1, 3, 12).tolist()), ()),
        min_tokens=maybe(int(rng.integers(0, 6)), 0),
        stop_token_ids=maybe(ids(2), ()),
        ignore_eos=bool(rng.random() < 0.3),
        max_tokens=100,
        temperature=float(rng.uniform(0.3, 2)),
        top_k=maybe(int(rng.integers(-1, 8)), 0),
        top_p=maybe(float(rng.uniform(0.05, 1)), 1.0),
        min_p=maybe(float(rng.uniform(0, 0.3)), 0.0),
        seed=int(rng.integers(0, 2**62)),
    )
    prompt = rng.integers(0, vocab_size, rng.integers(1, 8)).tolist()
    outputs = rng.integers(0, vocab_size, rng.integers(0, 8)).tolist()
    return params, prompt, outputs, frozenset(ids(2))
