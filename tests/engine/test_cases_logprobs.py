"""Log-probabilities of prompts and outputs: under every chunk budget, with the prefix cache, with drafts."""

import pytest

from lab import SamplingParams
from tests import rigs
from tests.engine.models import count_alpha, open_llm
from tests.engine.test_cases_stops import DRAFTERS, REPEATS

NEXT, OTHER = pytest.approx(rigs.COUNT_LOGPROB_NEXT, abs=1e-4), pytest.approx(rigs.COUNT_LOGPROB_OTHER, abs=1e-4)


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    return count_alpha(tmp_path_factory.mktemp("count"))


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"))


@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize("budget", range(1, 9))
def test_prompt_logprobs_are_the_same_for_every_chunk_budget(count, budget, is_async):
    prompt = [3, 4, 5, 9, 10, 11, 12]
    asking = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    plain = SamplingParams(temperature=0.0, max_tokens=30)
    overrides = [f"scheduler.max_num_batched_tokens={budget}", f"scheduler.async_scheduling={is_async}"]
    with open_llm(count, *overrides) as llm:
        alone = llm.generate({"prompt_token_ids": prompt}, asking)[0]
        prompts = [{"prompt_token_ids": [i]} for i in range(3)] + [{"prompt_token_ids": prompt}]
        beside = llm.generate(prompts, [plain] * 3 + [asking])[3]
    for output in (alone, beside):
        found = output.prompt_logprobs
        assert len(found) == 7 and found[0] is None
        chosen = [position[token] for position, token in zip(found[1:], prompt[1:], strict=True)]
        assert [entry.logprob for entry in chosen] == [NEXT, NEXT, OTHER, NEXT, NEXT, NEXT]
        assert [entry.rank for entry in chosen[:2] + chosen[3:]] == [1] * 5
        assert 2 <= chosen[2].rank <= 64
        assert found[3][6].rank == 1 and found[3][6].logprob == NEXT  # the likeliest after 5 stands beside the chosen one
        assert output.outputs[0].token_ids == [13, 14, 15, 16]


def test_prompt_logprobs_survive_forced_preemption(count):
    prompt = [3, 4, 5, 9, 10, 11, 12]
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0, logprobs=0)
    with open_llm(count, "debug.preempt_every=2", "scheduler.max_num_batched_tokens=3") as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, params)
        assert llm.metrics()["preemptions"] > 0
    for output in outputs:
        assert len(output.prompt_logprobs) == 7
        assert [next(iter(position)) for position in output.prompt_logprobs[1:]] == prompt[1:]
        assert [next(iter(position)) for position in output.outputs[0].logprobs] == list(range(13, 25))


@pytest.mark.parametrize("count_asked", [0, 5])
def test_prompt_logprobs_do_not_suffer_from_a_warm_prefix_cache(mix, count_asked):
    prompt = {"prompt_token_ids": [(7 * i) % 256 for i in range(39)]}
    asking = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=count_asked)
    with open_llm(mix) as llm:
        cold = llm.generate(prompt, asking)[0]
    with open_llm(mix) as llm:
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2))
        assert llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2))[0].num_cached_tokens == 32
        warm = llm.generate(prompt, asking)[0]
    with open_llm(mix) as llm:
        llm.generate(prompt, asking)
        filled = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2))[0].num_cached_tokens
    assert (cold.num_cached_tokens, warm.num_cached_tokens, filled) == (0, 0, 32)
    assert len(warm.prompt_logprobs) == 39 and warm.prompt_logprobs[0] is None
    for cold_position, warm_position in zip(cold.prompt_logprobs[1:], warm.prompt_logprobs[1:], strict=True):
        assert list(cold_position) == list(warm_position)
        assert len(warm_position) in (max(count_asked, 1), count_asked + 1)
        for token, entry in cold_position.items():
            assert warm_position[token].logprob == pytest.approx(entry.logprob, abs=1e-5)
            assert warm_position[token].rank == entry.rank


@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_logprobs_are_the_targets_one_for_each_token(count, drafter, is_async):
    with open_llm(count, *drafter, f"scheduler.async_scheduling={is_async}") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2)
        out = llm.generate(REPEATS, params)[0].outputs[0]
        assert (llm.metrics()["accepted_tokens"] > 0) == bool(drafter)
    assert out.text == "DEFGHIJKLM"
    assert len(out.logprobs) == 10
    for token, position in zip(out.token_ids, out.logprobs, strict=True):
        first, second = sorted(position.values(), key=lambda entry: entry.rank)
        assert position[token] is first
        assert (first.rank, first.logprob, second.rank, second.logprob) == (1, NEXT, 2, OTHER)
    assert out.cumulative_logprob == pytest.approx(10 * rigs.COUNT_LOGPROB_NEXT, abs=1e-3)


def test_logprobs_of_prompt_and_output_are_one_sequence(count):
    """No token is missing or twice where the prompt ends and the output begins."""
    with open_llm(count) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1, prompt_logprobs=1)
        output = llm.generate("ABC", params)[0]
    sample = output.outputs[0]
    assert output.prompt_logprobs[0] is None
    tokens = output.prompt_token_ids + sample.token_ids
    entries = [None] + [
        position[token] for position, token in zip(output.prompt_logprobs[1:] + sample.logprobs, tokens[1:], strict=True)
    ]
    assert output.prompt + sample.text == "ABCDEF"
    assert [entry.decoded_token for entry in entries[1:]] == list("BCDEF")
    assert [entry and entry.logprob for entry in entries] == [None] + [NEXT] * 5
