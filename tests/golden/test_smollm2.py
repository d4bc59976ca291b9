"""Greedy outputs on the real model are transformers' own, token for token, for prompts of 1 to 2,000 tokens."""

import pytest
from transformers import AutoTokenizer

from lab import LLM, SamplingParams
from tests import rigs
from tests.golden.oracle import greedy
from tests.golden.prompts import TEXTS, long_text

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONG_LENGTHS = (64, 100, 127, 128, 129, 200, 255, 256, 300, 400, 511, 700, 1000, 2000)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(rigs.smollm2())
    found = [tokenizer.encode(text) for text in TEXTS]
    found += [tokenizer.encode(long_text(130, seed=length))[:length] for length in LONG_LENGTHS]
    found.append(tokenizer.encode("Hello")[:1])
    assert len(found) >= 40
    assert {len(p) for p in found} >= {1, 2000}
    return found


@pytest.fixture(scope="module")
def right(prompts) -> list[list[int]]:
    return [greedy(rigs.smollm2(), prompt, NUM_TOKENS) for prompt in prompts]


def generate(prompts, *overrides, **plugins):
    base = ["compile.mode=none", "model.dtype=float32", "cache.num_blocks=1200", "model.max_model_len=2048"]
    with LLM("smollm2", overrides=[*base, *overrides], **plugins) as llm:
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks
        return [o.outputs[0].token_ids for o in outs], llm.engine


def test_all_prompts_as_one_workload(prompts, right):
    found, _ = generate(prompts)
    assert found == right


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduler.async_scheduling=false", "scheduler.max_num_batched_tokens=64", "cache.block_size=8"],
        ["scheduler.max_num_batched_tokens=7", "cache.block_size=1", "cache.num_blocks=8000"],
        ["scheduler.max_num_batched_tokens=1", "cache.enable_prefix_caching=false"],
        ["cache.num_blocks=28", "cache.block_size=8", "model.max_model_len=220"],
    ],
    ids=["chunks-of-64-sync", "chunks-of-7", "chunks-of-1", "small-pool"],
)
def test_short_prompts_under_settings(prompts, right, overrides):
    short = [i for i, p in enumerate(prompts) if len(p) <= 24][:12]
    short += [i for i, p in enumerate(prompts) if 60 <= len(p) <= 130][:3]
    found, engine = generate([prompts[i] for i in short], *overrides)
    assert found == [right[i] for i in short]
    if "cache.num_blocks=28" in overrides:
        assert engine.scheduler.num_preemptions > 0


def test_ngram_drafts(prompts, right):
    found, _ = generate(prompts[:30], spec="ngram")
    assert found == right[:30]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["scheduler.async_scheduling=false", "scheduler.max_num_batched_tokens=16"],
        ["cache.num_blocks=28", "cache.block_size=8", "model.max_model_len=220", "debug.preempt_every=4"],
    ],
    ids=["as-it-comes", "chunks-of-16-sync", "small-pool"],
)
def test_eagle_drafts(prompts, right, overrides):
    """By the head that comes with lab, drafts of which are accepted."""
    short = [i for i, p in enumerate(prompts) if len(p) <= 24][:12]
    short += [i for i, p in enumerate(prompts) if 60 <= len(p) <= 130][:3]
    found, engine = generate([prompts[i] for i in short], "draft_length=fixed", *overrides, spec="eagle")
    assert found == [right[i] for i in short]
    assert engine.model.aux_layers == (2, 15, 27)
    if "debug.preempt_every=4" in overrides:
        assert engine.scheduler.num_preemptions > 0
