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
        ("flash", ["+spec=eagle", "spec.tree=dynamic", "spec.depth=8"], "a tree must be less deep than that"),
    ],
    ids=["features", "options", "trees"],
)
def test_before_the_weights(attention, overrides, message, tmp_path):
    """There are none: had the run come as far, they would be what it says is missing."""
    rigs.mix(tmp_path, "gemma2", sliding_window=8)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=message):
        LLM(str(tmp_path), attention=attention, overrides=["model.dtype=float32", "num_threads=1", *overrides])
    with pytest.raises(UserError, match="has no safetensors or GGUF weights"):
        LLM(str(tmp_path), attention="eager", overrides=["model.dtype=float32", "num_threads=1"])
