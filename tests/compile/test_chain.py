"""A forward pass without Python: when it is had, and that it gives what the pieces give one by one."""

import pytest
import torch

from lab.compile.chain import Chain
from tests.compile.conftest import generate


def direct(llm):
    return llm.engine._executor._runner.forward


def executable(llm):
    return direct(llm).forms["piecewise"]


@pytest.fixture
def served(monkeypatch):
    """The chains that ran, one entry a step."""
    found = []
    run = Chain.run

    def noted(chain, *arguments):
        found.append(chain)
        return run(chain, *arguments)

    monkeypatch.setattr(Chain, "run", noted)
    return found


def test_flash_runs_every_step_as_one_chain(open_llm, eager_tokens, served):
    with open_llm("attention=flash") as llm:
        served.clear()
        tokens, steps = generate(llm)
        assert len(served) == len(steps) and len(set(served)) == 1
    assert tokens == eager_tokens


def test_the_chain_gives_the_bits_of_its_calls_made_one_by_one(open_llm, monkeypatch):
    """Hidden states and caches, in every step of a run with prefills, mixed steps and decodes."""
    compared = []

    def run(key, batch, kv):
        before = [cache.clone() for cache in kv]
        outputs = []
        for chain in (no_chain, chain_of):
            for cache, content in zip(kv, before, strict=True):
                cache.copy_(content)
            monkeypatch.setattr(pieces, "chain", chain)
            outputs.append([run_directly(key, batch, kv), *(cache.clone() for cache in kv)])
        compared.append(all(torch.equal(a, b) for a, b in zip(*outputs, strict=True)))
        return outputs[1][0]

    def no_chain(step):
        return None

    with open_llm("attention=flash", "cache.num_blocks=60", "scheduler.max_num_batched_tokens=40") as llm:
        pieces, run_directly = executable(llm), direct(llm).run
        chain_of = pieces.chain
        monkeypatch.setattr(direct(llm), "run", run)
        generate(llm)
    assert len(compared) >= 12 and all(compared)


@pytest.mark.parametrize("attention", ["sdpa", "hybrid"])
def test_attention_that_is_more_than_operators_is_called_from_python(open_llm, eager_tokens, served, attention):
    with open_llm(f"attention={attention}") as llm:
        assert generate(llm)[0] == eager_tokens
    assert not served


def test_watched_pieces_run_one_by_one(open_llm, eager_tokens, served):
    timed = []

    def watch(name, call):
        def timing(*arguments, **options):
            timed.append(name)
            return call(*arguments, **options)

        return timing

    with open_llm("attention=flash") as llm:
        generate(llm)
        assert served
        llm.engine.reset_prefix_cache()
        llm.engine._executor._runner.watch(watch)
        served.clear()
        assert generate(llm)[0] == eager_tokens
    assert not served and {"attention write", "attention attend", "piece 0"} <= set(timed)
