"""The workloads: what their files may hold, and that the same seed gives the same requests."""

import json
import statistics

import pytest

from lab import registry
from lab.bench.arrivals import ArrivalOptions, arrival_times
from lab.bench.workloads.prompts import DEFAULT_PROMPTS, read_prompts
from lab.capabilities import Needs
from lab.contracts.workload import ModelFacts
from lab.engine.resolution import resolve
from lab.errors import UserError
from lab.settings import PluginChoice

MODEL = ModelFacts(200, 512, frozenset({0, 1, 7, 199}), lambda text: [2] * len(text))


def items(name, seed=0, **options):
    registry.discover()
    return resolve("workload", PluginChoice(name, options), Needs()).make(seed).items(MODEL)


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_the_built_in_prompts_are_varied():
    found = items("prompts")
    assert 20 <= len(found) <= 40
    assert any(item.messages for item in found) and any(item.prompt for item in found)
    lengths = [len(json.dumps(item.messages or item.prompt)) for item in found]
    assert min(lengths) < 60 and max(lengths) > 1500
    assert len({json.dumps(item.messages or item.prompt) for item in found}) == len(found)
    assert DEFAULT_PROMPTS.read_text().isascii()


def test_every_kind_of_line_is_read(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "hello", "sampling": {"max_tokens": 3, "temperature": 0}, "priority": -1},
        "",
        {"prompt_token_ids": [5, 6], "arrival_s": 1.5, "cache_salt": "mine"},
        {"messages": [{"role": "user", "content": "hi"}], "reference": "hello", "arrival_s": 1},
        {"prompt": "a line separator \u2028 inside"},
    )
    hello, separated, chat, ids = items("prompts", path=path)
    assert (hello.prompt, hello.sampling, hello.priority) == ("hello", {"max_tokens": 3, "temperature": 0}, -1)
    assert separated.prompt.endswith("inside")
    assert (chat.messages[0]["content"], chat.reference, chat.arrival_s) == ("hi", "hello", 1)
    assert (ids.prompt_token_ids, ids.cache_salt, ids.arrival_s) == ([5, 6], "mine", 1.5)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "not JSON"),
        ("[1, 2]", "must be an object"),
        ({"promt": "x"}, "Did you mean 'prompt'"),
        ({"sampling": {}}, "exactly one of"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "prompt and messages"),
        ({"prompt": 3}, "prompt must be text"),
        ({"prompt_token_ids": [1, 2.5]}, "list of token ids"),
        ({"prompt_token_ids": [True]}, "list of token ids"),
        ({"messages": []}, "messages must be"),
        ({"messages": [{"content": "x"}]}, "messages must be"),
        ({"prompt": "x", "arrival_s": -1}, "arrival_s must be"),
        ('{"prompt": "x", "arrival_s": NaN}', "arrival_s must be"),
        ({"prompt": "x", "priority": "high"}, "priority must be"),
        ({"prompt": "x", "sampling": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"prompt": "x", "sampling": {"top_p": 2}}, "top_p"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(tmp_path, line, says):
    path = write(tmp_path / "p.jsonl", {"prompt": "good"}, "", line, {"prompt": "good"})
    with pytest.raises(UserError) as error:
        items("prompts", path=path)
    assert str(error.value).startswith(f"{path}, line 3: ")
    assert says in str(error.value)


def test_files_that_are_no_prompts_at_all(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        items("prompts", path=str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="holds no requests"):
        items("prompts", path=write(tmp_path / "empty.jsonl", "", ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(UserError, match="not UTF-8"):
        items("prompts", path=str(tmp_path / "latin.jsonl"))


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert [item.prompt for item in items("prompts", path=str(tmp_path / "p.jsonl"))] == ["a", "b"]


def test_the_number_of_requests_cuts_or_goes_around(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": text} for text in "abc"))
    assert [item.prompt for item in items("prompts", path=path, num_requests=2)] == ["a", "b"]
    assert [item.prompt for item in items("prompts", path=path, num_requests=5)] == list("abcab")
    with pytest.raises(UserError, match="num_requests"):
        items("prompts", path=path, num_requests=0)


def test_shuffling_follows_the_seed():
    orders = [[item.prompt or item.messages for item in items("prompts", seed, shuffle=True)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert len(orders[0]) == len(read_prompts(DEFAULT_PROMPTS))


def test_random_is_the_same_for_the_same_seed():
    options = {"num_requests": 20, "input": {"distribution": "uniform", "max": 30}, "arrival": "poisson", "rate": 3.0}
    assert items("random", 1, **options) == items("random", 1, **options) != items("random", 2, **options)


def test_random_avoids_special_tokens_and_keeps_the_vocabulary():
    tokens = {token for item in items("random", num_requests=50) for token in item.prompt_token_ids}
    assert tokens <= set(range(200)) - MODEL.special_ids
    assert len(tokens) == 196  # and everything else occurs


def test_random_prefixes_are_shared_in_turn():
    found = items("random", num_requests=6, prefix_len=9, num_prefixes=2, input={"mean": 4})
    prefixes = [tuple(item.prompt_token_ids[:9]) for item in found]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3] == prefixes[5]
    assert all(len(item.prompt_token_ids) == 13 for item in found)
    assert len({tuple(item.prompt_token_ids[9:]) for item in found}) == 6


def test_random_outputs_have_exact_lengths():
    found = items("random", num_requests=3, output={"mean": 17})
    assert [item.sampling for item in found] == [{"max_tokens": 17, "ignore_eos": True}] * 3


@pytest.mark.parametrize(
    ("lengths", "mean", "deviation"),
    [
        ({"distribution": "uniform", "min": 10, "max": 90}, 50, 81 / 12**0.5),
        ({"distribution": "normal", "mean": 100, "spread": 0.2}, 100, 20),
        ({"distribution": "lognormal", "mean": 100, "spread": 0.6}, 100, 60),
        ({"distribution": "fixed", "mean": 33}, 33, 0),
    ],
)
def test_length_distributions_have_their_mean_and_deviation(lengths, mean, deviation):
    model = ModelFacts(200, 10**6, frozenset(), lambda text: [])
    registry.discover()
    choice = PluginChoice("random", {"num_requests": 4000, "input": lengths, "output": {"mean": 1}})
    found = [len(item.prompt_token_ids) for item in resolve("workload", choice, Needs()).make(3).items(model)]
    assert statistics.fmean(found) == pytest.approx(mean, rel=0.05)
    assert statistics.pstdev(found) == pytest.approx(deviation, rel=0.1)


def test_lengths_are_cut_off_at_the_limits():
    lengths = {"distribution": "normal", "mean": 50, "spread": 1.0, "min": 20, "max": 60}
    found = {len(item.prompt_token_ids) for item in items("random", num_requests=300, input=lengths)}
    assert min(found) == 20 and max(found) == 60 and len(found) > 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_requests": 0}, "workload.num_requests"),
        ({"input": {"min": 0}}, "workload.input.min"),
        ({"output": {"min": 9, "max": 3}}, "workload.output.max"),
        ({"input": {"distribution": "uniform"}}, "needs workload.input.max"),
        ({"input": {"mean": 5, "min": 9}}, "workload.input.mean"),
        ({"input": {"distribution": "normal", "spread": -1.0}}, "workload.input.spread"),
        ({"input": {"mean": 500}}, "context of 512"),
        ({"prefix_len": -1}, "workload.prefix_len"),
        ({"num_prefixes": 0}, "workload.num_prefixes"),
        ({"inptu": {}}, "Did you mean"),
        ({"arrival": "poisson"}, "needs workload.rate"),
        ({"arrival": "poisson", "rate": 0.0}, "workload.rate must be over 0"),
        ({"arrival": "fixed", "rate": -2.0}, "workload.rate must be over 0"),
        ({"rate": 2.0}, "no meaning"),
        ({"arrival": "poisson", "rate": 2.0, "burstiness": 0.5}, "use gamma"),
        ({"arrival": "gamma", "rate": 2.0, "burstiness": 0.0}, "workload.burstiness"),
        ({"arrival": "poison", "rate": 1.0}, "poisson"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(UserError, match=says):
        items("random", **options)


@pytest.mark.parametrize(
    ("arrival", "burstiness", "variation"),
    [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5), ("fixed", 1.0, 0.0)],
)
def test_arrivals_have_the_rate_and_the_burstiness_asked_for(arrival, burstiness, variation):
    times = arrival_times(ArrivalOptions(arrival=arrival, rate=20.0, burstiness=burstiness), 8000, seed=4)
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert times[0] == 0.0 and min(gaps) >= 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.05, rel=0.08)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.08, abs=1e-6)


def test_arrivals_from_the_file_or_all_at_once(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "late", "arrival_s": 3.0}, {"prompt": "early", "arrival_s": 0.5})
    assert [(i.prompt, i.arrival_s) for i in items("prompts", path=path)] == [("early", 0.5), ("late", 3.0)]
    assert [(i.prompt, i.arrival_s) for i in items("prompts", path=path, arrival="at_once")] == [("late", 0.0), ("early", 0.0)]
