"""A step while it is being planned: what is taken back leaves no trace in its counts."""

from lab.sched.plan import StepPlan
from tests.sched.harness import make_request


def test_a_chunk_taken_back_returns_its_tokens():
    plan = StepPlan(7, budget=10)
    decodes, prefills = make_request("a", range(5)), make_request("b", range(9))
    decodes.num_computed, decodes.draft_ids = 4, [1, 2, 3]
    plan.add(decodes, 3, 2, [8])
    plan.add(prefills, 6, 0, [])
    assert (plan.budget, plan.num_tokens, decodes.num_in_flight, decodes.draft_ids) == (1, 9, 3, [])
    assert (plan.chunks[0].draft_ids, plan.chunks[0].samples, plan.chunks[1].samples) == ([1, 2], True, False)
    plan.drop(decodes)
    assert (plan.budget, plan.num_tokens, decodes.num_in_flight) == (4, 6, 0)
    plan.drop(decodes)  # it has none any more
    step = plan.finish(["a"])
    assert (step.index, [c.request_id for c in step.chunks], step.num_tokens, step.freed) == (7, ["b"], 6, ["a"])
