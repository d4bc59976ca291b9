"""Proposers with a model of their own beside eagle: draft_model and medusa."""

import json

import pytest
import torch
from safetensors.torch import save_file

from lab import LLM, SamplingParams
from lab.errors import UserError
from tests import rigs

BASE = ["draft_length=fixed", "compile.mode=none", "model.dtype=float32", "model.max_model_len=128", "num_threads=1"]
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [7]]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def generate(folder, *overrides, spec=None, prompts=PROMPTS, times=1, on_step=None, **params):
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 20, "ignore_eos": True} | params))
    with LLM(str(folder), spec=spec, attention="eager", overrides=[*BASE, "cache.num_blocks=100", *overrides]) as llm:
        llm.engine.on_step = on_step
        for _ in range(times):
            outs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return [list(o.outputs[0].token_ids) for o in outs], [o.outputs[0].timeline.accepted_counts for o in outs]


@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_model_that_drafts_for_itself_is_always_right(tmp_path, budget, async_scheduling):
    """Its own cache holds what the target's does, in every chunk, and after cached prefixes; so each draft is the target's."""
    target = rigs.mix(tmp_path / "mix")
    right, _ = generate(target)
    settings = [f"scheduler.max_num_batched_tokens={budget}", f"scheduler.async_scheduling={async_scheduling}"]
    steps = []
    options = [f"spec.model={target}", "spec.num_drafts=3", *settings]
    found, _ = generate(target, *options, spec="draft_model", times=2, on_step=steps.append)
    assert found == right
    offered, accepted = (sum(step[name] for step in steps) for name in ("num_drafts", "num_accepted"))
    assert offered == accepted >= 2 * 3 * 10


def test_another_model_is_often_wrong_and_changes_nothing(tmp_path):
    target, other = rigs.mix(tmp_path / "mix"), rigs.mix(tmp_path / "other", seed=5, num_hidden_layers=1)
    right, _ = generate(target)
    settings = ["scheduler.max_num_batched_tokens=16", "cache.block_size=4", "cache.num_blocks=24"]
    found, accepted = generate(target, f"spec.model={other}", *settings, spec="draft_model")
    assert found == right
    assert sum(map(sum, accepted)) < 20


def test_draft_models_that_do_not_fit_are_refused(tmp_path):
    target = rigs.mix(tmp_path / "mix")
    for overrides, message in (
        ([f"spec.model={rigs.mix(tmp_path / 'v', vocab_size=300)}"], "vocabulary of 300 tokens, the target one of 256"),
        ([f"spec.model={rigs.mix(tmp_path / 'p', max_position_embeddings=64)}"], "takes 64 positions"),
        ([], "spec.model must be given"),
    ):
        with pytest.raises(UserError, match=message):
            generate(target, *overrides, spec="draft_model")


def medusa(folder, target, num_heads=2, form="safetensors", size=64):
    """Heads over COUNT that are right: head k's projection is the target's, k + 1 tokens on."""
    folder.mkdir()
    blocks = {f"medusa_heads.blocks.{k}.layers.0.weight": torch.zeros(size, size) for k in range(num_heads)}
    blocks |= {f"medusa_heads.blocks.{k}.layers.0.bias": torch.zeros(size) for k in range(num_heads)}
    heads = {
        f"medusa_heads.lm_heads.{k}.weight": torch.eye(64).roll(2 + k, dims=0)[:, :size].contiguous() for k in range(num_heads)
    }
    if form == "safetensors":
        save_file(blocks | heads, folder / "model.safetensors")
    else:
        names = {
            f"{k}.0.linear.{w}": blocks[f"medusa_heads.blocks.{k}.layers.0.{w}"]
            for k in range(num_heads)
            for w in ("weight", "bias")
        }
        names |= {f"{k}.1.weight": heads[f"medusa_heads.lm_heads.{k}.weight"] for k in range(num_heads)}
        torch.save(names, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 1}))  # as wrong as the published one
    return folder


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_medusa_heads_guess_the_tokens_after_the_next(tmp_path, form):
    target = rigs.count(tmp_path / "count")
    head = medusa(tmp_path / "head", target, form=form)
    found, accepted = generate(target, f"spec.head={head}", "spec.num_drafts=2", spec="medusa", prompts=[[5]])
    assert found == [[(6 + i) % 64 for i in range(20)]]
    assert [count for count in accepted[0] if count == 2] == [2] * 6, accepted  # 1 + 6 * 3 + 1


def test_medusa_heads_without_projections_take_the_targets(tmp_path):
    """As trained ones are written: over COUNT they then propose the token that was just sampled, which is never right."""
    target = rigs.count(tmp_path / "count")
    head = tmp_path / "head"
    head.mkdir()
    tensors = {
        "medusa_heads.blocks.0.layers.0.weight": torch.zeros(64, 64),
        "medusa_heads.blocks.0.layers.0.bias": torch.zeros(64),
    }
    save_file(tensors | {"medusa_heads.token_map": torch.arange(0, 64, 2)}, head / "model.safetensors")
    found, accepted = generate(target, f"spec.head={head}", "spec.num_drafts=1", spec="medusa", prompts=[[5]])
    assert found == [[(6 + i) % 64 for i in range(20)]]
    assert not any(accepted[0])


def test_medusa_heads_that_do_not_fit_are_refused(tmp_path):
    target = rigs.count(tmp_path / "count")
    head = medusa(tmp_path / "head", target)
    (tmp_path / "empty").mkdir()
    for overrides, message in (
        ([f"spec.head={head}", "spec.num_drafts=3"], "spec.num_drafts 3: .* has 2 heads"),
        ([f"spec.head={medusa(tmp_path / 'narrow', target, size=32)}", "spec.num_drafts=1"], "hidden_size 32; this one has 64"),
        ([f"spec.head={tmp_path / 'empty'}"], "holds no head: no file of weights"),
        ([], "spec.head must be given"),
    ):
        with pytest.raises(UserError, match=message):
            generate(target, *overrides, spec="medusa")
