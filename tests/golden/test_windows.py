"""Greedy outputs of models with sliding windows are transformers' own: windows of 12 tokens, prompts of up to 160.

Gemma-2 and Gemma-3 have full and sliding layers, in three and five KV groups; Mistral's layers all have the window; Qwen2's and
Qwen3's have it from one layer on, when config.json says so.
"""

import json

import pytest
import torch

from lab import LLM, SamplingParams
from lab.kv.grouped import NO_BLOCK, GroupedBlockManager
from tests import rigs
from tests.golden.oracle import greedy
from tests.golden.prompts import token_prompts

NUM_TOKENS = 24
WINDOW = 12
PROMPTS = token_prompts()[3::4]  # of 5 to 160 tokens, each with a part that is repeated
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NUM_GROUPS = {"gemma2": 3, "gemma3_text": 5, "mistral": 1, "qwen2": 3, "qwen3": 3}
BACKENDS = {"gemma2": "eager flash flex", "gemma3_text": "eager sdpa hybrid flash", "mistral": "sdpa flash"}
BACKENDS |= {"qwen2": "sdpa flash", "qwen3": "eager flash"}
FROM_LAYER = {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3}


@pytest.fixture(scope="module", params=NUM_GROUPS)
def model(request, tmp_path_factory):
    """(folder, right outputs) of one architecture."""
    torch.set_num_threads(1)
    changes = FROM_LAYER if request.param.startswith("qwen") else {}
    folder = rigs.mix(tmp_path_factory.mktemp(request.param), request.param, sliding_window=WINDOW, **changes, seed=3)
    return folder, [greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]


def architecture(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


def generate(folder, *overrides, attention="flash", blocks=200, times=1, **plugins):
    """Outputs of the last of `times` runs, the engine, and the most blocks that a decoding row kept in one sliding group.

    `blocks`: in the pool, for each KV group.
    """
    base = ["compile.mode=none", "model.dtype=float32", "model.max_model_len=256", "num_threads=1", "draft_length=fixed"]
    base += ["debug.check_integrity=true", f"cache.num_blocks={blocks * NUM_GROUPS[architecture(folder)]}"]
    with LLM(str(folder), attention=attention, overrides=[*base, *overrides], **plugins) as llm:
        engine, kept = llm.engine, [0]
        assert isinstance(engine.blocks, GroupedBlockManager) and len(engine.blocks.needs) == NUM_GROUPS[architecture(folder)]
        width = len(engine.blocks.needs)
        sliding = [group for group, need in enumerate(engine.blocks.needs) if need.first_needed(WINDOW)]

        def look(_):
            for r in engine.scheduler._running:
                if r.num_computed > r.num_prefill + 1:
                    kept.extend(len(r.block_ids[g::width]) - r.block_ids[g::width].count(NO_BLOCK) for g in sliding)

        engine.on_step = look
        for _ in range(times):
            outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
        assert engine.blocks.num_free == engine.blocks.num_blocks
        return [o.outputs[0].token_ids for o in outs], engine, outs, max(kept)


def test_every_backend(model):
    folder, right = model
    for attention in BACKENDS[architecture(folder)].split():
        found, _, _, kept = generate(folder, "cache.block_size=4", attention=attention)
        assert found == right, attention
        assert kept == WINDOW // 4 + 1


@pytest.mark.parametrize(("budget", "is_async"), [(5, True), (64, False), (64, True)])
def test_chunk_budgets_and_small_blocks(model, budget, is_async):
    folder, right = model
    settings = f"scheduler.max_num_batched_tokens={budget}", f"scheduler.async_scheduling={is_async}", "cache.block_size=1"
    found, engine, _, kept = generate(folder, *settings, blocks=400)
    assert found == right
    assert WINDOW <= kept <= WINDOW + 1


def test_prefixes_that_outgrew_the_window_are_hit(model):
    folder, right = model
    found, engine, outs, _ = generate(folder, "cache.block_size=8", times=2, blocks=400)
    assert found == right
    assert [o.num_cached_tokens for o in outs] == [(len(p) - 1) // 8 * 8 for p in PROMPTS]
    found, engine, _, _ = generate(folder, "cache.enable_prefix_caching=false")
    assert found == right and engine.blocks.stats.hits == 0


@pytest.mark.parametrize(("is_async", "spec"), [(False, None), (False, "ngram"), (True, "ngram")])
def test_preemption(model, is_async, spec):
    folder, right = model
    settings = "cache.block_size=4", "scheduler.max_num_batched_tokens=48", f"scheduler.async_scheduling={is_async}"
    few = {"gemma2": 32, "gemma3_text": 26, "mistral": 24, "qwen2": 28, "qwen3": 28}[architecture(folder)]
    found, engine, outs, _ = generate(folder, *settings, "debug.preempt_every=11", blocks=few, spec=spec)
    assert found == right
    assert engine.scheduler.num_preemptions > 3
    if spec:
        assert sum(sum(o.outputs[0].timeline.accepted_counts) for o in outs) > 0


def test_windows_that_are_only_masked_give_the_same(model):
    folder, right = model
    base = ["compile.mode=none", "model.dtype=float32", "model.max_model_len=256", "cache.num_blocks=400", "num_threads=1"]
    with LLM(str(folder), attention="flash", overrides=[*base, "cache.free_behind_window=false"]) as llm:
        outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], GREEDY)
        assert [o.outputs[0].token_ids for o in outs] == right
        assert not isinstance(llm.engine.blocks, GroupedBlockManager)
