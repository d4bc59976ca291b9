"""lab train-draft: from prompts to a head that a run drafts with; stopped and called again; what it refuses."""

import itertools
import json
import signal

import pytest

from lab.engine.engine import Engine
from lab.interrupt import AFTER_STEP
from lab.train.loop import Training
from tests import rigs

MODEL = ["cache.num_blocks=60", "compile.mode=none", "num_threads=1", "model.max_model_len=128", "model.dtype=float32"]
TRAIN = [
    "train.steps=6",
    "train.batch_tokens=128",
    "train.max_len=64",
    "train.unroll=2",
    "train.draft_vocab=50",
    "train.every=3",
]


@pytest.fixture
def work(tmp_path):
    """Overrides of COUNT and a workload of prompts."""
    folder = rigs.count(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [i, i + 1]}) + "\n" for i in range(0, 60, 5)))
    return [f"model.path='{folder}'", f"workload.path='{prompts}'", "sampling.max_tokens=12", *MODEL]


def test_from_prompts_to_a_run_with_the_head(lab, work, tmp_path):
    outcome = lab("train-draft", "--out=head", *work, *TRAIN)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "here" / "head"
    assert "head: eagle3 head, acceptance by position" in outcome.out
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 12
    assert answers[1] == {"prompt_token_ids": [5, 6], "output_token_ids": [7 + i for i in range(12)]}
    quiet = ["tracking.wandb.mode=disabled", "tracking.progress=off"]
    outcome = lab("run", "--json", *work, *quiet, "+spec=eagle", f"spec.head={folder}", "draft_length=fixed")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out.splitlines()[-1])["spec"]["draft_tokens"] > 0


def test_called_again_it_goes_on_and_answers_only_what_is_new(lab, work, tmp_path):
    lab("train-draft", "--out=head", *work, *TRAIN)
    answers = tmp_path / "here" / "head" / "answers.jsonl"
    before = answers.stat().st_mtime_ns
    outcome = lab("train-draft", "--out=head", "--json", *work, *TRAIN[1:], "train.steps=8")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out.splitlines()[-1])["step"] == 8
    assert "going on after step 6" in outcome.err
    assert answers.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name the folder to write: lab train-draft --out=FOLDER."),
        (["--out=head", "train.stps=3"], "no setting 'train.stps'. Did you mean 'train.steps'?"),
        (["--out=head", "train.kind=eagel3"], "Did you mean 'eagle3'?"),
        (["--out=head", "train.steps=none"], "train.steps must be a whole number"),
        (["--out=head", "train.steps=1,2"], "train.steps"),
        (["--out=head", "workload.path=lost.jsonl"], "cannot read lost.jsonl"),
        (["--out=head", "train.data=lost.jsonl"], "train.data=lost.jsonl: there is no such file."),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(lab, arguments, message, somewhere_else):
    outcome = lab("train-draft", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert list(somewhere_else.iterdir()) == []


def test_a_training_that_is_refused_late_leaves_nothing_of_itself(lab, work, tmp_path, somewhere_else):
    (tmp_path / "texts.jsonl").write_text('{"prompt_token_ids": [1, 2], "output_token_ids": [3, 99999]}\n')
    (somewhere_else / "head").mkdir()
    (somewhere_else / "head" / "log.txt").write_text("of an earlier one\n")
    for folder in ("head", "other/head"):
        assert lab("train-draft", f"--out={folder}", *work, *TRAIN, f"train.data={tmp_path / 'texts.jsonl'}").code == 2
    assert [path.name for path in somewhere_else.rglob("*")] == ["head", "log.txt"]


def test_ctrl_c_keeps_the_answers_and_the_steps_that_are_there(lab, work, monkeypatch, somewhere_else):
    monkeypatch.setattr("lab.train.job.ANSWERED_AT_ONCE", 5)

    def pressing_at(name, number):
        calls, before = itertools.count(1), getattr(*name)

        def call(*arguments):
            if next(calls) == number:
                signal.raise_signal(signal.SIGINT)
            return before(*arguments)

        return (*name, call)

    with monkeypatch.context() as patch:
        patch.setattr(*pressing_at((Engine, "step"), 20))
        outcome = lab("train-draft", "--out=head", *work, *TRAIN)
    assert outcome.code == 130 and outcome.err.splitlines().count(AFTER_STEP) == 1 and "Traceback" not in outcome.err
    answers = (somewhere_else / "head" / "answers.jsonl").read_text()
    assert len(answers.splitlines()) == 5
    with monkeypatch.context() as patch:
        patch.setattr(*pressing_at((Training, "_learn"), 2))
        outcome = lab("train-draft", "--out=head", *work, *TRAIN)
    assert outcome.code == 130 and outcome.err.splitlines().count(AFTER_STEP) == 1
    assert (somewhere_else / "head" / "answers.jsonl").read_text().startswith(answers)
    outcome = lab("train-draft", "--out=head", *work, *TRAIN)
    assert outcome.code == 0 and "going on after step 2" in outcome.err
