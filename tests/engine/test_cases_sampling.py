"""Seeds and samples: a request's draws are its own, whatever runs beside it."""

import math

import pytest
from safetensors.torch import load_file, save_file

from lab import SamplingParams
from tests import rigs
from tests.engine.models import open_async_llm, open_llm
from tests.engine.test_async_llm import collect, run

PROMPT = {"prompt_token_ids": [10, 20, 30, 40, 50]}
OTHER = {"prompt_token_ids": [9, 8, 7, 6, 5, 4, 3, 2, 1]}
SEEDED = SamplingParams(temperature=0.8, seed=42, max_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"))


def unseeded(max_tokens=16):
    return SamplingParams(temperature=0.8, max_tokens=max_tokens)


@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize(
    "drafter",
    [[], ["+spec=ngram", "spec.min_n=1"], ["+spec=suffix", "spec.min_match=1", "spec.min_share=0"]],
    ids=["no drafts", "ngram", "suffix"],
)
def test_a_seeded_request_draws_the_same_whatever_runs_beside_it(folder, is_async, drafter):
    batches = {
        "beside an unseeded one": ([PROMPT, OTHER], [SEEDED, unseeded()], 0),
        "beside another seed": ([PROMPT, PROMPT], [SEEDED, SamplingParams(temperature=0.8, seed=7, max_tokens=16)], 0),
        "first of four": ([PROMPT, OTHER, OTHER, OTHER], [SEEDED, unseeded(), unseeded(), unseeded()], 0),
        "third of four": ([OTHER, OTHER, PROMPT, OTHER], [unseeded(), unseeded(), SEEDED, unseeded()], 2),
        "beside some that end": ([OTHER, PROMPT, OTHER], [unseeded(2), SEEDED, unseeded(5)], 1),
    }
    overrides = [f"scheduler.async_scheduling={is_async}", *drafter]
    with open_llm(folder, *overrides) as llm:
        alone = llm.generate(PROMPT, SEEDED)[0].outputs[0].token_ids
        for name, (prompts, params, index) in batches.items():
            assert llm.generate(prompts, params)[index].outputs[0].token_ids == alone, name
        assert (llm.metrics()["draft_tokens"] > 0) == bool(drafter)
    with open_llm(folder, *overrides, "debug.preempt_every=3") as llm:
        outputs = llm.generate([OTHER, PROMPT, OTHER], [unseeded(), SEEDED, unseeded()])
        assert outputs[1].outputs[0].token_ids == alone
        assert llm.metrics()["preemptions"] > 0


def test_unseeded_requests_differ_and_a_new_run_repeats_them(folder):
    def two():
        with open_llm(folder) as llm:
            params = SamplingParams(temperature=0.8, max_tokens=16, logprobs=20)
            return [llm.generate(PROMPT, params)[0].outputs[0] for _ in range(2)]

    first, second = two()
    for position in first.logprobs:  # there is something to choose from
        assert -sum(math.exp(entry.logprob) * entry.logprob for entry in position.values()) > 0.5
    assert first.token_ids != second.token_ids
    assert [out.token_ids for out in two()] == [first.token_ids, second.token_ids]


def test_several_samples_differ_and_repeat(folder):
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12)

    async def stream():
        async with open_async_llm(folder) as llm:
            return await collect(llm, PROMPT, params, stream="delta")

    with open_llm(folder) as llm:
        outputs = [llm.generate(PROMPT, params)[0] for _ in range(2)]
        metrics = llm.metrics()
    deltas = run(stream())

    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (10, 96)  # of two runs
    for output in outputs:
        assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
        assert {sample.finish_reason for sample in output.outputs} == {"length"}
        assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    right = [sample.token_ids for sample in outputs[0].outputs]
    assert [sample.token_ids for sample in outputs[1].outputs] == right

    parts = [part for delta in deltas for part in delta.outputs]
    streamed = [sum((part.token_ids for part in parts if part.index == i), []) for i in range(4)]
    assert streamed == right
    assert sorted(part.index for part in parts if part.finish_reason) == [0, 1, 2, 3]


def test_samples_share_the_blocks_of_their_prompt(folder):
    prompt = {"prompt_token_ids": [(5 * i) % 256 for i in range(48)]}
    with open_llm(folder, "cache.block_size=16") as llm:
        llm.generate(prompt, SamplingParams(n=8, seed=1, max_tokens=4))
        assert llm.metrics()["kv"]["peak_used_blocks"] <= 2 + 8 * 2  # two full blocks once, and each its own end


@pytest.fixture(scope="module")
def steep(tmp_path_factory):
    """16 tokens with logits so large that, over a tiny temperature, float16 has no number for them."""
    folder = rigs.mix(tmp_path_factory.mktemp("steep"), vocab_size=16)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_tiny_temperatures_are_greedy_in_every_dtype_and_poison_no_neighbour(steep, dtype):
    prompt = {"prompt_token_ids": [7, 8, 9]}
    cold = (1e-4, 1e-6, 1e-40, 0.0)

    def batch(llm, temperatures):
        """One row of each temperature, one that may choose between two tokens only, and four at temperature 1."""
        rows = [{"temperature": t, "seed": i} for i, t in enumerate(temperatures)]
        rows.append({"temperature": 0.0, "allowed_token_ids": [3, 4]})
        rows += [{"temperature": 1.0, "seed": 10 + i} for i in range(4)]
        params = [SamplingParams(max_tokens=6, logprobs=16, **row) for row in rows]
        return [output.outputs[0] for output in llm.generate([prompt] * len(params), params)]

    with open_llm(steep, f"model.dtype={dtype}") as llm:
        found, beside_warm = batch(llm, cold), batch(llm, [1.0] * len(cold))
    for sample in found:
        assert (len(sample.token_ids), len(sample.logprobs), sample.finish_reason) == (6, 6, "length")
        for position in sample.logprobs:
            assert len(position) == 16 and all(math.isfinite(entry.logprob) for entry in position.values())
            total = math.fsum(math.exp(entry.logprob) for entry in position.values())
            assert total == pytest.approx(1.0, abs=1e-5)  # as float32 has it
    for sample in found[: len(cold)]:
        for token, position in zip(sample.token_ids, sample.logprobs, strict=True):
            assert position[token].logprob == max(entry.logprob for entry in position.values())
    allowed, *warm = found[len(cold) :]
    for token, position in zip(allowed.token_ids, allowed.logprobs, strict=True):
        assert token == max((3, 4), key=lambda i: position[i].logprob)
    assert [sample.token_ids for sample in warm] == [sample.token_ids for sample in beside_warm[len(cold) + 1 :]]
    assert len({tuple(sample.token_ids) for sample in warm}) > 1  # a choice there was
