"""Training of draft heads: it learns, it can be killed and goes on exactly where it was, and what it writes is what runs."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from lab import LLM, SamplingParams, registry
from lab.errors import UserError
from lab.model.config import read_config
from lab.model.load import load_model
from lab.train.data import Text, batch_of, endless, frequent_tokens, read_texts
from lab.train.heads import Eagle1, Eagle3, Medusa
from lab.train.loop import Training
from lab.train.loss import Teacher, acceptance, eagle_outcome, mean_length
from lab.train.options import TrainOptions
from tests import rigs

registry.discover()
OPTIONS = TrainOptions(steps=8, batch_tokens=256, max_len=64, lr=5e-3, unroll=2, draft_vocab=50, validation=4, every=3)
BASE = ["draft_length=fixed", "compile.mode=none", "model.dtype=float32", "model.max_model_len=128", "num_threads=1"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """COUNT, and its own greedy answers."""
    torch.set_num_threads(1)
    folder = rigs.count(tmp_path_factory.mktemp("count"))
    return folder, [Text([(start + i) % 64 for i in range(20)], 3) for start in range(0, 64, 2)]


def load(folder):
    quant, moe = (registry.get(kind, "none") for kind in ("quant", "moe"))
    made = [entry.load()(entry.make_options({})) for entry in (quant, moe)]
    arguments = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "auto"}
    return load_model(folder, read_config(folder), quant=made[0], moe=made[1], max_model_len=128, **arguments)


def training(target, folder, options=OPTIONS, seed=0):
    folder.mkdir(exist_ok=True)
    return Training(load(target[0]), read_config(target[0]), target[1], options, folder, seed)


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa1"])
def test_it_learns_and_says_how_well(target, tmp_path, kind):
    options = replace(OPTIONS, kind=kind, steps=40, every=40)
    trained = training(target, tmp_path / "head", options)
    before = mean_length(trained.validate())
    report = trained.run()
    assert report["tokens_per_step"] > before + 0.15, (before, report)
    assert report == json.loads((tmp_path / "head" / "train.json").read_text())
    assert len(report["acceptance_per_position"]) == 2
    assert report["draft_vocab"] == 50 and 0.5 < report["draft_vocab_coverage"] <= 1


def test_a_trained_head_runs_and_its_drafts_are_accepted(target, tmp_path):
    folder = tmp_path / "head"
    report = training(target, folder, replace(OPTIONS, steps=40, every=40)).run()
    prompt = {"prompt_token_ids": [7, 8, 9]}
    options = [f"spec.head={folder}", "spec.num_drafts=2"]
    with LLM(str(target[0]), spec="eagle", overrides=[*BASE, "cache.num_blocks=50", *options]) as llm:
        (out,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert list(out.outputs[0].token_ids) == [(10 + i) % 64 for i in range(40)]
    accepted = out.outputs[0].timeline.accepted_counts
    assert sum(accepted) >= 3, (accepted, report)


def test_killed_and_resumed_it_ends_where_it_would_have(target, tmp_path):
    whole = training(target, tmp_path / "whole")
    whole.run()
    stopped = training(target, tmp_path / "stopped")
    learn = stopped._learn

    def killed(batch):
        if stopped.step == 5:  # after the checkpoint of step 3
            raise RuntimeError("killed")
        return learn(batch)

    stopped._learn = killed
    with pytest.raises(RuntimeError, match="killed"):
        stopped.run()
    resumed = training(target, tmp_path / "stopped")
    assert resumed.step == 3
    resumed.run()
    found = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped")]
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def test_another_training_is_not_gone_on_with(target, tmp_path):
    training(target, tmp_path / "head", replace(OPTIONS, steps=1)).run()
    with pytest.raises(UserError, match="another training: draft_vocab was 50, and is 40"):
        training(target, tmp_path / "head", replace(OPTIONS, draft_vocab=40))
    with pytest.raises(UserError, match="another training: seed was 0, and is 1"):
        training(target, tmp_path / "head", seed=1)
    assert training(target, tmp_path / "head", replace(OPTIONS, steps=5)).step == 1


def test_a_head_can_begin_with_another(target, tmp_path):
    training(target, tmp_path / "first", replace(OPTIONS, steps=3)).run()
    second = training(target, tmp_path / "second", replace(OPTIONS, start=str(tmp_path / "first"), draft_vocab=30))
    first = load_file(tmp_path / "first" / "model.safetensors")
    assert all(torch.equal(tensor, first[name]) for name, tensor in second.head.state_dict().items())


def test_padding_and_the_texts_beside_it_do_not_change_a_texts_loss(target, tmp_path):
    trained = training(target, tmp_path / "head")
    short, long = Text(target[1][0].ids[:20], 3), target[1][1]
    with torch.no_grad():
        alone, together = (
            eagle_outcome(trained.head, Teacher(trained._target, batch_of(texts), trained._vocabulary), 2, 1.0)
            for texts in ([short], [short, long])
        )
    for step in range(2):
        assert torch.equal(alone.right[step][0], together.right[step][0, :20])
        assert torch.equal(alone.asked[step][0], together.asked[step][0, :20])
        assert not together.asked[step][0, 20:].any()


def test_acceptance_counts_only_what_all_before_it_let_through():
    yes, no = torch.tensor([[True]]), torch.tensor([[False]])

    class One:
        def __init__(self, *right):
            self.right, self.asked = list(right), [yes, yes]

    rates = acceptance([One(yes, yes), One(yes, no), One(no, yes), One(no, no)])
    assert rates == [0.5, 0.5]
    assert mean_length(rates) == 1.75


def test_batches_are_the_same_for_a_seed_and_hold_every_text_once_an_epoch(target):
    texts = target[1]

    def taken(seed, count=8):
        batches = endless(texts, 512, seed)
        return [next(batches).ids_RL.tolist() for _ in range(count)]

    assert taken(0) == taken(0) != taken(1)
    rows = [tuple(row) for batch in taken(0, 40) for row in batch][: len(texts)]
    assert sorted(row[: len(texts[0].ids)] for row in rows) == sorted(tuple(text.ids) for text in texts)
    assert len({len(text.ids) for text in texts}) == 1
    batch = batch_of([Text([1, 2, 3, 4], 2)])
    assert batch.asked_RL.tolist() == [[False, True, True, False]]  # where the next token is one of the answer


def test_the_draft_vocabulary_is_what_answers_use_most():
    texts = [Text([9, 9, 9, 1, 2, 2], 3), Text([9, 2, 5], 1)]
    assert frequent_tokens(texts, 10, 3).tolist() == [1, 2, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1: must be"),
        ("not json", "line 1: must be"),
        ('{"prompt_token_ids": [1], "output_token_ids": [300]}', "outside the model's vocabulary of 256"),
        ('{"prompt_token_ids": [1], "output_token_ids": [2]}', "no text of more than two tokens"),
    ],
)
def test_bad_data_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        read_texts(path, list, 256, 64)


def test_bad_options_are_refused():
    for wrong in ({"steps": 0}, {"lr": 0.0}, {"decay": 1.5}, {"max_len": 5000}):
        with pytest.raises(UserError, match=f"train.{next(iter(wrong))}"):
            TrainOptions(**wrong)


def test_heads_of_every_kind_have_the_published_names(target):
    config = read_config(target[0])
    assert set(Eagle1(config, 32).state_dict()) >= {
        "fc.weight",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.mlp.up_proj.weight",
    }
    assert "layers.0.input_layernorm.weight" not in Eagle1(config, 32).state_dict()
    assert set(Eagle3(config, 32).state_dict()) >= {"fc.weight", "midlayer.hidden_norm.weight", "norm.weight"}
    assert set(Medusa(config, 2).state_dict()) == {f"blocks.{k}.layers.0.{w}" for k in (0, 1) for w in ("weight", "bias")}


def test_kept_states_are_those_computed_and_leave_no_file(target, tmp_path, monkeypatch):
    """The second epoch reads what the first one wrote, whatever texts stand beside one another in a batch."""
    trained = training(target, tmp_path / "head", replace(OPTIONS, keep_states=True))
    before = {path.name for path in (tmp_path / "head").iterdir()}
    computed = trained._target._computed
    calls = []

    def counted(ids_RL):
        calls.append(len(ids_RL))
        return computed(ids_RL)

    monkeypatch.setattr(trained._target, "_computed", counted)
    texts = trained._texts
    for batch in (batch_of(texts[:3]), batch_of(texts[3:5])):
        trained._target.states(batch.ids_RL, batch.numbers)
    assert calls == [3, 2]
    mixed = batch_of([texts[4], replace(texts[0], ids=texts[0].ids)])
    kept = trained._target.states(mixed.ids_RL, mixed.numbers)
    assert calls == [3, 2], "both texts are known"
    anew = computed(mixed.ids_RL)
    torch.testing.assert_close(torch.cat([kept.hidden_TD, kept.aux_TX], 1), anew, rtol=1e-4, atol=1e-5)
    assert {path.name for path in (tmp_path / "head").iterdir()} == before == set()


def test_compiled_it_learns_the_same(target, tmp_path):
    losses = []
    for compiles in (False, True):
        folder = tmp_path / str(compiles)
        folder.mkdir()
        made = Training(load(target[0]), read_config(target[0]), target[1], OPTIONS, folder, 0, compiles=compiles)
        batches = endless(made._texts, OPTIONS.batch_tokens, 0)
        losses.append([made._learn(next(batches)) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][0] > losses[0][2]
