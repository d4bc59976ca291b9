"""The prefix cache from outside: whole-block hits, no stale logits, honest counters."""

import json
import os
import subprocess
import sys

import pytest

from lab import SamplingParams
from tests import rigs
from tests.engine.models import open_llm
from tests.golden.oracle import greedy
from tests.test_rules import ROOT

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return rigs.mix(tmp_path_factory.mktemp("mix"))


def ids(num, step=7):
    return [(step * i + 3) % 256 for i in range(num)]


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(32, 16), (33, 32), (16, 0)])
def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(folder, num_prompt, num_cached):
    prompt = ids(num_prompt)
    right = greedy(folder, prompt, 8)
    with open_llm(folder) as llm:
        cold, warm = (llm.generate({"prompt_token_ids": prompt}, PARAMS)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, num_cached)
    assert cold.outputs[0].token_ids == warm.outputs[0].token_ids == right
    first = right[0]
    assert warm.outputs[0].logprobs[0][first].logprob == pytest.approx(cold.outputs[0].logprobs[0][first].logprob, abs=1e-5)


def test_the_counters_are_hits_and_queries_of_this_run(folder):
    prompt = {"prompt_token_ids": ids(33)}
    with open_llm(folder) as llm:
        for _ in range(2):
            llm.generate(prompt, PARAMS)
        cache = llm.metrics()["prefix_cache"]
        assert (cache["queries"], cache["hits"]) == (66, 32)
        assert cache["hit_rate"] == pytest.approx(0.4848, abs=1e-4)
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0))
        cache = llm.metrics()["prefix_cache"]
        assert (cache["queries"], cache["hits"]) == (66, 32)  # it may not read the cache, so it does not count
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


def test_a_block_handed_on_is_not_hit_any_more(folder):
    """With four blocks, Y needs all of them: what was cached of X is gone. With six, some of it may be left."""
    x, y = ids(8), ids(15, step=11)
    short = SamplingParams(temperature=0.0, max_tokens=1)
    right = greedy(folder, x, 4)
    for num_blocks, allowed in ((4, {0}), (6, {0, 4})):
        with open_llm(folder, "cache.block_size=4", f"cache.num_blocks={num_blocks}") as llm:
            four = SamplingParams(temperature=0.0, max_tokens=4)
            first = llm.generate({"prompt_token_ids": x}, four)[0]
            llm.generate({"prompt_token_ids": y}, short)
            again = llm.generate({"prompt_token_ids": x}, four)[0]
        assert again.num_cached_tokens in allowed
        assert first.outputs[0].token_ids == again.outputs[0].token_ids == right


def test_a_salt_keeps_caches_apart(folder):
    with open_llm(folder) as llm:
        hits = []
        for salt in (None, "a", "b", "a", None):
            hits.append(llm.generate({"prompt_token_ids": ids(33), "cache_salt": salt}, PARAMS)[0].num_cached_tokens)
    assert hits == [0, 0, 0, 32, 32]


DIGESTS = """
import json, sys
from pathlib import Path
from lab import SamplingParams
from tests.engine.models import open_llm

with open_llm(Path(sys.argv[1]), "cache.block_size=16") as llm:
    for salt in (None, "salt"):
        prompt = {"prompt_token_ids": list(range(48)), "cache_salt": salt}
        llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1))
    print(json.dumps([digest.hex() for digest in llm.engine.blocks._cached]))
"""


def test_engines_of_two_processes_give_blocks_the_same_identity(folder):
    """Nothing that goes into a digest depends on the process: neither the hash seed nor what the engine adds of its own."""
    command = [sys.executable, "-c", DIGESTS, str(folder)]
    runs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        runs.append(subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes))
    outputs = [run.communicate(timeout=600) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert first == second
    assert len(set(first)) == 6  # three blocks, with the salt and without
