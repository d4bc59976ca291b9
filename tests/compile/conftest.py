"""One tiny model and one cache of compiled code for all tests of this folder: each form of it is compiled once."""

import pytest
import torch

from lab import LLM, SamplingParams
from tests import rigs
from tests.golden.prompts import token_prompts

NUM_LAYERS = 3  # two of them in the middle, so that a shared piece is really shared
PROMPTS = token_prompts()[:7]  # not a capture size: seven decodes are padded
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
# sdpa by name: some tests look into its cache's plain layout
BASE = ["num_threads=1", "cache.num_blocks=400", "model.max_model_len=256", "debug.check_integrity=true", "attention=sdpa"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def open_llm(folder, cache):
    """An LLM of the tiny model in float32, with these overrides."""

    def opened(*overrides, **plugins):
        base = [*BASE, "model.dtype=float32", f"compile.cache_dir='{cache}'"]
        return LLM(str(folder), overrides=[*base, *overrides], **plugins)

    return opened


def generate(llm, prompts=PROMPTS, params=GREEDY):
    """(token ids of each prompt, the records of the steps)."""
    steps = []
    llm.engine.on_step = steps.append
    outs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
    return [out.outputs[0].token_ids for out in outs], steps


@pytest.fixture(scope="session")
def eager_tokens(folder):
    with LLM(str(folder), overrides=[*BASE, "model.dtype=float32", "compile.mode=none"]) as llm:
        tokens, steps = generate(llm)
        assert {step["mode"] for step in steps} == {"none"} and not llm.engine.compile_metrics["num_graphs"]
    return tokens
