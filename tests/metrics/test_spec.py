"""What drafts came to: by position, by request, by category, and in time."""

import pytest

from lab.metrics.spec import LEAST_PLAIN_STEPS, DraftTotals, RequestDrafts, SpecTimes, expected_tokens
from lab.report.spec import category_rows, spec_rows


def test_draft_totals_per_position():
    drafts = DraftTotals()
    assert drafts.metrics() is None
    for offered, accepted in ((3, 3), (3, 1), (1, 0), (0, 0)):
        drafts.add(offered, accepted)
    found = drafts.metrics()
    assert (found["num_drafts"], found["draft_tokens"], found["accepted_tokens"]) == (3, 7, 4)
    assert found["acceptance_per_position"] == [2 / 3, 1 / 2, 1 / 2]
    assert found["mean_accepted_length"] == pytest.approx(1 + 4 / 3)
    assert found["alpha"] == pytest.approx(4 / 6)  # four accepted, two refused: what stands after a refused one says nothing
    assert found["gamma"] == pytest.approx(7 / 3)


def test_of_trees_acceptance_is_told_by_depth():
    drafts = DraftTotals()
    drafts.add(16, 3, depth=5)
    drafts.add(16, 4, depth=4)
    drafts.add(8, 0, depth=2)
    found = drafts.metrics()
    assert (found["num_drafts"], found["draft_tokens"], found["accepted_tokens"]) == (3, 40, 7)
    assert found["acceptance_per_position"] == [2 / 3, 2 / 3, 1.0, 1 / 2, 0.0]
    assert (found["gamma"], found["alpha"]) == (pytest.approx(11 / 3), pytest.approx(7 / 9))


@pytest.mark.parametrize(("alpha", "gamma", "tokens"), [(0.0, 5, 1.0), (1.0, 5, 6.0), (0.5, 2, 1.75), (0.8, 1, 1.8)])
def test_expected_tokens(alpha, gamma, tokens):
    assert expected_tokens(alpha, gamma) == pytest.approx(tokens)


def line(tokens, drafts, accepted, category=None, itl=None, error=None):
    itl_ms = [10.0] * (len(tokens) - 1) if itl is None else itl
    found = {"tokens_per_step": tokens, "drafts_per_step": drafts, "accepted_per_step": accepted, "itl_ms": itl_ms}
    found["draft_depth_per_step"] = drafts
    return {**found, "error": error} | ({"category": category} if category else {})


def test_requests_and_categories():
    drafts = RequestDrafts()
    assert drafts.metrics() is None and drafts.category_metrics() == {}
    drafts.add([line([1, 3, 1], [0, 2, 2], [0, 2, 0], "code")])
    drafts.add([line([1, 1, 1], [0, 0, 0], [0, 0, 0], "prose", itl=[20.0, 30.0])])
    drafts.add([line([], [], [], "prose", itl=[], error="refused")])
    drafts.add([line([1, 2], [0, 5], [0, 2])])  # the second accepted token ended it: three drafts were void
    found = drafts.metrics()
    assert (found["draft_tokens"], found["accepted_tokens"]) == (6, 4)
    assert found["acceptance_per_position"] == [2 / 3, 2 / 3]
    assert found["per_request"]["acceptance_rate"]["mean"] == pytest.approx((0.5 + 1.0) / 2)
    assert found["per_request"]["mean_accepted_length"]["max"] == 3.0
    categories = drafts.category_metrics()
    assert list(categories) == ["code", "prose"]
    assert categories["prose"] == {"num_requests": 1, "tokens_per_step": 1.0, "ms_per_token": 25.0}
    assert (categories["code"]["tokens_per_step"], categories["code"]["ms_per_token"]) == (2.0, 5.0)
    assert categories["code"]["acceptance_rate"] == 0.5
    assert category_rows(categories)[0] == ["code", "1", "2.00", "5.00", "50.0%", "50% 50%"]
    assert category_rows(categories)[1] == ["prose", "1", "1.00", "25.00", "", ""]


def step(ms, draft_ms=0.0, requests=1, drafting=0, drafts=0, accepted=0, more=0):
    return {
        "ms": ms,
        "draft_ms": draft_ms,
        "num_requests": requests,
        "num_tokens": requests + drafts + more,
        "num_drafting": drafting,
        "num_drafts": drafts,
        "draft_depth": drafts,
        "num_accepted": accepted,
    }


def test_speed_up_against_the_plain_steps_of_as_many_requests():
    times = SpecTimes()
    times.add(step(100.0, more=50))  # a prefill
    for _ in range(LEAST_PLAIN_STEPS):
        times.add(step(10.0))
    times.add(step(99.0, requests=7))  # of another number of requests
    for accepted in (4, 2):
        times.add(step(16.0, 1.0, drafting=1, drafts=4, accepted=accepted))
    found = times.metrics(alpha=0.5)
    assert found["draft_ms_share"] == pytest.approx(2 / 281)
    assert found["verify_ms_share"] == pytest.approx(30 / 281)
    speedup = found["speedup"]
    assert (speedup["verify_cost"], speedup["draft_cost"], speedup["num_plain_steps"]) == (1.5, pytest.approx(0.1), 5)
    assert speedup["measured"] == pytest.approx((5 + 3) / 2 / 1.6)
    assert speedup["expected"] == pytest.approx(expected_tokens(0.5, 4) / 1.6)


def test_speed_up_of_a_batch_counts_the_rows_without_drafts():
    times = SpecTimes()
    for _ in range(LEAST_PLAIN_STEPS):
        times.add(step(10.0, requests=4))
    times.add(step(12.0, requests=4, drafting=1, drafts=2, accepted=2))
    speedup = times.metrics(alpha=1.0)["speedup"]
    assert speedup["measured"] == speedup["expected"] == pytest.approx((4 + 2) / 4 / 1.2)


def test_steps_that_something_held_up_do_not_make_a_speed_up():
    calm, held_up = SpecTimes(), SpecTimes()
    for number in range(7):
        calm.add(step(10.0))
        held_up.add(step(900.0 if number == 3 else 10.0))
        for times in (calm, held_up):
            times.add(step(15.0, drafting=1, drafts=2, accepted=1))
    held_up.add(step(800.0, drafting=1, drafts=2, accepted=1))
    calm.add(step(15.0, drafting=1, drafts=2, accepted=1))
    assert held_up.metrics(alpha=0.5)["speedup"] == calm.metrics(alpha=0.5)["speedup"]


def test_too_few_plain_steps_make_no_speed_up():
    times = SpecTimes()
    times.add(step(12.0, 3.0, drafting=1, drafts=2, accepted=2))
    times.add(step(7.0, requests=2))
    assert times.metrics(alpha=1.0) == {"draft_ms_share": 3 / 19, "verify_ms_share": 9 / 19, "num_plain_steps": 0}
    for count in range(1, LEAST_PLAIN_STEPS + 1):
        times.add(step(9.0))
        assert ("speedup" in times.metrics(1.0)) == (count == LEAST_PLAIN_STEPS)
        assert times.metrics(1.0)["num_plain_steps"] == count
    assert SpecTimes().metrics(0.5) == {"draft_ms_share": 0.0, "verify_ms_share": 0.0, "num_plain_steps": 0}


def test_the_summary_tells_all_of_it():
    drafts = RequestDrafts()
    drafts.add([line([1, 3], [0, 2], [0, 2])])
    spec = drafts.metrics()
    assert [name for name, _ in spec_rows(spec)] == ["drafts", "by position"]
    shares = {"draft_ms_share": 0.1, "verify_ms_share": 0.8}
    for count, told in (
        (0, "no decode steps of as many requests were"),
        (1, "there was only 1 decode step of as many"),
        (3, "there were only 3 decode steps of as many"),
    ):
        assert dict(spec_rows(spec | shares | {"num_plain_steps": count}))["speed-up"].startswith(f"unknown: {told}")
    speedup = {"expected": 1.5, "measured": 1.25, "verify_cost": 1.2, "draft_cost": 0.01, "num_plain_steps": 7}
    rows = dict(spec_rows(spec | shares | {"speedup": speedup}))
    assert rows["drafts"] == "100.0% accepted, 3.00 tokens per verification" and rows["by position"] == "100% 100%"
    assert rows["drafting"] == "proposing 10.0% of the time, steps that verify 80.0%"
    assert rows["speed-up"].startswith("1.25 measured, 1.50 expected of alpha 1.00, gamma 2.0;")
