"""lab train-draft: from prompts to a head that a run drafts with; stopped and called again; what it refuses."""

import json

import pytest

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
    ],
)
def test_what_cannot_be_is_refused(lab, arguments, message):
    outcome = lab("train-draft", *arguments)
    assert outcome.code == 2
    assert message in outcome.err
