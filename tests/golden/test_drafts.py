"""Greedy outputs with drafts of every kind are transformers' own, under every setting of the engine."""

import json

import pytest
import torch

from tests import draft_heads, rigs
from tests.golden.oracle import greedy
from tests.golden.prompts import token_prompts
from tests.golden.test_tiny_models import NUM_TOKENS, generate

PROMPTS = token_prompts(seed=1)[::3]
SETTINGS = {
    "budget 1": (["scheduler.max_num_batched_tokens=1", "scheduler.async_scheduling=false"], {"prompts": PROMPTS[::4]}),
    "budget 7, blocks of 1": (
        ["scheduler.max_num_batched_tokens=7", "cache.block_size=1", "cache.num_blocks=6400"],
        {"prompts": PROMPTS[::2]},
    ),
    "budget 64, blocks of 8, no prefix cache, sync": (
        ["scheduler.max_num_batched_tokens=64", "cache.block_size=8", "cache.enable_prefix_caching=false"]
        + ["scheduler.async_scheduling=false"],
        {},
    ),
    "preempted": (["cache.num_blocks=60", "cache.block_size=4", "scheduler.max_num_batched_tokens=96"], {}),
    "preempted by force, sync": (["debug.preempt_every=5", "scheduler.async_scheduling=false"], {}),
    "a warm prefix cache": ([], {"times": 2}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(folder, right outputs by prompt, overrides by proposer)."""
    torch.set_num_threads(1)  # tiny matrices: a second thread would only wait
    folder = rigs.mix(tmp_path_factory.mktemp("mix"), seed=5)
    right = {tuple(prompt): greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS}
    known = tmp_path_factory.mktemp("known") / "known.jsonl"
    lines = [{"prompt_token_ids": list(prompt), "output_token_ids": tokens} for prompt, tokens in right.items()]
    known.write_text("".join(json.dumps(line) + "\n" for line in lines))
    proposers = {
        "ngram": ["spec.min_n=1"],
        "suffix": ["spec.min_match=1", "spec.min_share=0"],
        "replay": [f"spec.path={known}", "spec.acceptance=[0.8,0.6]"],
    }
    return folder, right, proposers


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["ngram", "suffix", "replay"])
def test_greedy_outputs(model, name, setting):
    folder, right, proposers = model
    overrides, arguments = SETTINGS[setting]
    arguments = {"prompts": PROMPTS} | arguments
    found, engine, outs = generate(folder, *overrides, *proposers[name], attention="sdpa", spec=name, **arguments)
    assert found == [right[tuple(prompt)] for prompt in arguments["prompts"]]
    timelines = [out.outputs[0].timeline for out in outs]
    if setting == "budget 1":  # leaves no room for a draft
        assert not any(sum(timeline.draft_counts) for timeline in timelines)
    else:
        assert sum(sum(timeline.accepted_counts) for timeline in timelines) > 0
    assert (engine.scheduler.num_preemptions > 0) == setting.startswith("preempted")


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    """(folder with a module of random weights, right outputs by prompt)."""
    folder = tmp_path_factory.mktemp("mimo")
    plain = rigs.mix(folder / "plain", "qwen2", seed=5)
    right = {tuple(prompt): greedy(plain, prompt, NUM_TOKENS) for prompt in PROMPTS}
    return draft_heads.mtp(folder / "with", plain, "mimo"), right


@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_outputs_of_a_model_with_a_module_of_its_own(mimo, setting):
    folder, right = mimo
    overrides, arguments = SETTINGS[setting]
    arguments = {"prompts": PROMPTS} | arguments
    found, engine, outs = generate(folder, *overrides, "spec.num_drafts=2", attention="sdpa", spec="mtp", **arguments)
    assert found == [right[tuple(prompt)] for prompt in arguments["prompts"]]
    drafts = sum(sum(out.outputs[0].timeline.draft_counts) for out in outs)
    assert (drafts == 0) == (setting == "budget 1")  # which leaves no room for one
    assert (engine.scheduler.num_preemptions > 0) == setting.startswith("preempted")


@pytest.mark.parametrize("length", ["acceptance", "batch"])
@pytest.mark.parametrize("name", ["ngram", "replay"])
def test_greedy_outputs_with_a_length_that_changes(model, name, length):
    folder, right, proposers = model
    overrides = [f"draft_length={length}", *proposers[name]]
    found, _, _ = generate(folder, *overrides, attention="sdpa", spec=name, prompts=PROMPTS, times=2)
    assert found == [right[tuple(prompt)] for prompt in PROMPTS]
