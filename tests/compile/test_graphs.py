"""Captured graphs without a GPU: a runtime that records on the CPU, and replays only what a captured graph could see."""

import logging
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from lab import context, registry
from lab.compile.dispatch import Dispatcher, settle
from lab.compile.graphs import DirectForward, GraphStore
from lab.runner.batch import BatchBuilder
from lab.runner.buffers import InputBuffers
from tests.compile.conftest import NUM_LAYERS, PROMPTS, generate

SIZES = [1, 2, 4, 8]


class RecordingRuntime:
    """Replays by running the work again in the context of its capture, and writes the results where they were then."""

    def __init__(self):
        self.num_captures = 0
        self.num_replays = 0
        self.bytes_in_use = 0
        self.num_forgotten = 0
        self.is_capturing = False

    def capture(self, work):
        assert self.is_capturing
        opened = context._open[-1] if context._open else None
        results = work()
        self.num_captures += 1
        self.bytes_in_use += 100

        def replay():
            self.num_replays += 1
            if opened is None:
                found = work()
            else:
                with context.forward_context(opened):
                    found = work()
            for old, new in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (results, found)), strict=True):
                old.copy_(new)

        return replay, results

    def alias(self, tensor):
        return tensor.view(tensor.shape)

    @contextmanager
    def capturing(self):
        assert not self.is_capturing
        self.is_capturing = True
        yield
        self.is_capturing = False

    def forget(self):
        self.num_forgotten += 1

    def memory_in_use(self):
        return self.bytes_in_use


@pytest.fixture
def reusing():
    """The reference backend with plans that can be filled again, which is what a captured graph needs."""
    registry.discover()

    class Reusing(registry.get("attention", "eager").load()):
        num_reused = 0

        def plan(self, batch, reuse=None):
            plan = super().plan(batch)
            if reuse is None:
                return plan
            assert plan.blocks_RM.data_ptr() == reuse.blocks_RM.data_ptr()
            reuse.q_start[:], reuse.ctx_len[:] = plan.q_start, plan.ctx_len  # the rows of a mixed graph change in number
            Reusing.num_reused += 1
            return reuse

    return Reusing


@pytest.fixture
def captured(open_llm, reusing):
    """(llm, store, runtime): an engine whose runner replays recorded graphs."""

    def made(asked, sizes=SIZES):
        llm = open_llm("scheduler.async_scheduling=false", "scheduler.max_num_seqs=8", "cache.enable_prefix_caching=false")
        runner = llm.engine._executor._runner
        backends = {id(b): reusing(b.options, b.spec) for b in runner.forward.backends}
        direct = DirectForward([backends[id(b)] for b in runner.forward.backends], runner.forward.forms)
        modes = settle(asked, graph_support="any" if asked == "full" else "uniform", has_pieces=True, uniform_q=1)
        runner.dispatcher = Dispatcher(modes, sizes, max_rows=8)
        buffers = InputBuffers(2048, 8, runner.rows.blocks_RM.shape[1], torch.device("cpu"))
        runner.builder = BatchBuilder(runner.rows, 16, torch.device("cpu"), buffers, llm.engine.max_model_len)
        runtime = RecordingRuntime()
        store = GraphStore(direct, runner.forward.forms["piecewise"], runner.dispatcher, runner.builder, runtime)
        store.capture(runner.store.layers)
        runner.forward = store
        return llm, store, runtime

    return made


@pytest.mark.parametrize("asked", ["piecewise", "full", "full_decode_only", "full_and_piecewise"])
def test_replayed_steps_give_the_eager_tokens(captured, reusing, eager_tokens, asked):
    llm, store, runtime = captured(asked, [1, 2, 4, 8, 16, 64, 256])
    with llm:
        num_captures, num_graphs = runtime.num_captures, store.num_graphs
        tokens, steps = generate(llm)
        assert tokens == eager_tokens
        assert (runtime.num_captures, store.num_graphs) == (num_captures, num_graphs)
    assert runtime.num_replays > 0 and any(step["padded_to"] > step["num_tokens"] for step in steps)
    assert (reusing.num_reused > 0) == ("full" in asked)


def test_batches_of_all_sizes_after_one_another(captured, open_llm):
    """Shrinking and growing batches: what an earlier one left in the buffers must not show."""
    orders = [7, 3, 5, 1, 7, 2]
    with open_llm("compile.mode=none") as eager:
        right = generate(eager, PROMPTS)[0]
    llm, _, _ = captured("full_and_piecewise")
    with llm:
        for count in orders:
            assert generate(llm, PROMPTS[:count])[0] == right[:count]


def test_one_graph_a_full_key_and_one_a_piece(captured):
    llm, store, runtime = captured("full_and_piecewise")
    with llm:
        num_units = 4  # calls of pieces around three layers' attention
        assert store.num_graphs == len(SIZES) * 2
        assert runtime.num_captures == len(SIZES) * (1 + num_units)


def test_the_estimate_counts_every_key_and_leaves_nothing(captured):
    llm, store, runtime = captured("full_and_piecewise")
    with llm:
        kv = llm.engine._executor._runner.store.layers
        before = dict(store._captured)
        assert store.estimate_bytes(kv) == len(SIZES) * 100 + len(SIZES) * 400
        assert store._captured == before and runtime.num_forgotten == 1


def test_capturing_writes_to_no_slot(captured):
    llm, store, _ = captured("full_and_piecewise")
    with llm:
        layers = llm.engine._executor._runner.store.layers
        for kv in layers:
            kv.fill_(5.0)
        store.capture(layers)
        for kv in layers:
            assert (kv[:, :-1] == 5.0).all()  # the block behind the pool is for padding


def test_capturing_says_what_it_does(captured, caplog):
    with caplog.at_level(logging.INFO, "lab"):
        llm, _, _ = captured("piecewise")
    llm.close()
    messages = [record.message for record in caplog.records]
    assert "capturing graph 1 of 4 (piecewise, 8 tokens)" in messages
    assert any(message.startswith("captured 4 graphs in ") for message in messages)


@pytest.mark.parametrize("asked", ["piecewise", "full"])
def test_replays_can_be_watched(captured, eager_tokens, asked):
    llm, _, runtime = captured(asked, [1, 2, 4, 8, 16, 64, 256])
    seen = Counter()

    def watch(name, call):
        def watched(*args, **kwargs):
            seen[name] += 1
            return call(*args, **kwargs)

        return watched

    with llm:
        llm.engine.watch(watch, watch)
        assert generate(llm)[0] == eager_tokens
    assert seen["graph"] == runtime.num_replays > 0
    assert seen["step"] >= seen["forward"] == seen["plan"] > 0
    assert seen["graph"] == seen["forward"] * (NUM_LAYERS + 1 if asked == "piecewise" else 1)
