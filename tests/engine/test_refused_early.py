"""What config.json is enough to refuse is refused before any weight is read."""

import pytest

from lab import LLM
from lab.errors import UserError
from tests import rigs


@pytest.mark.parametrize(
    ("attention", "overrides", "message"),
    [
        ("sdpa", [], "softcap"),
        ("flash", ["attention.cascade=nevr"], "attention.cascade=nevr: it takes auto, never, or a number"),
        (
            "flash",
            ["+spec=eagle", "spec.head={folder}/head", "spec.tree=dynamic", "spec.depth=8"],
            "a tree must be less deep than that",
        ),
    ],
    ids=["features", "options", "trees"],
)
def test_before_the_weights(attention, overrides, message, tmp_path):
    """There are none: had the run come as far, they would be what it says is missing."""
    rigs.mix(tmp_path, "gemma2", sliding_window=8)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "head").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "head" / name).touch()
    overrides = [override.format(folder=tmp_path) for override in overrides]
    with pytest.raises(UserError, match=message):
        LLM(str(tmp_path), attention=attention, overrides=["model.dtype=float32", "num_threads=1", *overrides])
    with pytest.raises(UserError, match="has no safetensors or GGUF weights"):
        LLM(str(tmp_path), attention="eager", overrides=["model.dtype=float32", "num_threads=1"])


@pytest.mark.parametrize(
    ("spec", "overrides", "message"),
    [
        ("draft_model", ["spec.model={folder}/other"], "a vocabulary of 300 tokens, the target one of 256"),
        ("draft_model", [], "spec.model must be given"),
        ("draft_model", ["spec.model=lost"], "no model 'lost'"),
        ("eagle", [], "lab brings no draft head for"),
        ("eagle", ["spec.head={folder}/bare"], "holds no head: it has no config.json"),
        ("medusa", [], "spec.head must be given"),
        ("medusa", ["spec.head={folder}/empty"], "holds no head: no file of weights"),
        ("mtp", ["spec.head={folder}/empty"], "holds no head: no file of weights"),
        (None, ["model.tokenizer={folder}/lost"], "there is no such folder"),
        (None, ["model.tokenizer={folder}/empty"], "holds no tokenizer"),
        (None, ["attention.score_mod=lost.py:f", "+attention=flex"], "there is no file"),
    ],
)
def test_files_and_models_that_are_not_there(spec, overrides, message, tmp_path):
    """Before the weights, of which there are none."""
    rigs.mix(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    rigs.mix(tmp_path / "other", vocab_size=300)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").touch()
    overrides = [override.format(folder=tmp_path) for override in overrides]
    with pytest.raises(UserError, match=message):
        LLM(str(tmp_path), spec=spec, overrides=["model.dtype=float32", "num_threads=1", *overrides])
