"""From updates to outputs: text, stop strings, logprobs, samples, deltas, ends. The updates are written by hand."""

import random

import pytest

from lab.bench.records import request_lines
from lab.engine.tokenizer import load_tokenizer
from lab.errors import UserError
from lab.metrics.summary import RequestTotals
from lab.sampling_params import SamplingParams
from lab.types import FinishReason, TokenLogprobs, Update
from tests import rigs
from tests.engine import toy_tokenizers
from tests.engine.scripted import Rig, ScriptedEngine

A, B, C, D, E, F, G, H, I, J, K = range(11)


@pytest.fixture(scope="module")
def alpha(tmp_path_factory):
    return load_tokenizer(rigs.alpha_tokenizer(tmp_path_factory.mktemp("alpha")))


@pytest.fixture
def rig(alpha):
    return Rig(alpha)


def run(rig, generation, steps, reason=FinishReason.LENGTH):
    """Feed steps of token ids, the last of which ends by `reason`. Returns the deltas."""
    deltas = []
    for i, token_ids in enumerate(steps):
        request_id = generation.open_ids[0] if generation.open_ids else generation.id
        last = i == len(steps) - 1
        rig.outputs.process([Update(request_id, token_ids, finish_reason=reason if last else None)])
        delta = generation.delta()
        if delta is not None:
            deltas.append(delta)
    return deltas


def only(generation):
    return generation.output().outputs[0]


def test_text_grows_with_the_tokens_and_ends_with_a_reason(rig):
    generation = rig.submit("ABC")
    deltas = run(rig, generation, [[D], [E], [F]])
    assert [d.outputs[0].text for d in deltas] == ["D", "E", "F"]
    assert [d.outputs[0].finish_reason for d in deltas] == [None, None, "length"]
    assert [d.finished for d in deltas] == [False, False, True]
    out = generation.output()
    assert (out.request_id, out.prompt, out.prompt_token_ids) == ("0", "ABC", [A, B, C])
    assert (only(generation).text, only(generation).token_ids) == ("DEF", [D, E, F])
    assert rig.outputs.active == []


STOPS = [
    # params, text, finish_reason, stop_reason, token ids, of the continuation D E F G ... of up to 10 tokens
    ({"stop": "FGH"}, "DE", "stop", "FGH", [D, E, F, G, H]),
    ({"stop": "FGH", "include_stop_str_in_output": True}, "DEFGH", "stop", "FGH", [D, E, F, G, H]),
    ({"stop": "FGX", "max_tokens": 6}, "DEFGHI", "length", None, [D, E, F, G, H, I]),
    ({"stop": "DE"}, "", "stop", "DE", [D, E]),
    ({"stop": "C", "max_tokens": 4}, "DEFG", "length", None, [D, E, F, G]),
    ({"stop": ["GH", "FGH"]}, "DE", "stop", "FGH", [D, E, F, G, H]),
    ({"stop": ["FGH", "EF"]}, "D", "stop", "EF", [D, E, F]),
    ({"stop": "F", "min_tokens": 2, "max_tokens": 8}, "DE", "stop", "F", [D, E, F]),
    ({"stop": "F", "min_tokens": 3, "max_tokens": 8}, "DE", "stop", "F", [D, E, F]),
    ({"stop": "F", "min_tokens": 4, "max_tokens": 8}, "DEFGHIJK", "length", None, [D, E, F, G, H, I, J, K]),
    ({"stop": "EFGH", "max_tokens": 4}, "DEFG", "length", None, [D, E, F, G]),
]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 10])
@pytest.mark.parametrize(("params", "text", "reason", "stop_reason", "token_ids"), STOPS)
def test_stop_strings(rig, tokens_per_step, params, text, reason, stop_reason, token_ids):
    params = SamplingParams(**{"max_tokens": 10, **params})
    generation = rig.submit("ABC", params)
    tokens = [D + i for i in range(params.max_tokens)]
    steps = [tokens[i : i + tokens_per_step] for i in range(0, len(tokens), tokens_per_step)]
    deltas = run(rig, generation, steps)
    out = only(generation)
    assert (out.text, out.finish_reason, out.stop_reason, out.token_ids) == (text, reason, stop_reason, token_ids)
    assert "".join(d.outputs[0].text for d in deltas) == text
    assert [i for d in deltas for i in d.outputs[0].token_ids] == token_ids
    assert sum(d.outputs[0].finish_reason is not None for d in deltas) == 1
    assert out.timeline.num_tokens == len(token_ids)
    ended_early = len(token_ids) < 10 and reason == "stop" and -(-len(token_ids) // tokens_per_step) < len(steps)
    assert rig.engine.finished == ([(generation.id, FinishReason.STOP, stop_reason)] if ended_early else [])


def test_no_delta_shows_what_may_begin_a_stop_string(rig):
    generation = rig.submit("ABC", SamplingParams(stop="FGX"))
    deltas = run(rig, generation, [[D], [E], [F], [G], [H], [F]])
    assert [d.outputs[0].text for d in deltas] == ["D", "E", "", "", "FGH", "F"]
    assert [d.outputs[0].token_ids for d in deltas] == [[D], [E], [F], [G], [H], [F]]


def test_the_cumulative_view_holds_back_too(rig):
    generation = rig.submit("ABC", SamplingParams(stop="FGX"))
    rig.outputs.process([Update(generation.id, [D, E, F])])
    assert only(generation).text == "DE"
    rig.outputs.process([Update(generation.id, [H])])
    assert only(generation).text == "DEFH"


def test_the_tokens_of_a_step_after_a_stop_string_are_dropped_with_their_logprobs(rig):
    generation = rig.submit("ABC", SamplingParams(stop="EF", logprobs=1, max_tokens=20))
    entries = [TokenLogprobs([i, i], [-0.5, -0.5], 1) for i in (D, E, F, G, H, I)]
    rig.outputs.process([Update(generation.id, [D, E, F, G, H, I], logprobs=entries, num_accepted=5, num_drafts=5)])
    out = only(generation)
    assert (out.text, out.token_ids, len(out.logprobs)) == ("D", [D, E, F], 3)
    assert out.cumulative_logprob == -1.5
    assert (out.timeline.token_counts, out.timeline.accepted_counts) == ([3], [3])
    assert rig.engine.finished == [(generation.id, FinishReason.STOP, "EF")]
    assert rig.outputs.process([Update(generation.id, [J])]) == []  # from the step that was in flight
    assert only(generation).token_ids == [D, E, F]
    assert rig.outputs.totals.output_tokens == 3


@pytest.mark.parametrize(("include", "text"), [(False, "DE"), (True, "DEF")])
def test_the_token_that_stopped_is_counted_and_not_shown(rig, include, text):
    generation = rig.submit("ABC", SamplingParams(stop_token_ids=[F], include_stop_str_in_output=include))
    update = Update(generation.id, [D, E, F], finish_reason=FinishReason.STOP, stop_reason=F)
    rig.outputs.process([update])
    out = only(generation)
    assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == (text, [D, E, F], "stop", F)


def test_the_step_that_ends_by_length_may_complete_a_stop_string(rig):
    generation = rig.submit("ABC", SamplingParams(stop="EF", max_tokens=3))
    rig.outputs.process([Update(generation.id, [D, E, F], finish_reason=FinishReason.LENGTH)])
    assert (only(generation).text, only(generation).finish_reason) == ("D", "stop")
    assert rig.engine.finished == []  # it is over there already


def test_random_tokens_in_random_steps_equal_a_search_in_the_full_text():
    tokenizer = toy_tokenizers.byte_level()
    rng = random.Random(0)
    num_stopped = 0
    for trial in range(300):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 30))]
        texts = [tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids) + 1)]
        stops = tuple({piece for _ in range(2) if (piece := _random_piece(texts[-1], rng))})
        rig = Rig(tokenizer, ScriptedEngine(len(tokenizer)))
        params = SamplingParams(stop=stops, max_tokens=len(ids), min_tokens=rng.randint(0, len(ids)))
        generation = rig.submit({"prompt_token_ids": [1]}, params)
        steps, at = [], 0
        while at < len(ids):
            size = rng.randint(1, 5)
            steps.append(ids[at : at + size])
            at += size
        deltas = run(rig, generation, steps)
        out = only(generation)
        text, num_tokens = _stopped(ids, tokenizer, stops, params.min_tokens)
        assert out.text == text, (trial, ids, stops)
        assert out.token_ids == ids[:num_tokens]
        assert "".join(d.outputs[0].text for d in deltas) == text
        num_stopped += out.finish_reason == "stop"
    assert 30 < num_stopped < 270


def _random_piece(text, rng):
    """Some characters of the text that a decoder gives out at once; none that might still change."""
    start = rng.randrange(len(text) + 1)
    piece = text[start : start + rng.randint(1, 4)]
    return "" if "\ufffd" in piece else piece


def _stopped(ids, tokenizer, stops, min_tokens):
    """Text and number of tokens by definition, from decodings of every prefix: incomplete ends do not count as text."""
    full = tokenizer.decode(ids, skip_special_tokens=True)
    seen = 0
    for n in range(1, len(ids) + 1):
        certain = len(tokenizer.decode(ids[:n], skip_special_tokens=True).rstrip("\ufffd"))
        certain = max(certain, seen)
        if n >= min_tokens:
            ends = [
                (at + len(stop), at) for stop in stops if 0 <= (at := full.find(stop, max(0, seen - len(stop) + 1))) <= certain
            ]
            ends = [(end, at) for end, at in ends if seen < end <= certain]
            if ends:
                return full[: min(ends)[1]], n
        seen = certain
    return full, len(ids)


def test_incomplete_characters_wait_and_the_end_flushes_them():
    tokenizer = toy_tokenizers.byte_level()
    rig = Rig(tokenizer, ScriptedEngine(len(tokenizer)))
    ids = tokenizer.convert_tokens_to_ids(["\u00f0", "\u0141", "\u012e", "\u00b6"])  # the bytes of U+1F336
    assert tokenizer.decode(ids) == "\U0001f336"
    whole = rig.submit({"prompt_token_ids": [1]})
    deltas = run(rig, whole, [[i] for i in ids])
    assert [d.outputs[0].text for d in deltas] == ["", "", "", "\U0001f336"]
    cut = rig.submit({"prompt_token_ids": [1]})
    deltas = run(rig, cut, [[i] for i in ids[:3]])
    assert [d.outputs[0].text for d in deltas] == ["", "", "\ufffd"]


def test_logprobs_hold_the_chosen_token_first_and_the_others_by_rank(rig):
    generation = rig.submit("ABC", SamplingParams(logprobs=2))
    chosen_is_third = TokenLogprobs([F, D, E], [-3.0, -0.1, -2.0], 3)
    chosen_is_second = TokenLogprobs([E, D, E], [-2.0, -0.1, -2.0], 2)
    rig.outputs.process([Update(generation.id, [F, E], logprobs=[chosen_is_third, chosen_is_second])])
    first, second = only(generation).logprobs
    assert list(first) == [F, D, E]
    assert [first[i].rank for i in (F, D, E)] == [3, 1, 2]
    assert [first[i].decoded_token for i in (F, D, E)] == ["F", "D", "E"]
    assert list(second) == [E, D]
    assert (second[E].rank, second[E].logprob) == (2, -2.0)
    assert only(generation).cumulative_logprob == -5.0


def test_without_logprobs_there_are_none(rig):
    generation = rig.submit("ABC")
    run(rig, generation, [[D]])
    out = generation.output()
    assert (out.prompt_logprobs, out.outputs[0].logprobs, out.outputs[0].cumulative_logprob) == (None, None, None)


def test_prompt_logprobs_are_put_together_from_chunks(rig):
    generation = rig.submit("ABC", SamplingParams(prompt_logprobs=0))
    entry = {i: TokenLogprobs([i], [-float(i)], 1) for i in (B, C)}
    rig.outputs.process([Update(generation.id, [], prompt_logprobs=[entry[B]])])
    rig.outputs.process([Update(generation.id, [D], prompt_logprobs=[entry[C]], finish_reason=FinishReason.LENGTH)])
    found = generation.output().prompt_logprobs
    assert found[0] is None
    assert [next(iter(position)) for position in found[1:]] == [B, C]
    assert found[2][C].logprob == -2.0


def test_samples_end_each_for_itself_and_each_once(rig):
    generation = rig.submit("ABC", SamplingParams(n=3, stop="E"), request_id="x")
    assert list(rig.engine.requests) == ["x-0", "x-1", "x-2"]
    rig.outputs.process([Update(f"x-{i}", [D], num_cached=16 * i) for i in range(3)])
    first = generation.delta()
    assert [(o.index, o.text) for o in first.outputs] == [(0, "D"), (1, "D"), (2, "D")]
    rig.outputs.process([Update("x-1", [E]), Update("x-2", [F], finish_reason=FinishReason.LENGTH)])
    second = generation.delta()
    assert [(o.index, o.finish_reason, o.stop_reason) for o in second.outputs] == [(1, "stop", "E"), (2, "length", None)]
    assert not second.finished and generation.open_ids == ["x-0"]
    rig.outputs.process([Update("x-0", [G], finish_reason=FinishReason.LENGTH)])
    third = generation.delta()
    assert [(o.index, o.finish_reason) for o in third.outputs] == [(0, "length")]
    assert third.finished and generation.delta() is None
    out = generation.output()
    assert [o.text for o in out.outputs] == ["DG", "D", "DF"]
    assert out.num_cached_tokens == 0  # those that share with a sibling are not hits of the prompt
    assert rig.outputs.totals.prompt_tokens == 3
    assert rig.outputs.totals.output_tokens == 6


def test_a_refusal_of_one_sample_takes_back_the_others(rig):
    rig.engine.refused_id = "x-2"
    with pytest.raises(UserError, match="can never fit"):
        rig.submit("ABC", SamplingParams(n=3), request_id="x")
    assert rig.engine.requests == {} and rig.outputs.active == []
    rig.engine.refused_id = None
    rig.submit("ABC", SamplingParams(n=3), request_id="x")
    assert len(rig.engine.requests) == 3


def test_an_id_in_use_is_refused_and_free_again_afterwards(rig):
    generation = rig.submit("ABC", request_id="x")
    with pytest.raises(UserError, match="request id 'x'"):
        rig.submit("ABC", request_id="x")
    run(rig, generation, [[D]])
    rig.submit("ABC", request_id="x")


def test_an_abort_keeps_what_there_is_and_drops_what_comes_later(rig):
    generation = rig.submit("ABC", SamplingParams(n=2, stop="EX"), request_id="x")
    rig.outputs.process([Update("x-0", [D, E]), Update("x-1", [D], finish_reason=FinishReason.LENGTH)])
    rig.outputs.abort(generation)
    assert rig.engine.finished == [("x-0", FinishReason.ABORT, None)]
    assert rig.outputs.process([Update("x-0", [F])]) == []
    out = generation.output()
    assert [(o.text, o.finish_reason) for o in out.outputs] == [("DE", "abort"), ("D", "length")]
    assert out.finished and out.error is None
    rig.outputs.abort(generation)
    assert len(rig.engine.finished) == 1


def test_an_error_of_the_engine_reaches_its_request_and_no_other(rig):
    bad, good = rig.submit("ABC"), rig.submit("ABC")
    rig.outputs.process([Update(bad.id, [], finish_reason=FinishReason.ERROR, error="it broke"), Update(good.id, [D])])
    assert (bad.output().error, only(bad).finish_reason, bad.finished) == ("it broke", "error", True)
    assert (good.output().error, good.finished) == (None, False)
    assert rig.outputs.totals.num_failed == 1


def test_the_timeline_has_the_engines_times(rig):
    rig.engine.now_s = 1.0
    generation = rig.submit("ABC", SamplingParams(n=2), request_id="x")
    rig.engine.now_s = 2.0
    rig.outputs.process([Update("x-0", [D], scheduled_s=1.5), Update("x-1", [D], scheduled_s=1.75)])
    rig.engine.now_s = 3.0
    rig.outputs.process([Update("x-0", [E, F], num_accepted=1, scheduled_s=1.5, finish_reason=FinishReason.LENGTH)])
    rig.engine.now_s = 4.0
    rig.outputs.process([Update("x-1", [], finish_reason=FinishReason.ERROR, error="gone")])
    out = generation.output()
    first = out.outputs[0].timeline
    assert (first.arrival_s, first.scheduled_s, first.token_times_s, first.finish_s) == (1.0, 1.5, [2.0, 3.0], 3.0)
    assert (first.token_counts, first.accepted_counts) == ([1, 2], [0, 1])
    merged = out.metrics
    assert (merged.scheduled_s, merged.token_times_s, merged.finish_s) == (1.5, [2.0, 2.0, 3.0], 4.0)
    assert merged.ttft_s == 1.0


def test_a_slow_reader_gets_several_steps_in_one_delta(rig):
    generation = rig.submit("ABC", SamplingParams(logprobs=0))
    for token in (D, E, F):
        rig.outputs.process([Update(generation.id, [token], logprobs=[TokenLogprobs([token], [-1.0], 1)])])
    delta = generation.delta().outputs[0]
    assert (delta.text, delta.token_ids, len(delta.logprobs)) == ("DEF", [D, E, F], 3)
    assert generation.delta() is None


def test_a_view_does_not_change_when_more_comes(rig):
    generation = rig.submit("ABC")
    rig.outputs.process([Update(generation.id, [D])])
    view = only(generation)
    rig.outputs.process([Update(generation.id, [E])])
    assert (view.text, view.token_ids) == ("D", [D])


def test_without_a_tokenizer_there_are_ids_and_no_text():
    rig = Rig(None)
    generation = rig.submit({"prompt_token_ids": [1]}, SamplingParams(logprobs=0))
    entry = TokenLogprobs([D], [-1.0], 1)
    rig.outputs.process([Update(generation.id, [D], logprobs=[entry], finish_reason=FinishReason.LENGTH)])
    out = only(generation)
    assert (out.text, out.token_ids, out.logprobs[0][D].decoded_token) == ("", [D], None)


def test_tokens_are_counted_by_their_ids_not_by_their_text():
    """A model may write 'Hello   capital' letter by letter; the tokenizer would write it with three tokens."""
    tokenizer = load_tokenizer(rigs.smollm2())
    token_ids = tokenizer.convert_tokens_to_ids([*"Hello", *"\u0120\u0120\u0120", *"capital"])
    assert len(token_ids) == 15 and len(tokenizer(tokenizer.decode(token_ids)).input_ids) == 3
    rig = Rig(tokenizer, ScriptedEngine(len(tokenizer)))
    generation = rig.submit({"prompt_token_ids": token_ids}, SamplingParams(max_tokens=15))
    run(rig, generation, [[token] for token in token_ids])
    output = generation.output()
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids, sample.timeline.num_tokens) == ("Hello   capital", token_ids, 15)
    assert (rig.outputs.totals.prompt_tokens, rig.outputs.totals.output_tokens) == (15, 15)
    (line,) = request_lines(output, 0.0)
    totals = RequestTotals(16)
    totals.add([line])
    assert (line["prompt_tokens"], len(line["output_token_ids"])) == (15, 15)
    assert (totals.prompt_tokens, totals.output_tokens) == (15, 15)
