"""The context limit, history-dependent controls and preemption, over every way in which steps can be cut."""

import pytest

from lab import SamplingParams, UserError
from tests import rigs
from tests.engine.models import count_alpha, open_async_llm, open_llm
from tests.engine.test_async_llm import collect, run
from tests.engine.test_cases_stops import NGRAM
from tests.golden.oracle import greedy


@pytest.fixture(scope="module")
def count(tmp_path_factory):
    return count_alpha(tmp_path_factory.mktemp("count"))


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    return rigs.echo(tmp_path_factory.mktemp("echo"))


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"))


def prompt_of(ids):
    return {"prompt_token_ids": list(ids)}


REPEATING = [*range(10, 19), *range(10, 16)], [*range(20, 26), 20, 21]  # of 15 and 8 tokens: what comes stood there before
AT_THE_END = [25, 26, 27, 28, 29, 30, 19, 20]  # goes on to 25, 26, and then drafts are right that reach over 16 tokens


@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize("drafter", [[], NGRAM], ids=["no drafts", "ngram"])
def test_the_context_limit_is_exact(count, drafter, is_async):
    overrides = ["model.max_model_len=16", f"scheduler.async_scheduling={is_async}", *drafter]
    with open_llm(count, *overrides) as llm:
        fifteen, eight = REPEATING
        trials = [(fifteen, 5, 1), (eight, 9, 8), (eight, None, 8), (AT_THE_END, 9, 8), (AT_THE_END, None, 8)]
        for prompt, max_tokens, num_output in trials:
            before = llm.metrics()["draft_tokens"]
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            out = llm.generate(prompt_of(prompt), params)[0].outputs[0]
            assert out.token_ids == [(prompt[-1] + k) % 64 for k in range(1, num_output + 1)]
            assert out.finish_reason == "length"
            has_drafts = bool(drafter) and num_output > 1  # the one token that has room leaves none for a draft
            assert (llm.metrics()["draft_tokens"] > before) == has_drafts
        for num_prompt in (16, 17):
            with pytest.raises(UserError, match=f"the prompt has {num_prompt} tokens; the context limit is 16"):
                llm.generate(prompt_of(range(num_prompt)), SamplingParams(max_tokens=5))


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_drafts_never_pass_the_context_limit(count, is_async):
    overrides = ["model.max_model_len=32", f"scheduler.async_scheduling={is_async}", *NGRAM, "cache.block_size=1"]
    prompt = [*range(20), *range(10)]  # what comes next stood in the text before
    with open_llm(count, *overrides) as llm:
        for num_prompt in (26, 29, 30):
            out = llm.generate(prompt_of(prompt[-num_prompt:]), SamplingParams(temperature=0.0, max_tokens=50))[0].outputs[0]
            assert out.token_ids == list(range(10, 10 + 32 - num_prompt))
            assert out.finish_reason == "length"
        assert llm.metrics()["draft_tokens"] > 0
        assert llm.metrics()["kv"]["peak_used_blocks"] <= 32


HISTORY = [
    ({"frequency_penalty": 2.0, "max_tokens": 12}, [7, 7, 7, 7, 0, 0, 0, 0, 1, 1, 1, 1]),
    ({"presence_penalty": 9.0, "max_tokens": 12}, [7, 0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]),
    ({"repetition_penalty": 2.0, "logit_bias": {9: 5.0}, "max_tokens": 4}, [9, 9, 9, 9]),
]


@pytest.mark.parametrize("is_async", ["true", "false"])
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["scheduler.max_num_batched_tokens=1"],
        ["scheduler.max_num_batched_tokens=2"],
        ["debug.preempt_every=3"],
        NGRAM,
        [*NGRAM, "debug.preempt_every=3"],
    ],
    ids=["plain", "budget 1", "budget 2", "preempted", "ngram", "ngram and preempted"],
)
def test_penalties_see_the_whole_history(echo, overrides, is_async):
    with open_llm(echo, *overrides, f"scheduler.async_scheduling={is_async}") as llm:
        for values, right in HISTORY:
            out = llm.generate(prompt_of([7]), SamplingParams(temperature=0.0, **values))[0].outputs[0]
            assert out.token_ids == right
        # 9 counts as repeated: it is the first token of a prompt that small budgets cut into chunks
        repetition = SamplingParams(temperature=0.0, **HISTORY[2][0])
        assert llm.generate(prompt_of([9, 20, 21, 22, 7]), repetition)[0].outputs[0].token_ids == [7, 7, 7, 7]
        frequency, right = HISTORY[0]
        found = llm.generate([prompt_of([7, 7, 7])] * 2, SamplingParams(temperature=0.0, **frequency))
        assert [output.outputs[0].token_ids for output in found] == [right, right]
        metrics = llm.metrics()
        assert (metrics["preemptions"] > 0) == ("debug.preempt_every=3" in overrides)
        assert (metrics["draft_tokens"] > 0) == ("+spec=ngram" in overrides)


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_bad_words_see_the_whole_history(count, is_async):
    """'DE' is bad: after D, E gives way to the next likeliest, of equal ones the lowest id."""
    for drafter in ([], NGRAM):
        with open_llm(count, *drafter, f"scheduler.async_scheduling={is_async}") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=6, bad_words=["DE"])
            assert llm.generate("ABC", params)[0].outputs[0].text == "DABCDA"


PREEMPTED = [[(31 * i + 7 * k) % 256 for i in range(9 + k)] for k in range(6)]  # prompts of 9 to 14 tokens


@pytest.fixture(scope="module")
def solo(mix):
    """Each prompt's right output: transformers', and that of an engine that has it alone and room enough."""
    right = [greedy(mix, prompt, 40) for prompt in PREEMPTED]
    with open_llm(mix, "cache.block_size=4") as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40)
        for prompt, tokens in zip(PREEMPTED, right, strict=True):
            assert llm.generate(prompt_of(prompt), params)[0].outputs[0].token_ids == tokens
        assert llm.metrics()["preemptions"] == 0
    return right


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_preempted_requests_go_on_where_they_were(mix, solo, is_async):
    async def streams():
        overrides = ["cache.block_size=4", "cache.num_blocks=20", "scheduler.max_num_batched_tokens=8"]
        async with open_async_llm(mix, *overrides, f"scheduler.async_scheduling={is_async}") as llm:
            import asyncio

            params = SamplingParams(temperature=0.0, max_tokens=40)
            calls = [collect(llm, prompt_of(prompt), params, stream="delta") for prompt in PREEMPTED]
            return await asyncio.gather(*calls), await llm.metrics()

    found, metrics = run(streams())
    assert metrics["kv"]["used_blocks"] == 0
    assert (metrics["prompt_tokens"], metrics["output_tokens"]) == (69, 240)  # what is computed again is not counted again
    num_preemptions = []
    for prompt, right, deltas in zip(PREEMPTED, solo, found, strict=True):
        parts = [delta.outputs[0] for delta in deltas]
        assert sum((part.token_ids for part in parts), []) == right  # nothing twice, nothing lost, in order
        assert deltas[-1].prompt_token_ids == prompt
        timeline = deltas[-1].metrics
        assert timeline.num_tokens == 40
        assert timeline.token_times_s == sorted(timeline.token_times_s)
        assert timeline.scheduled_s < timeline.token_times_s[0]
        num_preemptions.append(parts[-1].num_preemptions)
    assert sum(count >= 2 for count in num_preemptions) >= 3, num_preemptions
    assert sum(num_preemptions) == metrics["preemptions"]
