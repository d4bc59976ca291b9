"""How many drafts are verified: by acceptance, by what steps take, tried dry where none are; and never by another output."""

import numpy as np
import pytest

from lab import SamplingParams, registry
from lab.api import DraftLength, UserError, Verified
from tests import rigs
from tests.engine.models import open_llm

registry.discover()
NUM_DRAFTS = 5


def make(name, max_rows=64, **options):
    entry = registry.get("draft_length", name)
    return entry.load()(entry.make_options(options), NUM_DRAFTS, max_rows)


def run(length, rows, acceptance, ms_of, steps, draft_ms=0.0):
    """Steps in which each row's drafts are accepted by its own rate, and a step of T tokens takes ms_of(T)."""
    rng = np.random.default_rng(0)
    rows_R, rates_R = np.array(rows), np.array(acceptance)
    lengths, offered_R, num_asked, dry_R = [], np.zeros(len(rows), np.int64), 0, np.zeros(len(rows), bool)
    for _ in range(steps):
        runs_R = np.array([rng.geometric(1 - rate) - 1 if rate < 1 else NUM_DRAFTS for rate in rates_R])
        tried_R = np.where(dry_R, 1, offered_R)
        tokens = len(rows) + int(offered_R.sum())
        accepted_R = np.minimum(runs_R, tried_R)
        length.observe(Verified(rows_R, tried_R, accepted_R, tokens, ms_of(tokens), True, num_asked, draft_ms * num_asked))
        offered_R = length.lengths(rows_R)
        dry_R = np.zeros(len(rows), bool) if (dry := length.dry_runs(rows_R)) is None else dry & (offered_R == 0)
        num_asked = int(((offered_R > 0) | dry_R).sum())
        lengths.append(offered_R)
    return np.array(lengths)


def started(name, rows, **options):
    length = make(name, **options)
    for row in rows:
        length.start(row)
    return length


def test_fixed_is_all_of_them():
    assert make("fixed").lengths(np.array([0, 3])).tolist() == [5, 5]
    assert make("fixed").dry_runs(np.array([0, 3])) is None


def test_acceptance_gives_each_request_its_own():
    found = run(started("acceptance", [0, 1, 2]), [0, 1, 2], [0.95, 0.5, 0.02], lambda tokens: 1.0, 200)
    means = found[50:].mean(0)
    assert means[0] > 4 and 1 < means[1] < 4 and means[2] < 0.1


def test_a_dry_run_turns_drafts_on_again_when_the_text_becomes_predictable():
    length = started("acceptance", [0])
    off = run(length, [0], [0.0], lambda tokens: 1.0, 50)
    on = run(length, [0], [1.0], lambda tokens: 1.0, 50)
    assert off[-20:].max() == 0 and on[-20:].min() == 5
    assert int(np.argmax(on[:, 0] > 0)) < 12


@pytest.mark.parametrize(("draft_ms", "share"), [(0.001, 1.0), (0.1, 0.25), (1.0, 0.025)])
def test_dry_runs_keep_to_their_share_of_the_time(draft_ms, share):
    """Four rows whose drafts are worth nothing, steps of 10 ms: a hundredth of that is left for trying."""
    length, rows_R = started("batch", range(4)), np.arange(4)
    run(length, rows_R.tolist(), [0.0] * 4, lambda tokens: 10.0, 100, draft_ms=draft_ms)
    assert length.lengths(rows_R).max() == 0
    asked = [length.dry_runs(rows_R).mean() for _ in range(400)]
    assert np.mean(asked) == pytest.approx(share, rel=0.1)


def test_a_new_request_is_supposed_to_be_like_those_before():
    length = started("acceptance", [0, 1])
    assert length.lengths(np.array([1])).tolist() == [5]  # nothing is known: they are tried
    run(length, [0], [0.02], lambda tokens: 1.0, 200)
    length.start(1)
    assert length.lengths(np.array([1])).tolist() == [0]


def flat(tokens):
    """A device that waits for its weights up to 16 tokens, and computes beyond."""
    return 10.0 * max(1.0, tokens / 16)


@pytest.mark.parametrize(
    ("num_rows", "acceptance", "least", "most"),
    [(1, 0.9, 4.5, 5), (1, 0.5, 3, 5), (4, 0.8, 2, 4), (16, 0.8, 0, 0.3), (48, 0.95, 0, 0.3), (1, 0.0, 0, 0.3)],
)
def test_a_batch_gets_what_pays_on_the_roofline(num_rows, acceptance, least, most):
    rows = list(range(num_rows))
    found = run(started("batch", rows), rows, [acceptance] * num_rows, flat, 120, draft_ms=0.01)
    assert least <= found[60:].mean() <= most


def test_a_batch_gives_its_room_to_the_requests_that_use_it():
    rows = list(range(8))
    found = run(started("batch", rows), rows, [0.95, 0.95] + [0.1] * 6, flat, 160)[80:]
    assert found[:, :2].mean() > 3 and found[:, 2:].mean() < 0.5


def test_drafts_that_cost_more_than_they_bring_are_not_made():
    cheap, dear = (run(started("batch", [0]), [0], [0.5], flat, 100, draft_ms=ms)[50:].mean() for ms in (0.1, 12.0))
    assert cheap > 3 and dear < 0.3


def test_a_time_that_was_measured_in_a_bad_moment_does_not_last():
    length = started("batch", [0], lasting=32)
    slow_at_first = iter([10.0] + [200.0] * 3 + [10.0] * 1000)
    found = run(length, [0], [0.9], lambda tokens: next(slow_at_first), 200)
    assert found[100:].mean() > 4


def test_plain_steps_are_measured_again_and_again():
    found = run(started("batch", [0], lasting=20), [0], [1.0], lambda tokens: 10.0, 200)
    assert 5 <= (found[10:] == 0).sum() <= 12


def test_times_of_steps():
    make("batch")
    from lab.runner.draft_lengths._times import StepTimes

    times = StepTimes(lasting=10)
    for ms in (50.0, 10.0, 12.0):  # the least of the first few
        times.add(4, ms)
    times.add(8, 20.0)
    assert times.of(np.array([1, 4, 6, 8, 99])).tolist() == [10, 10, 15, 20, 20]
    times.add(4, 1000.0)  # one measurement moves it by a tenth at most
    assert times.of(np.array([4])).tolist() == [11]
    times.add(16, 5.0)
    assert times.of(np.array([8, 16])).tolist() == [20, 20]  # more tokens never take less
    for _ in range(12):
        times.add(100, 40.0)
    assert times.knows(100) and times.knows(98) and not times.knows(4) and not times.knows(8)
    times.add(4, 30.0)
    assert times.of(np.array([4])).tolist() == [30]  # what was known before is too old to count


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("acceptance", "min_gain", 1.0),
        ("acceptance", "decay", 0.0),
        ("acceptance", "try_every", 0),
        ("batch", "decay", 1.0),
        ("batch", "margin", -0.1),
        ("batch", "dry_share", 0.0),
        ("batch", "lasting", 0),
    ],
)
def test_bad_options_are_refused_by_name(name, option, value):
    with pytest.raises(UserError, match=rf"draft_length\.{option}"):
        make(name, **{option: value})


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"), vocab_size=16)  # few tokens: what it says repeats


PROMPTS = [{"prompt_token_ids": [(3 * i + k) % 16 for i in range(20)] * 2} for k in range(4)]


@pytest.fixture
def erratic():
    """A length that gives any number of drafts, and some dry runs, without rule."""

    @registry.register("draft_length", "erratic-in-test")
    class Erratic(DraftLength):
        """Without rule."""

        told = []

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._rng = np.random.default_rng(7)

        def observe(self, step):
            self.told.append(step)

        def lengths(self, rows_R):
            return self._rng.integers(-3, self.num_drafts + 1, len(rows_R)).clip(0)

        def dry_runs(self, rows_R):
            return self._rng.random(len(rows_R)) < 0.5

    yield Erratic
    registry._entries.pop(("draft_length", "erratic-in-test"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("is_async", ["true", "false"])
def test_outputs_do_not_depend_on_the_length(mix, erratic, is_async, temperature):
    params = [SamplingParams(temperature=temperature, seed=k, max_tokens=40) for k in range(4)]
    with open_llm(mix) as llm:
        plain = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]
    for name in ("erratic-in-test", "acceptance", "batch", "fixed"):
        overrides = ["+spec=ngram", "spec.min_n=1", f"+draft_length={name}", f"scheduler.async_scheduling={is_async}"]
        with open_llm(mix, *overrides) as llm:
            found = [out.outputs[0] for out in llm.generate(PROMPTS, params)]
        assert [out.token_ids for out in found] == plain, name
        if name == "erratic-in-test":
            verified = [count for out in found for count in out.timeline.draft_counts]
            assert {0, 1, 5} <= set(verified)
    told = erratic.told
    drafts = sum(int(step.offered_R.sum()) for step in told)
    assert drafts > sum(verified)  # the dry runs
    assert any(step.is_decode for step in told) and not told[0].is_decode
    assert all(step.ms > 0 and step.num_tokens >= len(step.rows_R) for step in told)
    assert any((step.accepted_R > 0).any() for step in told)


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_a_request_can_do_without_drafts_beside_others_that_have_them(mix, is_async):
    with open_llm(mix, "+spec=ngram", "spec.min_n=1", f"scheduler.async_scheduling={is_async}") as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=40, max_drafts=most) for most in (0, 2, None, 0)]
        outs = [out.outputs[0] for out in llm.generate(PROMPTS, params)]
        without = SamplingParams(temperature=0.0, max_tokens=40, max_drafts=0)
        plain = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, without)]
    assert [out.token_ids for out in outs] == plain
    assert [max(out.timeline.draft_counts) for out in outs] == [0, 2, 5, 0]


@pytest.mark.parametrize("name", ["acceptance", "batch"])
def test_of_a_tree_nodes_are_counted_and_depths_are_judged(name):
    """Trees of 15 nodes and 3 depths: accepted to the end they are kept whole, and given up where nothing is accepted."""
    entry = registry.get("draft_length", name)
    found = []
    for accepted in (3, 1, 0):
        length = entry.load()(entry.make_options({}), 15, 4)
        length.tree_depth = 3
        length.start(0)
        rows_R, lengths = np.array([0]), []
        for _ in range(60):
            nodes = int(length.lengths(rows_R)[0]) if lengths else 0
            lengths.append(nodes)
            depth = -(-nodes * 3 // 15)
            taken = min(accepted, depth)
            # a step takes a little longer for each of its tokens
            step = np.array([depth]), np.array([taken]), 1 + nodes, 10 + 0.1 * nodes, True, 1, 0.1
            length.observe(Verified(rows_R, *step))
        found.append(lengths[-20:])
    assert min(found[0]) == 15 and max(found[2]) <= 5
    assert np.mean(found[2]) < np.mean(found[1]) <= np.mean(found[0])
