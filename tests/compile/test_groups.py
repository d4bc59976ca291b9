"""Models with full and sliding layers, compiled and captured: layers of all kinds share pieces, each group has its tables."""

import pytest
import torch

from lab import LLM
from lab.compile.dispatch import Dispatcher, settle
from lab.compile.graphs import DirectForward, GraphStore
from lab.kv.groups import Sliding
from lab.runner.batch import BatchBuilder
from lab.runner.buffers import InputBuffers
from tests import rigs
from tests.compile.conftest import generate
from tests.compile.test_graphs import RecordingRuntime, reusing  # noqa: F401 - a fixture

BASE = ["num_threads=1", "cache.num_blocks=900", "model.max_model_len=256", "debug.check_integrity=true", "model.dtype=float32"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """(folder, its tokens, run eagerly)."""
    folder = rigs.mix(tmp_path_factory.mktemp("gemma3"), "gemma3_text")
    with LLM(str(folder), attention="eager", overrides=[*BASE, "compile.mode=none"]) as llm:
        return folder, generate(llm)[0]


def test_full_and_sliding_layers_share_their_pieces(gemma, cache):
    """The first, the last, and one between the attentions of any two layers, whatever they see and however they turn."""
    folder, right = gemma
    with LLM(
        str(folder), attention="flash", overrides=[*BASE, "compile.mode=piecewise", f"compile.cache_dir='{cache}'"]
    ) as llm:
        assert llm.engine.compile_metrics["num_graphs"] == 3
        assert {type(need) for need in llm.engine.blocks.needs} > {Sliding}
        tokens, steps = generate(llm)
        assert tokens == right and {step["mode"] for step in steps} == {"piecewise"}


def test_captured_steps_read_the_tables_of_every_group(gemma, reusing):  # noqa: F811
    folder, right = gemma
    overrides = [*BASE, "compile.mode=none", "scheduler.max_num_seqs=8", "scheduler.async_scheduling=false"]
    with LLM(str(folder), attention="eager", overrides=overrides) as llm:
        runner, device = llm.engine._executor._runner, torch.device("cpu")
        groups = runner.forward.group_of
        assert sorted(set(groups)) == [0, 1, 2, 3, 4]
        backends = {id(b): reusing(b.options, b.spec) for b in runner.forward.backends}
        direct = DirectForward([backends[id(b)] for b in runner.forward.backends], runner.forward.forms, groups)
        modes = settle("full", graph_support="any", has_pieces=False, uniform_q=1)
        runner.dispatcher = Dispatcher(modes, [1, 2, 4, 8, 64], max_rows=8)
        buffers = InputBuffers(2048, 8, runner.rows.blocks_RM.shape[1], device, len(runner.rows.tables))
        runner.builder = BatchBuilder(runner.rows, 16, device, buffers, llm.engine.max_model_len)
        store = GraphStore(direct, None, runner.dispatcher, runner.builder, runtime := RecordingRuntime())
        store.capture(runner.store.layers)
        runner.forward = store
        tokens, steps = generate(llm)
        assert tokens == right
        assert runtime.num_replays > 0 and reusing.num_reused > 0
        assert any(step["mode"] == "full" and step["padded_to"] > step["num_tokens"] for step in steps)
