"""Sampling parameters: every bad value is refused by the name of its field, and good ones come through unchanged."""

import dataclasses
import math
import subprocess
import sys

import pytest

from lab.errors import UserError
from lab.sampling_params import MAX_LOGPROBS, SamplingParams

BAD_VALUES = [
    ("n", 0),
    ("n", 1.5),
    ("n", True),
    ("temperature", -1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", 0.01),
    ("top_k", -2),
    ("min_p", 1.1),
    ("min_p", -0.1),
    ("presence_penalty", math.nan),
    ("frequency_penalty", math.inf),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("logit_bias", {"x": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {1.5: 5}),
    ("logit_bias", {True: 5}),
    ("logit_bias", {3: math.inf}),
    ("logit_bias", [3, 5]),
    ("bad_words", [""]),
    ("bad_words", [7]),
    ("bad_words", 7),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", 7),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 7),
    ("stop", b"a"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["7"]),
    ("stop_token_ids", 0),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", None),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("max_drafts", -1),
    ("max_drafts", True),
    ("max_drafts", "none"),
    ("logprobs", 10**6),
    ("logprobs", -1),
    ("prompt_logprobs", 10**6),
    ("seed", 2**64),
    ("seed", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


def test_every_field_is_tried_with_a_bad_value():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields - {name for name, _ in BAD_VALUES} == {"bad_words_ids"}  # which only the front writes


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {"64": 5}},
        {"allowed_token_ids": [64]},
        {"stop_token_ids": [64], "min_tokens": 1},
        {"logprobs": 65},
        {"prompt_logprobs": 65},
    ],
)
def test_what_the_vocabulary_does_not_have_is_refused_by_name(values):
    params = SamplingParams(**values)
    with pytest.raises(UserError, match=next(iter(values))):
        params.check(64)
    params.check(65)


def test_min_tokens_over_max_tokens_is_refused_with_both_numbers():
    with pytest.raises(UserError, match="min_tokens 5 .* max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_one_string_or_id_lists_of_any_kind_are_taken():
    params = SamplingParams(stop="END", bad_words=["no"], stop_token_ids=range(2), logit_bias={"3": 1, 4: -1})
    assert params.stop == ("END",)
    assert params.bad_words == ("no",)
    assert params.stop_token_ids == (0, 1)
    assert params.logit_bias == {3: 1.0, 4: -1.0}
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_the_limits_themselves_are_allowed():
    SamplingParams(top_p=1.0, min_p=1.0, top_k=-1, seed=2**64 - 1, logprobs=0, prompt_logprobs=0, max_tokens=None, n=1024)
    SamplingParams(presence_penalty=9.0, frequency_penalty=-9.0, repetition_penalty=100.0)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-40, True), (1e-6, True), (1e-4, False), (1.0, False)])
def test_tiny_temperatures_are_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_from_mapping_names_the_nearest_parameter():
    with pytest.raises(UserError, match="no parameter named 'temprature'. Did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1})
    with pytest.raises(UserError, match="bad_words_ids"):
        SamplingParams.from_mapping({"bad_words_ids": ()})


@pytest.mark.parametrize("name", ["response_format", "structured_outputs", "guided_regex"])
def test_a_constraint_that_lab_does_not_know_is_refused_and_not_left_out(name):
    with pytest.raises(UserError, match=f"no parameter named '{name}'"):
        SamplingParams.from_mapping({name: "D(E|X)F"})
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: "D(E|X)F"})


def test_from_mapping_keeps_the_base_where_nothing_is_said():
    base = SamplingParams(temperature=0.0, max_tokens=7)
    assert SamplingParams.from_mapping({"top_k": 3}, base) == SamplingParams(temperature=0.0, max_tokens=7, top_k=3)


def test_the_package_is_imported_without_torch():
    code = "import sys, lab; lab.SamplingParams(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_the_most_logprobs_are_those_that_the_docstring_says(name):
    assert f"0 to {MAX_LOGPROBS} " in SamplingParams.__doc__
    assert getattr(SamplingParams(**{name: MAX_LOGPROBS}), name) == MAX_LOGPROBS
    with pytest.raises(UserError, match=f"{name} must be from 0 to {MAX_LOGPROBS}"):
        SamplingParams(**{name: MAX_LOGPROBS + 1})
