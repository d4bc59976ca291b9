"""LLM from end to end: order, refusals, interruption, chat, metrics, closing."""

import os
import signal
import threading

import pytest
import torch

from lab import LLM, SamplingParams, UserError
from lab.settings import Settings
from tests import rigs
from tests.engine.models import SMALL, count_alpha, open_llm

GREEDY = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return count_alpha(tmp_path_factory.mktemp("count"))


@pytest.fixture(scope="module")
def llm(folder):
    with open_llm(folder) as llm:
        yield llm


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def assert_good(llm):
    assert texts(llm.generate("ABC", GREEDY)) == ["DEFGH"]
    assert llm.metrics()["kv"]["used_blocks"] == 0


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["ABC", {"prompt_token_ids": [5]}, "x", {"prompt": "abc", "cache_salt": "s", "priority": 1}]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (9, 1, 5, 3)]
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == ["DEFGHIJKL", "G", "yz012", "def"]
    assert [output.prompt for output in outputs] == ["ABC", None, "x", "abc"]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_more_threads_than_cores_are_told(folder, caplog):
    num_cores, before = len(os.sched_getaffinity(0)), torch.get_num_threads()
    try:
        with open_llm(folder, f"num_threads={num_cores + 1}") as llm:
            assert_good(llm)
    finally:
        torch.set_num_threads(before)
    told = f"num_threads={num_cores + 1}: this process may use {num_cores} cores, so threads will wait for one another"
    assert told in caplog.messages


def test_the_record_says_that_the_weight_format_was_left_to_lab(llm):
    assert (llm.engine.records["quant"]["asked_for"], llm.engine.records["quant"]["name"]) == ("auto", "none")


def test_overrides_are_a_list(folder):
    with pytest.raises(UserError, match=r"overrides must be a list of texts: overrides=\['cache.block_size=8'\]."):
        LLM(folder, overrides="cache.block_size=8")


def test_one_prompt_is_a_list_of_one_and_none_is_an_empty_list(llm):
    assert texts(llm.generate("ABC", GREEDY)) == ["DEFGH"]
    assert texts(llm.generate({"prompt_token_ids": [0, 1, 2]}, GREEDY)) == ["DEFGH"]
    assert llm.generate([], GREEDY) == []


def test_chat_takes_one_conversation_or_many(llm):
    one = [{"role": "user", "content": "x"}]
    assert texts(llm.chat(one, GREEDY)) == ["BCDEF"]  # after 'Ux/A'
    outputs = llm.chat([one, [*one, {"role": "assistant", "content": "y"}]], GREEDY)
    assert [len(output.prompt_token_ids) for output in outputs] == [4, 7]


def test_what_is_no_list_of_prompts_or_messages_is_refused(llm):
    for prompts in (None, 7):
        with pytest.raises(UserError, match="prompts must be"):
            llm.generate(prompts, GREEDY)
    with pytest.raises(UserError, match=r"prompts\[0\]: a prompt is a string or a mapping"):
        llm.generate([1, 2, 3], GREEDY)
    for messages in ({"role": "user", "content": "x"}, "hello", None):
        with pytest.raises(UserError, match="messages must be"):
            llm.chat(messages, GREEDY)
    with pytest.raises(UserError, match="messages is empty"):
        llm.chat([], GREEDY)


def test_metrics_are_those_of_the_whole_engine(folder):
    with open_llm(folder) as llm:
        llm.generate(["ABC", "AB"], GREEDY)
        metrics = llm.metrics()
        assert (metrics["num_requests"], metrics["prompt_tokens"], metrics["output_tokens"]) == (2, 5, 10)
        assert metrics["prefix_cache"] == {"queries": 5, "hits": 0, "hit_rate": 0.0}
        assert metrics["kv"]["peak_used_blocks"] == 2 and metrics["kv"]["used_blocks"] == 0


def test_the_prefix_cache_can_be_reset(folder):
    with open_llm(folder, "cache.block_size=4") as llm:
        prompt = {"prompt_token_ids": list(range(9))}
        assert [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 8]
        assert llm.reset_prefix_cache() is True
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


BAD_REQUESTS = [
    ({"prompt_token_ids": [-1]}, {}, "token id -1"),
    ({"prompt_token_ids": [64]}, {}, "token id 64"),
    ({"prompt_token_ids": []}, {}, "empty"),
    ("ABC", {"logit_bias": {"64": 5}}, "logit_bias"),
    ("ABC", {"logit_bias": {"-1": 5}}, "logit_bias"),
    ("ABC", {"logit_bias": {"x": 5}}, "logit_bias"),
    ("ABC", {"stop_token_ids": [64], "min_tokens": 1}, "stop_token_ids"),
    ("ABC", {"allowed_token_ids": []}, "allowed_token_ids"),
    ("ABC", {"allowed_token_ids": [64]}, "allowed_token_ids"),
    ("ABC", {"top_k": 0.01}, "top_k"),
    ("ABC", {"temperature": -1}, "temperature"),
    ("ABC", {"temperature": float("nan")}, "temperature"),
    ("ABC", {"top_p": 0}, "top_p"),
    ("ABC", {"top_p": 1.5}, "top_p"),
    ("A\ud800", {}, "the prompt is not text"),
    ("ABC", {"stop": "\ud800"}, r"stop\[0\] is not text"),
    ("ABC", {"n": 0}, "n must be"),
    ("ABC", {"max_tokens": 0}, "max_tokens"),
    ("ABC", {"max_tokens": -1}, "max_tokens"),
    ("ABC", {"logprobs": 10**6}, "logprobs"),
    ("ABC", {"stop": ""}, "stop"),
    ("ABC", {"seed": 2**64}, "seed"),
]


@pytest.mark.parametrize(("prompt", "values", "name"), BAD_REQUESTS)
def test_a_bad_request_among_good_ones_stops_all_by_name_and_the_engine_lives_on(llm, prompt, values, name):
    before = llm.metrics()["num_requests"]
    with pytest.raises(UserError, match=name):
        llm.generate(["A", prompt], [GREEDY, SamplingParams(**values)])
    assert llm.metrics()["num_requests"] == before
    assert_good(llm)


def test_the_message_says_which_prompt_it_was(llm):
    with pytest.raises(UserError, match=r"^prompts\[1\]: the prompt is empty"):
        llm.generate(["A", ""], GREEDY)
    with pytest.raises(UserError, match="^the prompt is empty"):
        llm.generate([""], GREEDY)


def test_a_request_that_can_never_fit_takes_back_those_before_it(folder):
    with open_llm(folder, "cache.num_blocks=4", "cache.block_size=4") as llm:
        with pytest.raises(UserError, match=r"prompts\[1\].* 5 blocks of 4, the cache has 4"):
            llm.generate(["ABC", {"prompt_token_ids": [1] * 20}], SamplingParams(n=2, temperature=0.0, max_tokens=5))
        assert_good(llm)


@pytest.mark.parametrize("params", [[GREEDY], {"temperature": 0}, "greedy", [GREEDY, {"temperature": 0}]])
def test_parameters_of_the_wrong_number_or_kind_are_refused(llm, params):
    with pytest.raises(UserError, match="sampling"):
        llm.generate(["A", "B"], params)


def test_an_interruption_ends_what_runs_and_leaves_the_engine_usable(folder):
    with open_llm(folder) as llm:
        steps = []

        def interrupt(record):
            steps.append(record)
            if len(steps) == 3:
                signal.raise_signal(signal.SIGINT)

        llm.engine.on_step = interrupt
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["ABC"] * 4, SamplingParams(temperature=0.0, max_tokens=100))
        assert len(steps) == 3
        llm.engine.on_step = None
        assert_good(llm)


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_ctrl_c_at_any_moment_leaves_the_engine_usable(folder, is_async):
    with open_llm(folder, f"scheduler.async_scheduling={is_async}") as llm:
        for delay_s in (0.001, 0.004, 0.01, 0.02, 0.03, 0.05):
            timer = threading.Timer(delay_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                timer.start()
                while True:
                    llm.generate(["ABC"] * 4, SamplingParams(temperature=0.0, max_tokens=100))
            assert_good(llm)


def test_a_folder_may_have_any_name(tmp_path):
    folder = count_alpha(tmp_path / "a=b, c's {d} ${e} [f] (g) \\h")
    with open_llm(folder) as llm:
        assert_good(llm)


def test_the_plugins_named_are_those_that_run(folder):
    with open_llm(folder, attention="eager", spec="ngram") as llm:
        assert (llm.settings.attention.name, llm.settings.spec.name) == ("eager", "ngram")
        assert_good(llm)
    with pytest.raises(UserError, match="no attention plugin named 'egaer'. Did you mean 'eager'"):
        open_llm(folder, attention="egaer")


def test_ready_settings_are_taken_and_nothing_beside_them(folder):
    with open_llm(folder) as llm:
        settings = llm.settings
    with LLM(settings=settings) as llm:
        assert_good(llm)
    with pytest.raises(UserError, match="settings were given, so model, spec must not be"):
        LLM(folder, spec="none", settings=Settings())


def test_a_model_named_twice_is_refused(folder):
    with pytest.raises(UserError, match="named twice"):
        LLM(folder, overrides=["model.path=x"])


def test_the_model_may_be_named_by_an_override(folder):
    with LLM(overrides=[*SMALL, f"model.path='{folder}'"]) as llm:
        assert_good(llm)


def test_the_defaults_of_the_settings_serve_calls_without_parameters(folder):
    with open_llm(folder, "sampling.temperature=0.0", "sampling.max_tokens=2") as llm:
        assert texts(llm.generate("ABC")) == ["DE"]


def test_closing_twice_does_no_harm_and_a_closed_one_says_so(folder):
    llm = open_llm(folder)
    assert_good(llm)
    llm.close()
    llm.close()
    with pytest.raises(UserError, match="closed"):
        llm.generate("ABC", GREEDY)


def test_another_thread_is_refused_while_one_generates(folder):
    with open_llm(folder) as llm:
        refused = []

        def meddle(_):
            if not refused:
                thread = threading.Thread(
                    target=lambda: refused.extend(map(_message, (lambda: llm.generate("ABC"), llm.close)))
                )
                thread.start()
                thread.join()

        llm.engine.on_step = meddle
        assert texts(llm.generate("ABC", GREEDY)) == ["DEFGH"]
        assert refused == ["this LLM is generating in another thread: AsyncLLM serves several at once."] * 2
        assert_good(llm)


def _message(call):
    try:
        call()
    except UserError as error:
        return str(error)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_refused_and_may_close(folder):
    with open_llm(folder) as llm:
        assert_good(llm)
        child = os.fork()
        if child == 0:
            said = _message(lambda: llm.generate("ABC", GREEDY))
            llm.close()
            os._exit(0 if said and said.startswith("this LLM was made by another process") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_good(llm)


def test_a_model_without_tokenizer_generates_from_ids(tmp_path):
    with open_llm(rigs.count(tmp_path)) as llm:
        out = llm.generate({"prompt_token_ids": [1]}, GREEDY)[0].outputs[0]
        assert (out.text, out.token_ids) == ("", [2, 3, 4, 5, 6])
        with pytest.raises(UserError, match="no tokenizer"):
            llm.generate("ABC", GREEDY)


def test_progress_shows_a_bar(llm, capsys):
    assert texts(llm.generate("ABC", GREEDY, progress=True)) == ["DEFGH"]
    assert "1/1" in capsys.readouterr().out


def test_a_misspelt_argument_is_told(tmp_path):
    with pytest.raises(
        UserError, match=r"LLM takes no argument 'atention'. Did you mean 'attention'\?\nAvailable: model, attention"
    ):
        LLM(tmp_path, atention="sdpa")
    with pytest.raises(UserError, match="any setting goes into overrides"):
        LLM(tmp_path, gpu_memory_utilization=0.9)


RAISING = """
from lab.api import Proposer, register


@register("spec", "raising")
class Raising(Proposer):
    num_drafts = 2

    def propose(self, view):
        raise RuntimeError("no drafts today")
"""


def test_a_plugin_that_raises_in_a_step_is_named(tmp_path, own_registry):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "raising.py").write_text(RAISING)
    own_registry.discover([tmp_path / "mine"])
    with open_llm(count_alpha(tmp_path / "count"), spec="raising") as llm:
        (output,) = llm.generate("ABC", SamplingParams(max_tokens=4))
    path = tmp_path / "mine" / "raising.py"
    assert output.error == f"spec plugin 'raising' ({path}) failed: RuntimeError: no drafts today"
