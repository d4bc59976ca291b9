"""What is refused at the door, and where a request ends."""

import pytest

from lab.errors import UserError
from lab.kv.blocks import BlockManager
from lab.sched.policies.fcfs import FirstComeFirstServed
from lab.sched.scheduler import Scheduler
from lab.settings import SchedulerSettings
from lab.types import FinishReason
from tests.sched.fake_runner import solo_output
from tests.sched.harness import Harness, make_request

MODES = [
    pytest.param({"num_drafts": n, "settings": {"async_scheduling": a}}, id=f"{'async' if a else 'sync'}-{n}-drafts")
    for a in (False, True)
    for n in (0, 3)
]


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_can_never_fit_is_refused_and_holds_up_nobody(mode):
    harness = Harness(num_blocks=49, block_size=16, max_model_len=2048, **mode)
    with pytest.raises(UserError, match="needs 63 blocks of 16, the cache has 49"):
        harness.add(make_request("long", range(1002), max_tokens=16))
    with pytest.raises(UserError, match="830 tokens needs 52 blocks of 16, the cache has 49"):
        harness.add(make_request("grows", range(780), max_tokens=50))
    with pytest.raises(UserError, match="2048 tokens needs 128 blocks"):
        harness.add(make_request("open end", range(10), max_tokens=None))
    harness.add(*(make_request(f"short{i}", range(10), i, max_tokens=5) for i in range(2)))
    harness.run(most_steps=20)
    harness.check_outputs()
    assert all(len(r.output_ids) == 5 for r in harness.requests.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_request_that_just_fits_runs_to_its_end(mode):
    harness = Harness(num_blocks=49, block_size=16, max_model_len=2048, **mode)
    harness.add(make_request("fits", range(780), max_tokens=5))  # 785 tokens, the last of which is never computed
    harness.run(most_steps=100)
    harness.check_outputs()
    assert harness.blocks.peak_used == 49
    with pytest.raises(UserError, match="needs 50 blocks of 16, the cache has 49"):
        harness.add(make_request("does not", range(780), max_tokens=6))


@pytest.mark.parametrize("mode", MODES)
def test_the_context_limit(mode):
    harness = Harness(num_blocks=8, block_size=4, max_model_len=16, **mode)
    for num_prompt in (16, 17):
        with pytest.raises(UserError, match=rf"{num_prompt} tokens.*16"):
            harness.add(make_request("long", range(num_prompt), max_tokens=5))
    lengths = {}
    for num_prompt, max_tokens in ((15, 5), (8, 9), (8, None), (8, 8), (8, 7), (15, 1)):
        request = make_request(f"{num_prompt}+{max_tokens}", range(num_prompt), max_tokens=max_tokens)
        harness.add(request)
        harness.run()
        assert request.finish_reason is FinishReason.LENGTH
        lengths[request.id] = request.num_output
    harness.check_outputs()
    assert lengths == {"15+5": 1, "8+9": 8, "8+None": 8, "8+8": 8, "8+7": 7, "15+1": 1}


def test_an_empty_prompt_and_an_id_in_use_are_refused():
    harness = Harness()
    with pytest.raises(UserError, match="no tokens"):
        harness.add(make_request("empty", []))
    harness.add(make_request("twice", [1]))
    with pytest.raises(UserError, match="'twice' is in use"):
        harness.add(make_request("twice", [2]))
    harness.run()
    harness.add(make_request("twice", [2]))
    harness.run()


def test_a_refused_request_leaves_nothing_behind():
    harness = Harness(max_model_len=16)
    with pytest.raises(UserError):
        harness.add(make_request("long", range(16)))
    assert not harness.scheduler.has_work and harness.scheduler.num_waiting == 0


def test_a_prompt_that_must_go_in_one_step_is_refused_when_it_cannot():
    harness = Harness(settings={"enable_chunked_prefill": False, "max_num_batched_tokens": 8})
    with pytest.raises(UserError, match=r"9 tokens .*max_num_batched_tokens=8"):
        harness.add(make_request("long", range(9)))
    harness.add(make_request("fits", range(8), max_tokens=4))
    harness.run()
    harness.check_outputs()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
        ({"long_prefill_token_threshold": 8, "enable_chunked_prefill": False}, "enable_chunked_prefill"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, word):
    with pytest.raises(UserError, match=word):
        Scheduler(
            SchedulerSettings(**settings),
            BlockManager(4, 4),
            FirstComeFirstServed(FirstComeFirstServed.Options()),
            max_model_len=8,
        )


class TestStops:
    PROMPT = [5, 6, 8]

    def run(self, mode, **kwargs):
        harness = Harness(**mode)
        request = make_request("r", self.PROMPT, **kwargs)
        harness.add(request)
        harness.run()
        harness.check_outputs()
        return request

    def output(self, number):
        """The number-th token of the output, which occurs there for the first time."""
        output = solo_output(self.PROMPT, 30)
        assert output.index(output[number]) == number
        return output[number]

    @pytest.mark.parametrize("mode", MODES)
    def test_eos_ends_it_without_a_stop_reason(self, mode):
        request = self.run(mode, max_tokens=20, eos_ids=frozenset({self.output(4)}))
        assert (request.num_output, request.finish_reason, request.stop_reason) == (5, FinishReason.STOP, None)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_stop_token_ends_it_and_is_named(self, mode):
        token = self.output(4)
        request = self.run(mode, max_tokens=20, stop_token_ids=(token,))
        assert (request.num_output, request.finish_reason, request.stop_reason) == (5, FinishReason.STOP, token)

    @pytest.mark.parametrize("mode", MODES)
    def test_eos_is_passed_over_on_request(self, mode):
        request = self.run(mode, max_tokens=8, eos_ids=frozenset({self.output(4)}), ignore_eos=True)
        assert (request.num_output, request.finish_reason) == (8, FinishReason.LENGTH)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("min_tokens", "num_output"), [(5, 5), (6, 8)])
    def test_neither_ends_it_before_min_tokens(self, mode, min_tokens, num_output):
        token = self.output(4)
        kinds = ({"eos_ids": frozenset({token})}, {"stop_token_ids": (token,)})
        for kind in kinds:
            assert self.run(mode, max_tokens=8, min_tokens=min_tokens, **kind).num_output == num_output

    @pytest.mark.parametrize("mode", MODES)
    def test_a_stop_on_the_last_token_allowed_is_a_stop(self, mode):
        request = self.run(mode, max_tokens=5, eos_ids=frozenset({self.output(4)}))
        assert (request.num_output, request.finish_reason) == (5, FinishReason.STOP)

    def test_what_drafts_bring_beyond_a_stop_is_dropped(self):
        """With a drafter that is right at 70% and 3 drafts a step, stops fall into the middle of accepted tokens."""
        cuts = 0
        for seed in range(20):
            for number in (1, 2, 3, 4, 6):
                harness = Harness(num_drafts=3, seed=seed)
                harness.add(make_request("r", self.PROMPT, max_tokens=20, stop_token_ids=(self.output(number),), logprobs=0))
                harness.run()
                harness.check_outputs()
                cuts += harness.runner.num_accepted > sum(u.num_accepted for u in harness.updates)
        assert cuts > 5
