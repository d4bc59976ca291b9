"""What lines of requests.jsonl and steps.jsonl add up to."""

import random
import statistics

import pytest

from lab.bench.records import latencies, refused_line
from lab.errors import UserError
from lab.metrics.summary import RequestTotals, StepTotals, distribution, percentile
from lab.metrics.timeline import Timeline
from lab.settings import Settings


def line(arrival, steps, *, scheduled=None, prompt=10, error=None, index=0, finish_reason="length"):
    """A line of a request whose steps are (time, tokens)."""
    times = Timeline(arrival, arrival if scheduled is None else scheduled)
    for now, count in steps:
        times.add_tokens(now, count)
    times.finish_s = steps[-1][0]
    return {
        "id": "r",
        "index": index,
        "prompt_tokens": prompt,
        "output_token_ids": [1] * times.num_tokens,
        "finish_reason": finish_reason,
        "num_preemptions": 0,
        "error": error,
        **latencies(times, 0.0),
    }


def spread(arrival, ttft, e2e, tokens):
    """A line with this TTFT, end and number of tokens, the rest of them in one step at the end."""
    steps = [(arrival + ttft, 1), (arrival + e2e, tokens - 1)] if tokens > 1 else [(arrival + ttft, 1)]
    return line(arrival, steps)


def totals_of_five(goodput=None):
    totals = RequestTotals(16, goodput or {})
    for ttft, e2e, tokens in ((0.4, 0.9, 11), (0.6, 1.0, 11), (0.5, 0.875, 7), (0.3, 0.3, 1)):
        totals.add([spread(0.0, ttft, e2e, tokens)])
    totals.add([refused_line("bad", 0.0, "too long", 99)])
    return totals


def test_tpot_leaves_out_single_tokens_and_failures():
    found = totals_of_five().metrics(10.0)
    assert found["tpot_ms"]["mean"] == pytest.approx((50 + 40 + 62.5) / 3)
    assert found["tpot_ms"]["max"] == 62.5
    assert (found["num_requests"], found["num_failed"]) == (5, 1)
    assert found["output_tokens"] == 30
    assert found["prompt_tokens"] == 40
    assert found["requests_per_s"] == pytest.approx(0.4)
    assert "goodput_req_per_s" not in found  # nobody asked


def test_goodput_counts_equal_as_good_and_skips_what_does_not_apply():
    found = totals_of_five({"ttft": 500.0, "tpot": 62.5}).metrics(10.0)
    assert found["goodput_req_per_s"] == pytest.approx(0.3)  # the first, the third by equality, the fourth without TPOT


@pytest.mark.parametrize(
    ("limits", "good"), [({"ttft": 499.0}, 2), ({"tpot": 50.0}, 3), ({"e2e": 300.0}, 1), ({"ttft": 1e9}, 4)]
)
def test_each_limit_of_goodput_bites(limits, good):
    assert totals_of_five(limits).num_good == good


@pytest.mark.parametrize("spec", [{"foo": 1.0}, {"ttft": -1.0}, {"ttft": 0.0}, {"ttft": float("nan")}])
def test_bad_goodput_limits_are_refused_at_the_start(spec):
    with pytest.raises(UserError, match=next(iter(spec))):
        Settings(goodput=spec)


def test_itl_has_one_sample_per_later_step():
    totals = RequestTotals(16)
    totals.add([line(0.0, [(0.5, 1), (0.6, 3), (0.7, 1)])])
    found = totals.metrics(0.7)
    assert list(totals.samples["itl_ms"]) == [100.0, 100.0]
    assert found["tpot_ms"]["mean"] == pytest.approx(50.0)
    assert totals.tokens_by_second == {0: 5}
    assert found["peak_output_tok_per_s"] >= found["output_tok_per_s"] == pytest.approx(5 / 0.7)


def test_the_busiest_second_is_the_peak():
    totals = RequestTotals(16)
    totals.add([line(0.0, [(0.5, 1), (1.1, 40), (2.5, 1), (9.0, 1)])])
    assert totals.metrics(9.0)["peak_output_tok_per_s"] == 40


def test_the_prompt_of_several_samples_counts_once_and_goodput_needs_all():
    totals = RequestTotals(16, {"ttft": 100.0})
    totals.add([line(0.0, [(0.05, 4)]), line(0.0, [(0.05, 1), (0.4, 2)], index=1)])
    totals.add([line(0.0, [(0.05, 4)]), line(0.0, [(0.2, 3)], index=1)])
    found = totals.metrics(1.0)
    assert (found["num_requests"], found["prompt_tokens"], found["output_tokens"]) == (2, 20, 14)
    assert totals.num_good == 1


def test_waste_is_the_unfilled_end_of_last_blocks():
    totals = RequestTotals(16)
    totals.add([line(0.0, [(0.1, 8)], prompt=10)])  # 17 tokens in the cache: 2 blocks
    assert totals.waste_fraction == pytest.approx(1 - 17 / 32)
    assert RequestTotals(16).waste_fraction == 0.0


def test_percentiles_agree_with_the_library():
    rng = random.Random(5)
    for count in (2, 3, 10, 101):
        samples = [rng.expovariate(1.0) for _ in range(count)]
        expected = statistics.quantiles(samples, n=100, method="inclusive")
        found = distribution(samples)
        assert found["p50"] == pytest.approx(expected[49])
        assert found["p90"] == pytest.approx(expected[89])
        assert found["p99"] == pytest.approx(expected[98])
        assert (found["mean"], found["max"]) == (pytest.approx(statistics.fmean(samples)), max(samples))
    assert percentile([4.0], 0.99) == 4.0
    assert distribution([]) is None


def test_a_run_without_time_or_requests_has_no_rates():
    found = RequestTotals(16).metrics(0.0)
    assert found["num_requests"] == 0
    assert "output_tok_per_s" not in found and "ttft_ms" not in found


def step(ms, num_tokens, num_requests, used=4, running=None, drafts=0, mode="none"):
    return {
        "ms": ms,
        "draft_ms": ms / 10,
        "num_tokens": num_tokens,
        "num_requests": num_requests,
        "num_drafts": drafts,
        "draft_depth": drafts,
        "kv_used_blocks": used,
        "running": num_requests if running is None else running,
        "mode": mode,
    }


def test_the_floor_is_compared_with_steps_that_only_decode():
    asked = []
    totals = StepTotals(16, 15, lambda tokens, kv: asked.append((tokens, kv)) or 0.001 * tokens)
    totals.add(step(50.0, 100, 2, mode="full"))  # prefill
    totals.add(step(4.0, 2, 2, used=6))
    totals.add(step(8.0, 6, 2, used=1, drafts=4))
    assert asked == [(2, 6 * 16 - 2 * 15), (6, 0)]  # never more than the requests may hold, never below nothing
    assert totals.decode_metrics() == {"decode_floor_ms": 4.0, "decode_step_ms": 6.0, "floor_ratio": 1.5}
    assert totals.dispatch == {"full": 1, "none": 2}


def test_without_decode_steps_there_is_no_ratio():
    assert StepTotals(16, 15, lambda tokens, kv: 1.0).decode_metrics() == {}
