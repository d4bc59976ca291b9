"""debug.batch_invariant: a request's tokens and log-probabilities have the same bits whatever is computed beside it."""

import json
import struct

import numpy as np
import pytest

from lab import SamplingParams
from lab.errors import UserError
from tests import draft_heads, plugin_files, rigs
from tests.engine.models import open_llm

SHAPE = {"hidden_size": 192, "intermediate_size": 352, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
PROMPT = [(7 * i + i // 3) % 64 for i in range(150)]
ASKED = [
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=3),
    SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=9, logprobs=3),
]
OTHERS = [[(3 * i + j) % 64 for j in range(n)] for i, n in enumerate((1, 5, 16, 33, 70, 101, 149, 2, 17))]
POOL = "cache.num_blocks=128"
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"), **SHAPE)


def bits(output):
    """All that a request's tokens and log-probabilities are, to the last bit."""
    (sample,) = output.outputs
    entries = [[(token, struct.pack("<d", found.logprob)) for token, found in place.items()] for place in sample.logprobs]
    return sample.token_ids, entries


class Bench:
    """One model and dtype, asked the same again and again."""

    def __init__(self, model, dtype, *overrides, invariant=True):
        self.model = model
        self.overrides = [POOL, f"model.dtype={dtype}", *overrides, f"debug.batch_invariant={str(invariant).lower()}"]

    def __call__(self, *overrides, others=(), first=True, **arguments):
        """What ASKED came to, and the outputs, of prompts with the given ones before (or behind) them."""
        with open_llm(self.model, *self.overrides, *overrides, **arguments) as llm:
            asked = [({"prompt_token_ids": PROMPT}, params) for params in ASKED]
            noise = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
            rest = [({"prompt_token_ids": ids}, noise) for ids in others]
            both = [*asked, *rest] if first else [*rest, *asked]
            outputs = llm.generate([prompt for prompt, _ in both], [params for _, params in both])
            mine = outputs[: len(asked)] if first else outputs[-len(asked) :]
            return [bits(output) for output in mine], mine, llm.metrics()

    def alone(self, *overrides, **arguments):
        """Each of ASKED in an engine of its own."""
        found = []
        for params in ASKED:
            with open_llm(self.model, *self.overrides, *overrides, **arguments) as llm:
                found.append(bits(llm.generate({"prompt_token_ids": PROMPT}, params)[0]))
        return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_keeps_its_bits(model, dtype):
    ask = Bench(model, dtype, "+attention=eager")
    assert ask("scheduler.max_num_batched_tokens=31", others=OTHERS, first=False)[0] == ask.alone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_beside_any_others_and_in_any_chunks(model, dtype):
    ask = Bench(model, dtype, "+attention=flash")
    wanted = ask.alone()
    assert ask(others=OTHERS, first=False)[0] == wanted
    assert ask("scheduler.max_num_seqs=3", "scheduler.async_scheduling=false", others=OTHERS)[0] == wanted
    for budget in (1, 7, 64):
        assert ask(f"scheduler.max_num_batched_tokens={budget}", others=OTHERS[:4])[0] == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_after_preemptions_with_a_cached_prefix_with_drafts_and_on_two_threads(model, dtype):
    ask = Bench(model, dtype)
    wanted = ask.alone()
    found, _, metrics = ask("debug.preempt_every=3", "scheduler.max_num_batched_tokens=40", others=OTHERS)
    assert metrics["preemptions"] > 2 and found == wanted
    found, outputs, _ = ask("scheduler.max_num_batched_tokens=64", others=[PROMPT, PROMPT[:100]], first=False)
    assert outputs[0].num_cached_tokens > 0 and found == wanted
    found, _, metrics = ask("spec.min_n=1", spec="ngram", others=OTHERS)
    assert metrics["draft_tokens"] > 0 and found == wanted
    assert ask("num_threads=2", others=OTHERS)[0] == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_longer_than_what_is_summed_up_at_once(model, dtype):
    """Whole, in chunks that end on either side of its pieces, and with threads that have a piece each."""
    prompt = [(5 * i + i // 7) % 64 for i in range(1100)]
    asking = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2)
    found = []
    for overrides, others in ((["num_threads=1"], 0), (["scheduler.max_num_batched_tokens=170"], 3), (["num_threads=2"], 2)):
        given = [POOL, "model.max_model_len=2048", f"model.dtype={dtype}", "debug.batch_invariant=true", "+attention=flash"]
        with open_llm(model, *given, *overrides) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in (prompt, *OTHERS[:others])]
            found.append(bits(llm.generate(prompts, [asking] * len(prompts))[0]))
    assert found[0] == found[1] == found[2]


@pytest.fixture(scope="module")
def drafters(model, tmp_path_factory):
    """Overrides of each proposer that says that it keeps a request's bits, but replay."""
    folder = tmp_path_factory.mktemp("drafters")
    other = rigs.mix(folder / "other", seed=3, num_hidden_layers=1)
    head = draft_heads.random(folder / "head", model, "eagle3")
    heads = draft_heads.medusa(folder / "heads", hidden_size=SHAPE["hidden_size"], num_heads=3)
    return {
        "suffix": ["spec.min_match=1", "spec.min_share=0"],
        "draft_model": [f"spec.model={other}", "spec.draw=false"],
        "eagle": [f"spec.head={head}", "spec.draw=false"],
        "medusa": [f"spec.head={heads}", "spec.draw=false"],
        "mtp": [f"spec.head={draft_heads.mtp(folder / 'mtp', model, 'deepseek')}", "spec.num_drafts=2", "spec.draw=false"],
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["suffix", "replay", "draft_model", "eagle", "medusa", "mtp"])
def test_the_same_bits_with_drafts_of_every_proposer_that_claims_it(model, drafters, tmp_path, name, dtype):
    wanted = Bench(model, dtype).alone()
    if name == "replay":
        known = tmp_path / "known.jsonl"
        known.write_text(json.dumps({"prompt_token_ids": PROMPT, "output_token_ids": wanted[0][0]}) + "\n")
        drafters = {"replay": [f"spec.path={known}", "spec.acceptance=[0.8]"]}
    ask = Bench(model, dtype, *drafters[name])
    for overrides in ([], ["scheduler.max_num_batched_tokens=40", "debug.preempt_every=3", "scheduler.async_scheduling=false"]):
        found, _, metrics = ask(*overrides, spec=name, others=OTHERS)
        assert metrics["draft_tokens"] > 0 and found == wanted


@pytest.mark.parametrize("name", ["draft_model", "eagle", "medusa", "mtp"])
def test_drafts_that_are_drawn_are_refused(model, drafters, name):
    options = [option for option in drafters[name] if option != "spec.draw=false"]
    message = rf"spec plugin '{name}' cannot serve this run: it has no batch_invariant \(it has with spec\.draw=false\)"
    with pytest.raises(UserError, match=message):
        open_llm(model, "debug.batch_invariant=true", *options, spec=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantized_cache_and_prompts_keep_their_bits(model, dtype):
    asking = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    found = []
    for budget in (4096, 23):
        overrides = [POOL, f"model.dtype={dtype}", "debug.batch_invariant=true", "cache.dtype=int8"]
        with open_llm(model, *overrides, f"scheduler.max_num_batched_tokens={budget}") as llm:
            prompts = [{"prompt_token_ids": PROMPT}] + ([] if budget == 4096 else [{"prompt_token_ids": x} for x in OTHERS])
            entries = llm.generate(prompts, [asking] * len(prompts))[0].prompt_logprobs
        found.append([[(token, struct.pack("<d", x.logprob)) for token, x in place.items()] for place in entries[1:]])
    assert len(found[0]) == len(PROMPT) - 1 and found[0] == found[1]


def test_compiled_pieces_keep_the_bits(model):
    ask = Bench(model, "bfloat16", "compile.mode=piecewise")
    wanted = ask.alone("compile.mode=none")
    assert ask(others=OTHERS)[0] == wanted
    assert ask("scheduler.max_num_batched_tokens=17", others=OTHERS)[0] == wanted


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_the_mode_bits_do_depend_on_the_batch(model, dtype):
    """So the tests above can fail."""
    ask = Bench(model, dtype, invariant=False)
    alone = ask.alone()
    assert any(ask(*how, others=OTHERS)[0] != alone for how in ([], ["scheduler.max_num_batched_tokens=7"]))


@pytest.mark.parametrize(
    ("arguments", "overrides", "reason"),
    [
        ({"attention": "sdpa"}, [], "attention plugin 'sdpa' cannot serve this run: it has no batch_invariant"),
        ({"attention": "flex"}, [], "it has no batch_invariant"),
        ({"attention": "hybrid"}, [], "attention plugin 'hybrid' cannot serve this run: .*batch_invariant"),
        ({}, ["+attention=flash", "attention.cascade=64"], "attention.cascade=64: with debug.batch_invariant=true"),
        ({}, ["model.dtype=float16"], "debug.batch_invariant: .*float32 and\\s+bfloat16 on the CPU"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(model, arguments, overrides, reason):
    with pytest.raises(UserError, match=reason):
        open_llm(model, "debug.batch_invariant=true", *overrides, **arguments)


def test_a_plugin_that_does_not_declare_it_is_refused(model, tmp_path, own_registry):
    plugin_files.attention(tmp_path, "mine")
    own_registry.discover([tmp_path])
    with pytest.raises(UserError, match="attention plugin 'mine' cannot serve this run: .*it has no batch_invariant"):
        open_llm(model, "debug.batch_invariant=true", attention="mine")


def test_bits_tell_the_nearest_numbers_apart():
    first = float(np.float32(-1.5))
    assert struct.pack("<d", first) != struct.pack("<d", float(np.nextafter(np.float32(first), np.float32(0))))
