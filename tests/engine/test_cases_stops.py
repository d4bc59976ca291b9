"""Ends of requests on COUNT, where 'ABC' goes on 'DEFG...': stop strings, stop tokens, min_tokens, with drafts and without."""

import pytest

from lab import SamplingParams
from tests.engine.models import count_alpha, open_async_llm, open_llm
from tests.engine.test_async_llm import collect, run

D, E, F = 3, 4, 5
REPEATS = "ABCDEFGHABC"  # what follows the last ABC stood in the text before: the drafts are right
NGRAM = ["+spec=ngram", "spec.min_n=2", "spec.max_n=3", "spec.num_drafts=5"]
DRAFTERS = {"no drafts": [], "ngram": NGRAM, "suffix": ["+spec=suffix", "spec.num_drafts=5"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return count_alpha(tmp_path_factory.mktemp("count"))


@pytest.fixture(scope="module", params=[*DRAFTERS, "ngram, no overlap"])
def llm(request, folder):
    name, _, synchronous = request.param.partition(", ")
    overrides = [*DRAFTERS[name], *(["scheduler.async_scheduling=false"] if synchronous else [])]
    with open_llm(folder, *overrides) as llm:
        yield llm


def finish(llm, prompt, **values):
    """The one sample of a greedy request; with a drafter, drafts were accepted on the way."""
    before = llm.metrics()["accepted_tokens"]
    out = llm.generate(prompt, SamplingParams(temperature=0.0, **values))[0].outputs[0]
    if llm.settings.spec.name != "none" and prompt == REPEATS:
        assert llm.metrics()["accepted_tokens"] > before
    assert llm.metrics()["kv"]["used_blocks"] == 0
    return out


SPANNING = [
    ({"stop": "FGH", "max_tokens": 10}, "DE", "stop", 5),
    ({"stop": "FGH", "max_tokens": 10, "include_stop_str_in_output": True}, "DEFGH", "stop", 5),
    ({"stop": "FGX", "max_tokens": 6}, "DEFGHI", "length", 6),
    ({"stop": "DE", "max_tokens": 10}, "", "stop", 2),
    ({"stop": "C", "max_tokens": 10}, "DEFGHIJKLM", "length", 10),
    ({"stop": "F", "min_tokens": 2, "max_tokens": 8}, "DE", "stop", 3),
    ({"stop": "F", "min_tokens": 4, "max_tokens": 8}, "DEFGHIJK", "length", 8),
]


@pytest.mark.parametrize("prompt", ["ABC", REPEATS])
@pytest.mark.parametrize(("values", "text", "reason", "num_tokens"), SPANNING)
def test_stop_strings_that_span_tokens(llm, prompt, values, text, reason, num_tokens):
    out = finish(llm, prompt, **values)
    assert (out.text, out.finish_reason, len(out.token_ids)) == (text, reason, num_tokens)
    assert out.stop_reason == (values["stop"] if reason == "stop" else None)


@pytest.mark.parametrize("overrides", [[], NGRAM], ids=["no drafts", "ngram"])
def test_no_delta_of_a_stream_shows_a_part_of_a_stop_string(folder, overrides):
    async def streams():
        async with open_async_llm(folder, *overrides) as llm:
            for prompt in ("ABC", REPEATS):
                for values, text, _, _ in SPANNING:
                    params = SamplingParams(temperature=0.0, **values)
                    outputs = await collect(llm, prompt, params, stream="delta")
                    parts = [output.outputs[0].text for output in outputs]
                    assert "".join(parts) == text
                    if values["stop"] == "FGH" and text == "DE":
                        assert not any("F" in part for part in parts)
            assert ((await llm.metrics())["accepted_tokens"] > 0) == bool(overrides)

    run(streams())


def test_a_stop_string_in_the_middle_of_a_steps_tokens(llm):
    out = finish(llm, REPEATS, stop="EF", logprobs=1, max_tokens=20)
    assert (out.text, out.token_ids, len(out.logprobs)) == ("D", [D, E, F], 3)
    assert (out.finish_reason, out.stop_reason) == ("stop", "EF")


def test_a_stop_token_in_the_middle_of_a_steps_tokens(llm):
    out = finish(llm, REPEATS, stop_token_ids=[F], logprobs=1, max_tokens=20)
    assert (out.text, out.token_ids, len(out.logprobs)) == ("DE", [D, E, F], 3)
    assert (out.finish_reason, out.stop_reason) == ("stop", F)


def test_the_length_limit_in_the_middle_of_a_steps_tokens(llm):
    out = llm.generate(REPEATS, SamplingParams(temperature=0.0, logprobs=1, max_tokens=2))[0].outputs[0]
    assert (out.text, out.token_ids, len(out.logprobs), out.finish_reason) == ("DE", [D, E], 2, "length")


def test_a_stop_token_before_min_tokens_is_not_chosen(llm):
    out = finish(llm, "ABC", stop_token_ids=[F], min_tokens=4, max_tokens=8)
    assert len(out.token_ids) == 8 and F not in out.token_ids[:4]


def test_eos_ends_the_request_and_is_not_shown_unless_it_is_ignored(tmp_path):
    from tests import rigs

    rigs.alpha_tokenizer(tmp_path)
    with open_llm(rigs.count(tmp_path, eos_token_id=F)) as llm:
        out = llm.generate("ABC", SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]
        assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("DE", [D, E, F], "stop", None)
        out = llm.generate("ABC", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0].outputs[0]
        assert (out.text, out.finish_reason) == ("DEFGHIJK", "length")
