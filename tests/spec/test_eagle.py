"""The eagle proposer: its pairing of hidden states and tokens, whatever the engine does; its drafts; what it refuses."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from lab import LLM, SamplingParams, registry
from lab.errors import UserError
from lab.model.config import read_config
from lab.runner.draft_lengths.fixed import Fixed
from lab.train.chain import Chain
from lab.train.heads import Eagle1, Eagle3, rotations
from lab.train.target import FrozenTarget
from plugins.spec_decode._waiting import Waiting
from tests import draft_heads, rigs
from tests.spec.whole_text import BASE, SETTINGS, generate, texts_and_drafts

registry.discover()
Eagle = registry.get("spec", "eagle").load()
NUM_DRAFTS = 3


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


def open_llm(folder, head, kind, *overrides):
    options = [f"spec.head={head}", f"spec.format={kind}", f"spec.num_drafts={NUM_DRAFTS}", "draft_length=fixed"]
    return LLM(str(folder), spec="eagle", attention="eager", overrides=[*BASE, "cache.num_blocks=200", *options, *overrides])


@pytest.mark.parametrize("budget", [512, 4])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("prompt", [[7], [1, 5, 9, 13, 20, 21], list(range(40, 51))], ids=len)
def test_a_head_that_keeps_the_embedding_is_always_right_over_count(tmp_path, budget, async_scheduling, prompt):
    """Entry j pairs hidden state j with token j + 1: shifted by one, the same head would never be right."""
    target = rigs.count(tmp_path / "count")
    head = draft_heads.hand_made(tmp_path / "head", target, "embedding")
    settings = [f"scheduler.max_num_batched_tokens={budget}", f"scheduler.async_scheduling={async_scheduling}"]
    with open_llm(target, head, "eagle1", *settings) as llm:
        (tokens,), (accepted,) = generate(llm, [prompt])
    assert tokens == [(prompt[-1] + 1 + i) % 64 for i in range(30)]
    assert accepted == [0] + [3] * 7 + [0] or accepted == [3] * 7 + [0], accepted  # 1 + 7 * 4 + 1


@pytest.mark.parametrize("budget", [512, 4])
def test_a_head_that_keeps_the_hidden_state_is_never_right_over_count(tmp_path, budget):
    target = rigs.count(tmp_path / "count")
    head = draft_heads.hand_made(tmp_path / "head", target, "hidden")
    with open_llm(target, head, "eagle1", f"scheduler.max_num_batched_tokens={budget}") as llm:
        (tokens,), (accepted,) = generate(llm, [[1, 5, 9, 13, 20, 21]])
    assert tokens == [(22 + i) % 64 for i in range(30)]
    assert len(accepted) >= 29 and not any(accepted)


def test_right_again_after_a_rejection(tmp_path):
    """A head that cannot propose every fourth token: rejections and full acceptance in turn."""
    target = rigs.count(tmp_path / "count")
    head = draft_heads.hand_made(tmp_path / "head", target, "embedding")
    weights = load_file(head / "model.safetensors")
    ids = torch.tensor([token for token in range(64) if token % 4])
    weights["d2t"] = ids - torch.arange(len(ids))
    config = json.loads((head / "config.json").read_text()) | {"draft_vocab_size": len(ids)}
    draft_heads.write(head, config, weights)
    with open_llm(target, head, "eagle1", "scheduler.async_scheduling=false") as llm:
        (tokens,), (accepted,) = generate(llm, [[0]])
    assert tokens == list(range(1, 31))
    # the token after 3 mod 4 is unknown to it: a step goes from there over 0 mod 4 and on
    assert accepted[:1] == [2] or accepted[1:2] == [2], accepted
    assert 3 in [a + 1 for a in accepted] and max(accepted) == 3 - (3 not in accepted)


class Oracle:
    """What the head should propose after a text, from the whole text at once and the modules that heads are trained with."""

    def __init__(self, folder, head, kind, llm):
        self.config = read_config(folder)
        weights = load_file(head / "model.safetensors")
        aux = (2, self.config.num_layers // 2, max(self.config.num_layers - 3, 0))
        model = llm.engine.model
        assert model.aux_layers == (aux if kind == "eagle3" else ())
        self.target = FrozenTarget(model, model.aux_layers)
        self.head = (Eagle3 if kind == "eagle3" else Eagle1)(self.config, self.config.intermediate_size)
        own = {name: weights.pop(name) for name in self.head.state_dict()}
        self.head.load_state_dict(own)
        self.ids = torch.arange(self.config.vocab_size)
        if "d2t" in weights:
            self.ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
        self.rows = weights.get("lm_head.weight", self.target.head_rows(self.ids))

    @torch.inference_mode()
    def drafts(self, text, count):
        states = self.target.states(torch.tensor([text]))
        found = []
        for step in range(count):
            ids = torch.tensor([text + found])
            embeds = functional.pad(self.target.embed(ids), (0, 0, 0, 1))
            hidden = self.head.start(states.aux_TX if isinstance(self.head, Eagle3) else states.hidden_TD)
            places = torch.arange(len(text))
            chain = Chain((1, len(text)))
            for k in range(step + 1):
                cos, sin = rotations(self.target.model, places + k)
                hidden, chain = self.head(hidden, embeds[(places + 1 + k).clamp(max=len(embeds) - 1)], cos, sin, chain)
            logits = self.head.for_vocabulary(hidden[len(text) - 2]) @ self.rows.T
            found.append(int(self.ids[logits.argmax()]))
        return found


@pytest.mark.parametrize("kind", draft_heads.KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_are_those_of_the_whole_text(tmp_path, monkeypatch, kind, name):
    """In every batch, chunk, prefix hit and after every preemption: the head's cache holds what the text says it must."""
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, kind, draft_vocab=None if kind == "eagle1" else 100)
    with open_llm(target, head, kind, *SETTINGS[name]) as llm:
        made = texts_and_drafts(monkeypatch, Eagle, llm, preempts=name == "preempted")
        oracle = Oracle(target, head, kind, llm)
        assert not [(text, ids) for text, ids in made if ids != oracle.drafts(text, len(ids))]


@pytest.mark.parametrize("kind", draft_heads.KINDS)
def test_drafts_are_right_after_steps_that_wanted_none(tmp_path, monkeypatch, kind):
    """The head then runs over the tokens of several steps at once, those of requests that ended included."""
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, kind, draft_vocab=None if kind == "eagle1" else 100)
    waited, calls, take = [], itertools.count(), Waiting.take
    monkeypatch.setattr(Waiting, "take", lambda self: waited.append(len(self._rows)) or take(self))
    plain = Fixed.lengths
    monkeypatch.setattr(Fixed, "lengths", lambda self, rows_R: plain(self, rows_R) * (next(calls) % 4 == 0))
    with open_llm(target, head, kind) as llm:
        made = texts_and_drafts(monkeypatch, Eagle, llm, preempts=False)
        oracle = Oracle(target, head, kind, llm)
        assert not [(text, ids) for text, ids in made if ids != oracle.drafts(text, len(ids))]
    assert max(waited) > 1


@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_other_attention_serves_the_head_too(tmp_path, attention):
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, "eagle3")
    prompts = [[3, 1, 4, 1, 5], list(range(40))]
    found = []
    for name in ("eager", attention):
        options = [f"spec.head={head}", "cache.num_blocks=60"]
        with LLM(str(target), spec="eagle", attention=name, overrides=[*BASE, *options]) as llm:
            assert llm.engine.records["spec.attention"]["name"] == name
            found.append(generate(llm, prompts))
    assert found[0] == found[1]


@pytest.mark.parametrize("draw", [True, False])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.5, "top_k": 6}, {"temperature": 1.0, "top_p": 0.8}], ids=["top-k", "top-p"]
)
def test_sampled_outputs_have_the_targets_distribution(tmp_path, draw, params):
    """The second token of many seeds with and without the head, by a two-sample chi-square."""
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, "eagle1", seed=2)
    several = [SamplingParams(max_tokens=3, seed=seed, ignore_eos=True, **params) for seed in range(1200)]
    prompt = {"prompt_token_ids": [3, 1, 4, 1, 5]}
    counts, drafted = [], 0
    for spec in (None, "eagle"):
        options = [f"spec.head={head}", "spec.format=eagle1", f"spec.draw={draw}", "spec.num_drafts=2"] if spec else []
        with LLM(
            str(target), spec=spec, overrides=[*BASE, "cache.num_blocks=2000", "debug.check_integrity=false", *options]
        ) as llm:
            outs = llm.generate([prompt] * len(several), several)
        tokens = [o.outputs[0].token_ids for o in outs]
        counts.append(np.bincount([ids[1] for ids in tokens], minlength=256))
        drafted = sum(len(o.outputs[0].timeline.accepted_counts) for o in outs)
    assert drafted > 0
    first, second = counts
    seen = first + second > 10
    statistic = ((first - second)[seen] ** 2 / (first + second)[seen]).sum()
    degrees = int(seen.sum()) - 1
    assert degrees >= 3
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5 + 8, (statistic, degrees)


def test_what_does_not_fit_is_refused(tmp_path):
    target = rigs.mix(tmp_path / "mix")
    other = rigs.mix(tmp_path / "other", hidden_size=96, num_attention_heads=6)
    head = draft_heads.random(tmp_path / "head", target, "eagle3", draft_vocab=50)

    def refused(folder, message, *overrides, kind="eagle3"):
        with pytest.raises(UserError, match=message), open_llm(target, folder, kind, *overrides):
            pass

    refused(draft_heads.random(tmp_path / "wide", other, "eagle3"), "hidden_size 96; this one has 64")
    refused(tmp_path / "nowhere", "no such folder")
    refused(head, "holds an eagle3 head, and eagle1 was asked for", kind="eagle1")
    refused(draft_heads.random(tmp_path / "e1", target, "eagle1"), "holds an eagle1 head, and eagle3 was asked for")
    refused(head, "spec.num_drafts 200: contexts have at most 128", "spec.num_drafts=200")
    refused(head, "spec.num_drafts must be", "spec.num_drafts=0")
    config = json.loads((head / "config.json").read_text())
    weights = load_file(head / "model.safetensors")

    def changed(name, new_config=None, **tensors):
        kept = {k.replace("__", "."): v for k, v in tensors.items()}
        found = {k: v for k, v in (weights | kept).items() if v is not None}
        return draft_heads.write(tmp_path / name, config | (new_config or {}), found)

    refused(changed("vocab", {"vocab_size": 300}), "vocab_size 300; this one has 256")
    refused(
        changed("aux", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}),
        r"\[0, 1, 9\] must be three of 0 to 2",
    )
    refused(changed("extra", strange__weight=torch.zeros(2)), "'strange.weight' belongs to no part")
    refused(changed("lacks", norm__weight=None), "'norm.weight' is missing")
    refused(changed("maps", d2t=torch.full((50,), 300)), "outside the target's vocabulary of 256")
    refused(changed("count", {"draft_vocab_size": 60}), "says draft_vocab_size 60, and the head has 50")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "holds no head: no file of weights")
    with pytest.raises(UserError, match="lab brings no draft head for"), LLM(str(target), spec="eagle", overrides=BASE):
        pass


def test_a_head_in_a_pytorch_file_is_read_and_code_in_it_is_not_run(tmp_path):
    target = rigs.mix(tmp_path / "mix")
    head = draft_heads.random(tmp_path / "head", target, "eagle3")
    weights = load_file(head / "model.safetensors") | {"embed_tokens.weight": torch.zeros(256, 64)}
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    shutil.copy(head / "config.json", pickled)
    torch.save(weights, pickled / "pytorch_model.bin")
    found = []
    for folder in (head, pickled):
        with open_llm(target, folder, "eagle3") as llm:
            found.append(generate(llm, [[3, 1, 4, 1, 5]]))
    assert found[0] == found[1]
    torch.save({"fc.weight": torch.zeros(1), "code": print}, pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be read as plain tensors"), open_llm(target, pickled, "eagle3"):
        pass
