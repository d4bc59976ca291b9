"""From prompts and parameters to requests: tokenisation, every refusal, limits, seeds and samples."""

import json

import pytest
from transformers import AutoTokenizer

from lab.engine.frontend import Frontend
from lab.engine.tokenizer import load_tokenizer
from lab.errors import UserError
from lab.sampling_params import SamplingParams
from tests import rigs
from tests.engine import toy_tokenizers
from tests.engine.scripted import ScriptedEngine


@pytest.fixture(scope="module")
def alpha(tmp_path_factory):
    return load_tokenizer(rigs.alpha_tokenizer(tmp_path_factory.mktemp("alpha")))


@pytest.fixture
def engine():
    return ScriptedEngine(vocab_size=64, max_model_len=16, eos_ids=frozenset({5}))


@pytest.fixture
def frontend(engine, alpha):
    return Frontend(engine, alpha)


def ids(*tokens):
    return {"prompt_token_ids": list(tokens)}


def test_a_string_is_tokenised(frontend):
    submission = frontend.prepare("ABC")
    assert (submission.prompt, submission.prompt_ids) == ("ABC", [0, 1, 2])
    assert submission.requests[0].prompt_ids == [0, 1, 2]
    assert frontend.prepare({"prompt": "ABC"}).prompt_ids == [0, 1, 2]


def test_a_long_prompt_is_refused_without_a_word_of_transformers(tmp_path):
    """Which would warn of it on the console, beside our message."""
    tokenizer = load_tokenizer(rigs.alpha_tokenizer(tmp_path))
    tokenizer.model_max_length = 8
    short = Frontend(ScriptedEngine(vocab_size=64, max_model_len=16, eos_ids=frozenset()), tokenizer)
    assert len(short.prepare("ABCDEFGHIJ").prompt_ids) == 10
    assert tokenizer.deprecation_warnings == {}  # where transformers notes what it has warned of
    tokenizer.encode("ABCDEFGHIJ")
    assert tokenizer.deprecation_warnings


def test_special_tokens_are_added_as_the_tokenizer_does(engine):
    from tokenizers.processors import TemplateProcessing

    tokenizer = toy_tokenizers.no_decoder()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    one = tokenizer.convert_tokens_to_ids("one")
    assert Frontend(engine, tokenizer).prepare("one").prompt_ids == [bos, one]
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    messages = {"messages": [{"role": "user", "content": "one"}]}
    assert Frontend(engine, tokenizer).prepare(messages).prompt_ids == [one]  # a template writes them itself


def test_ids_are_taken_as_they_are(frontend):
    submission = frontend.prepare({"prompt_token_ids": (3, 1)})
    assert (submission.prompt, submission.prompt_ids) == (None, [3, 1])


def test_messages_go_through_the_chat_template(frontend):
    submission = frontend.prepare({"messages": [{"role": "user", "content": "bc"}, {"role": "system", "content": "Z"}]})
    assert frontend.tokenizer.decode(submission.prompt_ids) == "Ubc/SZ/A"


def test_what_a_mapping_may_say_besides_reaches_the_request(frontend):
    request = frontend.prepare({**ids(1), "cache_salt": "x", "priority": -2, "arrival_s": 7.5}).requests[0]
    assert (request.cache_salt, request.priority, request.arrival_s) == ("x", -2, 7.5)


def test_without_an_arrival_it_is_now(frontend, engine):
    engine.now_s = 3.25
    assert frontend.prepare(ids(1)).requests[0].arrival_s == 3.25


BAD_PROMPTS = [
    ("", "the prompt is empty"),
    (ids(), "the prompt is empty"),
    (ids(-1), "token id -1"),
    (ids(64), "token id 64; the vocabulary has 0 to 63"),
    (ids(1.5), "whole numbers, got 1.5"),
    (ids(True), "whole numbers, got True"),
    ({"prompt_token_ids": "12"}, "list of token ids"),
    ({"prompt_token_ids": 12}, "list of token ids"),
    (17, "a prompt is a string or a mapping"),
    ([1, 2], "a prompt is a string or a mapping"),
    ({}, "exactly one of prompt, prompt_token_ids, messages; got none"),
    ({"prompt": "A", "messages": []}, "got prompt and messages"),
    ({"promt": "A"}, "no field of a prompt named 'promt'. Did you mean 'prompt'"),
    ({"prompt": [1, 2]}, "prompt must be a string"),
    ("A B", "cannot encode 'A B'"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, r"messages\[0\] must be"),
    ({"messages": ["hello"]}, r"messages\[0\] must be"),
    ("A\ud800", r"the prompt is not text: its character 1 is '\\ud800', half of a surrogate pair"),
    ({"messages": [{"role": "user", "content": "\udfff"}]}, r"messages\[0\]\.content is not text: its character 0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "A\ud800"}]}]},
        r"messages\[0\]\.content\[0\]\.text is not text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "image", "url": "a.png"}]}]},
        r"messages\[0\]\.content\[1\] is of type 'image': lab takes text only",
    ),
    ({**ids(1), "cache_salt": "\ud800"}, "cache_salt is not text"),
    ({**ids(1), "priority": "high"}, "priority must be a whole number"),
    ({**ids(1), "cache_salt": ""}, "cache_salt must be a string"),
    ({**ids(1), "cache_salt": 7}, "cache_salt must be a string"),
    ({**ids(1), "arrival_s": "now"}, "arrival_s must be a number"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_name_and_the_next_one_works(frontend, prompt, message):
    with pytest.raises(UserError, match=message):
        frontend.prepare(prompt)
    assert frontend.prepare("A").prompt_ids == [0]


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(logit_bias={"64": 5}), "logit_bias"),
        (SamplingParams(stop_token_ids=[64], min_tokens=1), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=[64]), "allowed_token_ids"),
        (SamplingParams(logprobs=65), "logprobs"),
        (SamplingParams(bad_words=["A B"]), "bad_words has 'A B'"),
        ({"temperature": 0}, "must be a SamplingParams"),
    ],
)
def test_parameters_that_the_model_does_not_allow_are_refused_by_name(frontend, params, name):
    with pytest.raises(UserError, match=name):
        frontend.prepare("A", params)


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers(frontend, num_tokens):
    with pytest.raises(UserError, match=f"the prompt has {num_tokens} tokens; the context limit is 16"):
        frontend.prepare(ids(*range(num_tokens)))


@pytest.mark.parametrize(("num_prompt", "asked", "given"), [(15, 5, 1), (8, 9, 8), (8, None, 8), (8, 3, 3)])
def test_max_tokens_never_passes_the_context_limit(frontend, num_prompt, asked, given):
    submission = frontend.prepare(ids(*range(num_prompt)), SamplingParams(max_tokens=asked))
    assert submission.requests[0].params.max_tokens == given
    assert submission.params.max_tokens == asked


def test_min_tokens_that_the_context_has_no_room_for_is_refused(frontend):
    with pytest.raises(UserError, match="min_tokens 9 cannot be reached: the prompt has 8 tokens; the context limit is 16"):
        frontend.prepare(ids(*range(8)), SamplingParams(min_tokens=9, max_tokens=None))


def test_eos_comes_from_the_model_unless_it_is_ignored(frontend):
    assert frontend.prepare("A").requests[0].eos_ids == {5}
    assert frontend.prepare("A", SamplingParams(ignore_eos=True)).requests[0].eos_ids == frozenset()


def test_bad_words_are_spelled_with_and_without_a_leading_space(engine):
    tokenizer = toy_tokenizers.byte_level()
    engine.model_config.vocab_size = len(tokenizer)
    params = Frontend(engine, tokenizer).prepare("A", SamplingParams(bad_words=["end"])).requests[0].params
    plain, spaced = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("end", " end"))
    assert params.bad_words_ids == (plain, spaced) and plain != spaced


def test_a_vocabulary_without_a_space_spells_a_bad_word_one_way(frontend):
    params = frontend.prepare("A", SamplingParams(bad_words=["BC", "D"])).requests[0].params
    assert params.bad_words_ids == ((1, 2), (3,))


def test_several_samples_are_requests_with_following_seeds_that_share_their_prompt(frontend):
    submission = frontend.prepare("AB", SamplingParams(n=3, seed=2**64 - 2, prompt_logprobs=1), request_id="x")
    requests = submission.requests
    assert [r.id for r in requests] == ["x-0", "x-1", "x-2"]
    assert [r.seed for r in requests] == [2**64 - 2, 2**64 - 1, 0]
    assert {r.fork_group for r in requests} == {"x"}
    assert {r.params.n for r in requests} == {1}
    assert [r.params.prompt_logprobs for r in requests] == [1, None, None]
    assert [r.arrival_index for r in requests] == [0, 1, 2]
    assert frontend.prepare("A").requests[0].arrival_index == 3


def test_one_sample_has_the_id_itself_and_no_group(frontend):
    request = frontend.prepare("A", request_id="x").requests[0]
    assert (request.id, request.fork_group) == ("x", None)


def test_requests_without_a_seed_differ_and_repeat_in_a_new_run(engine, alpha):
    def seeds(seed):
        frontend = Frontend(engine, alpha, seed=seed)
        return [frontend.prepare("A").requests[0].seed for _ in range(50)]

    assert len(set(seeds(0))) == 50
    assert seeds(0) == seeds(0)
    assert not set(seeds(0)) & set(seeds(1))
    assert seeds(0)[0] == 7120306904099482837  # the same in every process and version


def test_the_defaults_serve_requests_that_give_no_parameters(engine, alpha):
    frontend = Frontend(engine, alpha, defaults=SamplingParams(temperature=0.25))
    assert frontend.prepare("A").requests[0].params.temperature == 0.25
    assert frontend.prepare("A", SamplingParams()).requests[0].params.temperature == 1.0


def test_a_model_without_tokenizer_takes_ids_and_nothing_that_needs_text(engine, tmp_path):
    assert load_tokenizer(tmp_path) is None
    frontend = Frontend(engine, None)
    assert frontend.prepare(ids(1, 2)).prompt_ids == [1, 2]
    for prompt in ("A", {"messages": [{"role": "user", "content": "A"}]}):
        with pytest.raises(UserError, match="no tokenizer: give the prompt as prompt_token_ids"):
            frontend.prepare(prompt)
    for params in (SamplingParams(stop="A"), SamplingParams(bad_words=["A"])):
        with pytest.raises(UserError, match="needs a tokenizer, and this model has none"):
            frontend.prepare(ids(1), params)


def test_messages_without_a_chat_template_are_refused(engine):
    frontend = Frontend(engine, toy_tokenizers.no_decoder())
    with pytest.raises(UserError, match="need a chat template"):
        frontend.prepare({"messages": [{"role": "user", "content": "one"}]})


def test_what_the_template_itself_refuses_is_said_in_its_words(engine, alpha):
    tokenizer = AutoTokenizer.from_pretrained(alpha.name_or_path)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="refuses these messages: roles must alternate"):
        Frontend(engine, tokenizer).prepare({"messages": [{"role": "user", "content": "A"}]})


def test_a_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(UserError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_half_a_surrogate_pair_in_a_parameter_is_refused_by_name(frontend, name):
    with pytest.raises(UserError, match=rf"sampling: {name}\[1\] is not text: its character 2 is '\\ud83d'"):
        frontend.prepare("A", SamplingParams(**{name: ["A", "BC\ud83d"]}))
    assert frontend.prepare("A", SamplingParams(**{name: ["A", "B"]})).prompt_ids == [0]
