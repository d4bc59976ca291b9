"""Steps whose rows are all greedy take ids from the model's head, and nothing else changes."""

import pytest

from lab import SamplingParams
from lab.model.decoder import Decoder
from plugins.quant import _cpu_linear
from tests import rigs
from tests.engine.models import open_llm

PROMPTS = [{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]}, {"prompt_token_ids": [9]}, {"prompt_token_ids": list(range(3, 40))}]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MIXED = [GREEDY, SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True), GREEDY]

pytestmark = pytest.mark.skipif(not _cpu_linear.ready(), reason="the kernels cannot be built here")


def outputs(folder, monkeypatch, params, *, by_logits, dtype, spec):
    """Token ids of each request, and how often ids and logits were computed."""
    calls = {"greedy": 0, "logits": 0}
    greedy, logits = Decoder.greedy, Decoder.logits

    def counted_greedy(self, hidden_LD):
        calls["greedy"] += 1
        return None if by_logits else greedy(self, hidden_LD)

    def counted_logits(self, hidden_LD):
        calls["logits"] += 1
        return logits(self, hidden_LD)

    with monkeypatch.context() as patch, open_llm(folder, f"model.dtype={dtype}", spec=spec) as llm:
        patch.setattr(Decoder, "greedy", counted_greedy)
        patch.setattr(Decoder, "logits", counted_logits)
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)], calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("spec", [None, "ngram"])
def test_the_tokens_are_those_of_the_logits(tmp_path, monkeypatch, dtype, spec):
    folder = rigs.mix(tmp_path)
    right, slow = outputs(folder, monkeypatch, GREEDY, by_logits=True, dtype=dtype, spec=spec)
    found, fast = outputs(folder, monkeypatch, GREEDY, by_logits=False, dtype=dtype, spec=spec)
    assert found == right
    assert fast == {"greedy": slow["logits"], "logits": 0}


def test_a_sampled_row_brings_the_logits_back(tmp_path, monkeypatch):
    folder = rigs.mix(tmp_path)
    right, _ = outputs(folder, monkeypatch, MIXED, by_logits=True, dtype="float32", spec=None)
    found, calls = outputs(folder, monkeypatch, MIXED, by_logits=False, dtype="float32", spec=None)
    assert found == right
    assert calls["logits"] == 8 and calls["greedy"] == 16
