"""Greedy outputs of every architecture are transformers' own, token for token, under every setting of the engine."""

import pytest
import torch

from lab import LLM, SamplingParams
from plugins.attention.flash.cpu import CpuKernels
from tests import draft_heads, rigs
from tests.golden.oracle import greedy
from tests.golden.prompts import token_prompts

NUM_TOKENS = 24
PROMPTS = token_prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=rigs.ARCHITECTURES)
def model(request, tmp_path_factory):
    """(folder, right outputs) of one architecture."""
    torch.set_num_threads(1)  # tiny matrices: a second thread would only wait
    folder = rigs.mix(tmp_path_factory.mktemp(request.param), request.param)
    return folder, [greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]


def generate(folder, *overrides, attention="eager", spec=None, prompts=PROMPTS, times=1):
    """Outputs of the last of `times` runs, and the LLM's final counters."""
    base = [
        "compile.mode=none",
        "model.dtype=float32",
        "model.max_model_len=256",
        "cache.num_blocks=400",
        "debug.check_integrity=true",
        "num_threads=1",
        "draft_length=fixed",  # with a proposer, drafts are verified whether they pay or not
    ]
    with LLM(str(folder), attention=attention, spec=spec, overrides=[*base, *overrides]) as llm:
        for _ in range(times):
            outs = llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
        engine = llm.engine
        assert engine.blocks.num_free == engine.blocks.num_blocks
        return [o.outputs[0].token_ids for o in outs], engine, outs


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_all_at_once(model, attention, async_scheduling):
    folder, right = model
    found, engine, _ = generate(folder, f"scheduler.async_scheduling={async_scheduling}", attention=attention)
    assert found == right
    assert engine.blocks.stats.hits > 0


def test_one_at_a_time(model):
    folder, right = model
    found = [generate(folder, prompts=[prompt])[0][0] for prompt in PROMPTS[::5]]
    assert found == right[::5]


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_chunk_budgets(model, budget, async_scheduling):
    folder, right = model
    every = 4 if budget == 1 else 1  # thousands of steps
    found, _, _ = generate(
        folder,
        f"scheduler.max_num_batched_tokens={budget}",
        f"scheduler.async_scheduling={async_scheduling}",
        attention="sdpa",
        prompts=PROMPTS[::every],
    )
    assert found == right[::every]


@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_block_sizes(model, block_size):
    folder, right = model
    num_blocks = 6400 // block_size
    found, _, _ = generate(folder, f"cache.block_size={block_size}", f"cache.num_blocks={num_blocks}", attention="sdpa")
    assert found == right


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash"])
def test_prefix_cache_off_and_warm(model, attention):
    folder, right = model
    found, engine, outs = generate(folder, "cache.enable_prefix_caching=false", attention=attention)
    assert found == right
    assert engine.blocks.stats.hits == 0
    found, engine, outs = generate(folder, attention=attention, times=2)
    assert found == right
    assert [o.num_cached_tokens for o in outs] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]


@pytest.mark.parametrize("spec", [None, "ngram"])
def test_cascade(model, spec, monkeypatch):
    """Whatever rows share is attended to once, in prefills, decodes and verified drafts."""
    folder, right = model
    spared = []

    def watched(self, batch, reuse=None, plan=CpuKernels.plan):
        found = plan(self, batch, reuse)
        spared.append(int(batch.ctx_len_R_cpu.sum()) * self.num_kv_heads - torch.ops.lab_flash.keys_read(found.work))
        return found

    monkeypatch.setattr(CpuKernels, "plan", watched)
    found, _, _ = generate(folder, "attention.cascade=1", attention="flash", spec=spec, times=2)
    assert found == right
    assert sum(keys > 0 for keys in spared) > len(spared) // 2


@pytest.mark.parametrize("spec", [None, "ngram"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preemption(model, async_scheduling, spec):
    folder, right = model
    found, engine, outs = generate(
        folder,
        "cache.num_blocks=60",
        "cache.block_size=4",
        "scheduler.max_num_batched_tokens=96",
        f"scheduler.async_scheduling={async_scheduling}",
        attention="sdpa",
        spec=spec,
    )
    assert found == right
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash"])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("budget", [7, 512])
def test_ngram_drafts(model, attention, async_scheduling, budget):
    folder, right = model
    found, _, outs = generate(
        folder,
        f"scheduler.async_scheduling={async_scheduling}",
        f"scheduler.max_num_batched_tokens={budget}",
        attention=attention,
        spec="ngram",
    )
    assert found == right
    assert sum(sum(o.outputs[0].timeline.accepted_counts) for o in outs) > 0


def test_static_batching_and_priority(model):
    folder, right = model
    found, _, _ = generate(folder, "scheduler.batching=static", "scheduler.max_num_seqs=7", attention="sdpa")
    assert found == right
    found, _, _ = generate(folder, "scheduler.policy=priority", "debug.preempt_every=5", attention="sdpa")
    assert found == right


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduler.max_num_batched_tokens=7", "scheduler.async_scheduling=false"],
        ["cache.num_blocks=60", "cache.block_size=4", "scheduler.max_num_batched_tokens=96"],
        ["debug.preempt_every=5"],
    ],
    ids=["chunks-sync", "small-pool", "forced-preemption"],
)
def test_eagle_drafts(model, tmp_path, overrides):
    """By a head of random weights, most drafts of which are rejected; the second run is over cached prefixes."""
    folder, right = model
    head = draft_heads.random(tmp_path / "head", folder, "eagle3", draft_vocab=90)
    settings = [f"spec.head={head}", "spec.num_drafts=3", "draft_length=fixed", *overrides]
    found, engine, outs = generate(folder, *settings, attention="sdpa", spec="eagle", prompts=PROMPTS[::3], times=2)
    assert found == right[::3]
    is_small = "cache.num_blocks" in str(overrides)  # by the second run nothing of the first is left in it
    assert engine.blocks.stats.hits > 0 or is_small
    assert engine.scheduler.num_preemptions > 0 or not (is_small or "preempt" in str(overrides))
