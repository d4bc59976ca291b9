"""The nearest name: real typos are answered, other words are not."""

import pytest

from lab.errors import nearest

MODELS = ["LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("word", "choices", "meant"),
    [
        ("flsh", ["eager", "flash", "sdpa"], "flash"),
        ("eagr", ["eager", "flash", "sdpa"], "eager"),
        ("sdap", ["eager", "flash", "sdpa"], "sdpa"),
        ("rnu", ["run", "check"], "run"),
        ("tempratur", ["temperature", "top_p", "max_tokens"], "temperature"),
        ("block_sise", ["block_size", "num_blocks"], "block_size"),
        ("yarm", ["yarn", "linear"], "yarn"),
        ("max_batched_tokens", ["max_num_batched_tokens", "max_num_seqs"], "max_num_batched_tokens"),
        ("tft", ["ttft", "tpot", "e2e"], "ttft"),
        ("LamaForCausalLM", MODELS, "LlamaForCausalLM"),
        ("FooForCausalLM", MODELS, None),
        ("GemmaForCausalLM", MODELS, None),
        ("tpu", ["auto", "cpu", "cuda"], None),
        ("--foo", ["--json", "--help", "--plugins"], None),
        ("prio", ["fcfs", "priority"], "priority"),
        ("bf16", ["auto", "float32", "bfloat16", "float16"], "bfloat16"),
        ("temp", ["temperature", "template"], None),
        ("x", [], None),
    ],
)
def test_nearest(word, choices, meant):
    assert nearest(word, choices) == meant
