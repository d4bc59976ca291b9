"""Proposers leave outputs as they are: their distribution, and for one-hot drafts with the same seeds every token."""

import json
from dataclasses import replace

import pytest
import torch

from lab import SamplingParams
from tests import draft_heads, rigs
from tests.engine.models import open_llm
from tests.golden.oracle import hf_model
from tests.sample.reference import chi_square_p, distribution, edited

VOCAB = 12
PROMPT = [*range(VOCAB), *range(0, VOCAB, 2), *range(VOCAB), 3]
NUM_DRAWS = 600
MIXES = {
    "temperature": {"temperature": 0.7},
    "top_k and top_p": {"temperature": 1.2, "top_k": 6, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "logit_bias": {"temperature": 1.0, "logit_bias": {3: 1.5, 5: -2.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 2, "stop_token_ids": [1, 4]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"), vocab_size=VOCAB)


@pytest.fixture(scope="module")
def proposers(folder, tmp_path_factory):
    """Overrides by name. The one that replays knows the likeliest output, which by far not every draw takes."""
    with open_llm(folder) as llm:
        greedy = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0.0, max_tokens=8))
    known = tmp_path_factory.mktemp("known") / "known.jsonl"
    known.write_text(json.dumps({"prompt_token_ids": PROMPT, "output_token_ids": greedy[0].outputs[0].token_ids}))
    return {
        "ngram": ["+spec=ngram", "spec.min_n=1", "spec.num_drafts=2"],
        "suffix": ["+spec=suffix", "spec.min_match=1", "spec.min_share=0", "spec.num_drafts=2"],
        "replay": ["+spec=replay", f"spec.path={known}", "spec.num_drafts=2", "spec.acceptance=[0.8,0.5]"],
    }


@pytest.fixture(scope="module", params=MIXES)
def target(request, folder):
    """The mix, and the exact probability of each first two tokens under it, from transformers' logits."""
    params = SamplingParams(max_tokens=4, **MIXES[request.param])
    model = hf_model(folder)

    @torch.inference_mode()
    def kept(outputs):
        logits = model(torch.tensor([PROMPT + outputs])).logits[0, -1].double().tolist()
        return distribution(edited(logits, params, PROMPT, outputs, frozenset()), params)

    pairs = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for first, first_share in kept([]):
        for second, share in kept([first]):
            pairs[first, second] = first_share * share
    return params, pairs


def draw(folder, params, *overrides):
    prompts = [{"prompt_token_ids": PROMPT}] * NUM_DRAWS
    seeded = [replace(params, seed=seed) for seed in range(NUM_DRAWS)]
    with open_llm(folder, "scheduler.max_num_seqs=128", "cache.num_blocks=600", *overrides) as llm:
        outs = [out.outputs[0] for out in llm.generate(prompts, seeded)]
        return [out.token_ids for out in outs], llm.metrics()


def fits(pairs_found, pairs):
    """The chi-square test of pairs of tokens; those too rare to be counted make one cell."""
    counts = torch.zeros_like(pairs)
    for first, second in pairs_found:
        counts[first, second] += 1
    common = pairs * NUM_DRAWS >= 5
    cells = counts[common].tolist() + [float(counts[~common].sum())]
    assert len(cells) > 5
    return not counts[pairs == 0].any() and chi_square_p(cells, pairs[common].tolist() + [float(pairs[~common].sum())]) > 1e-4


def test_outputs_are_the_targets_with_every_proposer(folder, proposers, target):
    params, pairs = target
    plain, _ = draw(folder, params)
    assert not fits([token_ids[:2] for token_ids in plain], pairs.roll(1, 0))  # that the test would tell
    for name, overrides in proposers.items():
        found, metrics = draw(folder, params, *overrides)
        assert fits([token_ids[:2] for token_ids in found], pairs), name
        assert found == plain, name
        assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"], name


TREES = {  # and whether the same seeds must give the same tokens as without drafts
    "dynamic": (["+spec=eagle", "spec.tree=dynamic", "spec.depth=3", "spec.top_k=3", "spec.num_drafts=10"], True),
    "static, most likely": (["+spec=eagle", "spec.tree=static", "spec.num_drafts=8", "spec.draw=false"], True),
    "static, drawn": (["+spec=eagle", "spec.tree=static", "spec.choices=[[0],[1],[2],[0,0],[0,1],[1,0],[2,0]]"], False),
    "medusa, drawn": (["+spec=medusa", "spec.tree=static", "spec.depth=2", "spec.num_drafts=7"], False),
}


@pytest.mark.parametrize("target", ["temperature", "penalties", "min_tokens"], indirect=True)
def test_outputs_are_the_targets_with_every_tree(folder, target, tmp_path):
    """Each node's history is its own path's."""
    params, pairs = target
    heads = {
        "eagle": draft_heads.random(tmp_path / "eagle", folder, "eagle3"),
        "medusa": draft_heads.medusa(tmp_path / "medusa", 64, 2),
    }
    plain, _ = draw(folder, params)
    for name, (overrides, is_same) in TREES.items():
        head = heads[overrides[0].removeprefix("+spec=")]
        found, metrics = draw(folder, params, f"spec.head={head}", *overrides)
        assert fits([token_ids[:2] for token_ids in found], pairs), name
        assert (found == plain) == is_same, name
        assert 0 < metrics["accepted_tokens"] < metrics["draft_tokens"], name


@pytest.mark.parametrize("target", ["temperature", "top_k and top_p", "penalties"], indirect=True)
def test_outputs_are_the_targets_with_the_models_own_module(folder, target, tmp_path):
    """Drawn drafts give other tokens for the same seeds, of the same distribution; its likeliest ones the same tokens."""
    params, pairs = target
    model = draft_heads.mtp(tmp_path / "with", folder, "deepseek")
    plain, _ = draw(folder, params)
    for draws in (True, False):
        found, metrics = draw(model, params, "+spec=mtp", "spec.num_drafts=2", f"spec.draw={draws}")
        assert fits([token_ids[:2] for token_ids in found], pairs), draws
        assert (found == plain) == (not draws)
        assert draws <= metrics["accepted_tokens"] < metrics["draft_tokens"], draws  # random weights' likeliest: few are right
