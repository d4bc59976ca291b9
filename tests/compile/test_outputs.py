"""Compiled, captured, padded or not: the same tokens, and padding that touches nothing."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from lab import LLM
from lab.compile.dispatch import GRAPH_MODES
from tests import rigs
from tests.compile.conftest import BASE, GREEDY, PROMPTS, generate
from tests.compile.near_ties import count_near_ties, spacing
from tests.golden.prompts import TEXTS


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("pad", ["never", "always"])
@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_float32_tokens_are_those_of_the_eager_model(open_llm, eager_tokens, mode, pad, async_scheduling):
    overrides = [f"compile.cudagraph_mode={mode}", f"compile.pad={pad}", f"scheduler.async_scheduling={async_scheduling}"]
    with open_llm(*overrides, "scheduler.max_num_batched_tokens=64") as llm:
        tokens, steps = generate(llm)
        assert llm.engine.compile_metrics["recompiles_after_warmup"] == 0
    assert tokens == eager_tokens
    assert {step["mode"] for step in steps} == set(GRAPH_MODES[mode])
    if pad == "always" and mode != "none":
        assert any(step["padded_to"] > step["num_tokens"] for step in steps)
    else:
        assert all(step["padded_to"] == step["num_tokens"] for step in steps)


@pytest.mark.parametrize("sizes", [[1], [3, 7, 50], [1, 2, 4, 8, 16, 32, 64, 128, 256]])
def test_capture_sizes_change_no_token(open_llm, eager_tokens, sizes):
    with open_llm("compile.pad=always", f"compile.capture_sizes={sizes}") as llm:
        tokens, steps = generate(llm)
    assert tokens == eager_tokens
    for step in steps:
        fitting = [size for size in sizes if size >= step["num_tokens"]]
        if step["mode"] == "none":
            assert step["padded_to"] == step["num_tokens"] and not fitting
        else:
            assert step["padded_to"] == min(fitting)
    assert any(step["mode"] == "piecewise" for step in steps) == (max(sizes) > 1)


def test_each_batch_size_runs_on_the_next_captured_one(open_llm):
    """Batches of 1, 2, 3, 5, 8 and 9 decodes over sizes 1, 2, 4, 8, against the eager model; then a mixed step."""
    sizes = {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 9}
    prompts = [[7 * i + 1] for i in range(9)]
    mixed = [[5] * 3, [9]]
    with open_llm("compile.mode=none") as llm:
        right, right_of_mixed = generate(llm, prompts)[0], generate(llm, mixed)[0]
    overrides = ["compile.cudagraph_mode=full_and_piecewise", "compile.pad=always", "compile.capture_sizes=[1,2,4,8]"]
    with open_llm(*overrides) as llm:
        graphs = llm.engine.compile_metrics["num_graphs"]
        for batch, padded in sizes.items():
            tokens, steps = generate(llm, prompts[:batch])
            assert tokens == right[:batch]
            assert {step["padded_to"] for step in steps} == {padded}
            assert {step["mode"] for step in steps} == {"none" if batch == 9 else "full"}
        tokens, steps = generate(llm, mixed)
        assert tokens == right_of_mixed
        assert (steps[0]["mode"], steps[0]["num_tokens"], steps[0]["padded_to"]) == ("piecewise", 4, 4)
        assert llm.engine.compile_metrics["num_graphs"] == graphs
        assert llm.engine.compile_metrics["recompiles_after_warmup"] == 0


@pytest.mark.parametrize(("batch", "padded"), [(3, 4), (5, 8)])
def test_padding_writes_to_no_slot(open_llm, batch, padded):
    """A pool full of a sentinel; a step of 8 first, so that stale slots would show; then fewer rows, padded."""
    overrides = ["compile.pad=always", "compile.capture_sizes=[4,8]", "cache.enable_prefix_caching=false"]
    with open_llm(*overrides, "scheduler.async_scheduling=false", "cache.num_blocks=40") as llm:
        generate(llm, [[i + 1] for i in range(8)])
        engine = llm.engine
        store = engine._executor._runner.store
        for kv in store.layers:
            kv.fill_(-77.0)
        before = [kv.clone() for kv in store.layers]
        seen = []

        def watch(record):
            rows = [request.block_ids[0] for request in engine.scheduler._running]
            seen.append((record["num_requests"], record["padded_to"], rows, [kv.clone() for kv in store.layers]))

        engine.on_step = watch
        llm.generate([{"prompt_token_ids": [i + 1]} for i in range(batch)], GREEDY)
        num_rows, padded_to, blocks, after = seen[0]
        assert (num_rows, padded_to) == (batch, padded)
        assert len(set(blocks)) == batch and 39 not in blocks  # so that the last slot of the pool is nobody's
        for kv, old in zip(after, before, strict=True):
            changed_2S = (kv != old).flatten(1, 2).flatten(2).any(2)[:, : 40 * 16]  # behind the pool is what padding may write
            for changed_S in changed_2S:  # keys, values
                assert changed_S.nonzero().flatten().tolist() == sorted(block * 16 for block in blocks)


def test_models_of_other_shapes_compile_in_one_process(tmp_path):
    """Each captured anew: that a number differs from that of a model before does not make it an argument."""
    shapes = ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 3e-4, "num_attention_heads": 8, "rope_theta": 777.0})
    for number, shape in enumerate(shapes):
        folder = rigs.mix(tmp_path / str(number), **shape)
        found = []
        for mode in ("none", "piecewise"):
            overrides = [*BASE, "model.dtype=float32", f"compile.mode={mode}", f"compile.cache_dir='{tmp_path}'"]
            with LLM(str(folder), overrides=overrides) as llm:
                found.append(generate(llm)[0])
                assert (llm.engine.compile_metrics["num_graphs"] > 0) == (mode == "piecewise")
        assert found[0] == found[1]


BFLOAT16 = [*BASE, "model.dtype=bfloat16"]
VARIANTS = [  # each against the eager model, by what it changes
    [f"compile.cudagraph_mode={mode}", f"compile.pad={pad}", f"scheduler.async_scheduling={is_async}"]
    for mode, pad, is_async in (
        ("none", "never", "true"),
        ("piecewise", "always", "false"),
        ("full", "never", "false"),
        ("full_decode_only", "always", "true"),
        ("full_and_piecewise", "always", "true"),
    )
] + [["compile.pad=always", "compile.capture_sizes=[3,7,50]"]]


@pytest.fixture(scope="module")
def in_bfloat16(folder):
    """The eager model in bfloat16, open, and its outputs with all log-probabilities."""
    with LLM(str(folder), overrides=[*BFLOAT16, "compile.mode=none", "scheduler.async_scheduling=false"]) as llm:
        outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], replace(GREEDY, logprobs=255))
        yield llm, [out.outputs[0] for out in outs]


@pytest.mark.parametrize("overrides", VARIANTS, ids=" ".join)
def test_bfloat16_tokens_part_from_the_eager_models_only_at_a_near_tie(folder, cache, in_bfloat16, overrides):
    eager_llm, eager = in_bfloat16
    with LLM(str(folder), overrides=[*BFLOAT16, f"compile.cache_dir='{cache}'", *overrides]) as llm:
        found, steps = generate(llm)
        assert llm.engine.compile_metrics["num_graphs"] > 0
    assert any(step["padded_to"] > step["num_tokens"] for step in steps) == ("compile.pad=always" in overrides)
    assert count_near_ties(eager_llm, PROMPTS, eager, found) < len(PROMPTS)


@pytest.mark.slow
def test_bfloat16_tokens_of_the_real_model_part_only_at_a_near_tie():
    tokenizer = AutoTokenizer.from_pretrained(rigs.smollm2())
    prompts = [tokenizer.encode(text) for text in TEXTS]
    base = ["model.dtype=bfloat16", "model.max_model_len=256", "cache.num_blocks=200"]
    with (
        LLM("smollm2", overrides=[*base, "compile.mode=none"]) as eager_llm,
        LLM("smollm2", overrides=[*base, "compile.mode=piecewise"]) as llm,
    ):
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        eager = [out.outputs[0] for out in eager_llm.generate(given, replace(GREEDY, logprobs=200))]
        found, _ = generate(llm, prompts)
        assert llm.engine.compile_metrics["num_graphs"] > 0
        assert count_near_ties(eager_llm, prompts, eager, found) < len(prompts) / 2


class TestTheRule:
    @pytest.mark.parametrize("logit", [1.0, 1.5, 3.7, -20.0, 0.01])
    def test_the_spacing_is_that_of_bfloat16(self, logit):
        number = torch.tensor(abs(logit)).bfloat16()
        above = (number.view(torch.int16) + 1).view(torch.bfloat16)
        assert spacing(logit) == float(above) - float(number)

    def test_another_token_is_seen_unless_it_is_a_tie(self, in_bfloat16):
        llm, eager = in_bfloat16
        right = [list(output.token_ids) for output in eager]
        assert count_near_ties(llm, PROMPTS, eager, right) == 0
        second = sorted(eager[2].logprobs[5], key=lambda token: -eager[2].logprobs[5][token].logprob)[1]
        wrong = [list(ids) for ids in right]
        wrong[2][5] = second
        with pytest.raises(AssertionError, match=f"token 5 of prompt .* and {second} are"):
            count_near_ties(llm, PROMPTS, eager, wrong)
        entries = eager[2].logprobs[5]
        tie = replace(entries[second], logprob=entries[right[2][5]].logprob - 1e-6)
        tied = replace(eager[2], logprobs=[*eager[2].logprobs[:5], {**entries, second: tie}, *eager[2].logprobs[6:]])
        assert count_near_ties(llm, PROMPTS, [*eager[:2], tied, *eager[3:]], wrong) == 1
