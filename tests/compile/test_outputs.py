"""Compiled, captured, padded or not: the same tokens, and padding that touches nothing."""

from dataclasses import replace

import pytest

from lab import LLM
from lab.compile.dispatch import GRAPH_MODES
from tests.compile.conftest import BASE, GREEDY, PROMPTS, generate


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
    with open_llm("compile.mode=none") as llm:
        right = generate(llm, prompts)[0]
    overrides = ["compile.cudagraph_mode=full_and_piecewise", "compile.pad=always", "compile.capture_sizes=[1,2,4,8]"]
    with open_llm(*overrides) as llm:
        graphs = llm.engine.compile_metrics["num_graphs"]
        for batch, padded in sizes.items():
            tokens, steps = generate(llm, prompts[:batch])
            assert tokens == right[:batch]
            assert {step["padded_to"] for step in steps} == {padded}
            assert {step["mode"] for step in steps} == {"none" if batch == 9 else "full"}
        long = [[5] * 3, [9]]
        _, steps = generate(llm, long)
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
            seen.append((record["num_requests"], record["padded_to"], [kv.clone() for kv in store.layers]))

        engine.on_step = watch
        llm.generate([{"prompt_token_ids": [i + 1]} for i in range(batch)], GREEDY)
        num_rows, padded_to, after = seen[0]
        assert (num_rows, padded_to) == (batch, padded)
        for kv, old in zip(after, before, strict=True):
            keys, old_keys = kv.flatten(1, 2)[0], old.flatten(1, 2)[0]
            changed = (keys != old_keys).flatten(1).any(1).nonzero().flatten()
            num_slots = 40 * 16
            real = changed[changed < num_slots]
            assert len(real) == batch  # one slot a row; the block after the pool is the plugin's own, for padding
            assert num_slots - 1 not in real.tolist()
            assert all(slot % 16 == 0 for slot in real.tolist())


def test_bfloat16_differs_only_at_a_near_tie(folder, cache):
    """The first token that differs from the eager model's, if any, is a tie within what rounding to bfloat16 moves there.

    How far it moves log-probabilities is measured at that very position, against the model in float32.
    """
    params = replace(GREEDY, logprobs=255)
    found = {}
    for mode in ("none", "piecewise"):
        overrides = [*BASE, "model.dtype=bfloat16", f"compile.mode={mode}", f"compile.cache_dir='{cache}'"]
        with LLM(str(folder), overrides=overrides) as llm:
            found[mode] = [out.outputs[0] for out in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params)]
            assert (llm.engine.compile_metrics["num_graphs"] > 0) == (mode == "piecewise")
    num_equal = 0
    with LLM(str(folder), overrides=[*BASE, "model.dtype=float32", "compile.mode=none"]) as exact:
        for prompt, eager, compiled in zip(PROMPTS, found["none"], found["piecewise"], strict=True):
            pairs = zip(eager.token_ids, compiled.token_ids, strict=True)
            index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if index is None:
                num_equal += 1
                continue
            prefix = {"prompt_token_ids": prompt + eager.token_ids[:index]}
            right = exact.generate(prefix, replace(params, max_tokens=1))[0].outputs[0].logprobs[0]
            rounded = eager.logprobs[index]
            moved = max(abs(rounded[token].logprob - right[token].logprob) for token in right)
            gap = rounded[eager.token_ids[index]].logprob - rounded[compiled.token_ids[index]].logprob
            assert gap <= 2 * moved
    assert num_equal > 0
