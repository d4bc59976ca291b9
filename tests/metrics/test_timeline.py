"""Latencies of one request. Times are exact binary fractions where equality is asserted."""

from fractions import Fraction

import pytest

from lab.metrics.timeline import Timeline


def timeline(arrival, scheduled, steps, finish):
    times = Timeline(arrival, scheduled)
    for now, count in steps:
        times.add_tokens(now, count)
    times.finish_s = finish
    return times


def test_several_tokens_in_a_step_are_one_gap_and_all_count_in_tpot():
    half, six, seven = Fraction(1, 2), Fraction(6, 10), Fraction(7, 10)
    times = timeline(Fraction(0), Fraction(1, 10), [(half, 1), (six, 3), (seven, 1)], seven)
    assert times.ttft_s == half
    assert times.num_tokens == 5
    assert times.tpot_s == Fraction(5, 100)
    assert times.itl_s == [Fraction(1, 10), Fraction(1, 10)]  # the first token is no gap
    assert times.token_counts[1:] == [3, 1]
    assert times.e2e_s == seven


def test_the_parts_add_up_to_the_whole():
    times = timeline(0.1, 1.1, [(1.3, 1), (1.37, 2), (2.9, 1)], 2.9)
    assert times.queue_s + times.prefill_s + times.decode_s == pytest.approx(times.e2e_s, abs=1e-9)
    assert times.ttft_s == pytest.approx(1.2)  # from arrival: the queue is part of it
    assert times.queue_s == pytest.approx(1.0)


@pytest.mark.parametrize(("first", "last", "tokens", "tpot"), [(0.5, 0.875, 7, 0.0625), (0.25, 0.25, 1, None)])
def test_tpot_is_per_token_after_the_first_and_undefined_for_one(first, last, tokens, tpot):
    steps = [(first, 1)] if tokens == 1 else [(first, 1), (last, tokens - 1)]
    assert timeline(0.0, 0.0, steps, last).tpot_s == tpot


def test_a_request_that_got_nowhere_has_no_latencies():
    times = Timeline(3.0)
    assert (times.ttft_s, times.tpot_s, times.e2e_s, times.queue_s, times.prefill_s, times.decode_s) == (None,) * 6
    assert times.itl_s == []


def test_the_gap_of_a_preemption_is_a_sample():
    assert timeline(0.0, 0.0, [(1.0, 1), (1.5, 1), (9.5, 1)], 9.5).itl_s == [0.5, 8.0]
