"""The forward pass in pieces: how many there are, that layers share them, that any number of tokens runs on the same code."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lab.compile import compiler, setup
from lab.compile.dispatch import BatchKey
from lab.compile.executable import Executable
from lab.compile.program import AttentionCall, BoundCall, Program
from lab.runner.batch import Share
from lab.sampling_params import SamplingParams
from lab.types import NewRow
from tests.compile.conftest import NUM_LAYERS, generate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine(open_llm):
    with open_llm() as llm:
        yield llm.engine


def runner_of(engine):
    return engine._executor._runner


def test_three_unique_pieces_and_the_middle_one_serves_all_layers(engine):
    pieces = runner_of(engine).forward.forms["piecewise"]
    assert isinstance(pieces, Executable)
    units = [call.unit for call in pieces.program.calls if not isinstance(call, AttentionCall)]
    assert units == [0, *[1] * (NUM_LAYERS - 1), 2] and pieces.program.num_units == 3
    layers = [call.layer for call in pieces.program.calls if isinstance(call, AttentionCall)]
    assert layers == list(range(NUM_LAYERS))
    middle = [call for call in pieces.calls if isinstance(call, BoundCall)][1:-1]
    assert middle[0].unit is middle[1].unit
    weights = [{id(x) for x in call.template if isinstance(x, torch.Tensor)} for call in middle]
    assert weights[0] and not weights[0] & weights[1]  # the same code on each layer's own weights


def test_registers_are_used_again(engine):
    program = runner_of(engine).forward.forms["piecewise"].program
    values = sum(len(call.outputs) for call in program.calls if not isinstance(call, AttentionCall))
    assert program.num_registers < values + 3


def test_a_program_survives_json(engine):
    program = runner_of(engine).forward.forms["piecewise"].program
    assert Program.from_plain(json.loads(json.dumps(program.to_plain()))) == program


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 17, 100])
def test_any_number_of_tokens_runs_on_the_same_code(engine, num_tokens):
    runner = runner_of(engine)
    before = setup.num_compilations()
    runner.rows.add(NewRow("r", list(range(100)), 100, SamplingParams(), 0, frozenset(), list(range(1, 8)), 0))
    batch = runner.builder.build([Share(runner.rows["r"], 0, num_tokens, 0, True)])
    forward = runner.forward
    eager = type(forward)(forward.backends, {"none": runner.model})
    with torch.inference_mode():
        found = forward.run(BatchKey("piecewise", num_tokens), batch, runner.store.layers).clone()
        right = eager.run(BatchKey("none", num_tokens), batch, runner.store.layers)
    assert found.shape == right.shape == (num_tokens, 64)
    assert (found - right).abs().max() < 1e-5
    assert setup.num_compilations() == before
    runner.reset()


def test_a_second_start_compiles_nothing_and_needs_no_compiler_frontend(engine, folder, cache):
    script = f"""
import sys
from lab import LLM
from tests.compile.conftest import BASE, generate
overrides = [*BASE, "model.dtype=float32", "compile.cache_dir={cache}"]
with LLM({str(folder)!r}, overrides=overrides) as llm:
    tokens, steps = generate(llm)
    assert llm.engine.compile_metrics["from_cache"] and llm.engine.compile_metrics["num_graphs"] == 3
print([m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules], {{s["mode"] for s in steps}}, tokens[0])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[] {'piecewise'} [")


def test_five_hundred_random_steps_compile_nothing(open_llm):
    generator = torch.Generator().manual_seed(5)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    num_steps = 0
    with open_llm("scheduler.max_num_batched_tokens=90", "scheduler.max_num_seqs=9", "debug.preempt_every=13") as llm:
        shapes = set()
        while num_steps < 500:
            prompts = [[number(0, 256) for _ in range(number(1, 120))] for _ in range(number(1, 14))]
            params = SamplingParams(temperature=0.7, max_tokens=number(1, 40), ignore_eos=True, seed=number(0, 99))
            _, steps = generate(llm, prompts, params)
            num_steps += len(steps)
            shapes |= {step["num_tokens"] for step in steps}
            assert {step["mode"] for step in steps} == {"piecewise"}
        assert 1 in shapes and len(shapes) > 30
        metrics = llm.engine.compile_metrics
        assert (metrics["recompiles_after_warmup"], metrics["num_graphs"]) == (0, 3)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
        assert llm.engine.compile_metrics["recompiles_after_warmup"] == 1  # the count would see one


class TestWhatMakesAnotherEntry:
    """Guards are dropped, so everything that the code depends on must be in the key."""

    @pytest.fixture
    def key(self, engine, monkeypatch):
        runner = runner_of(engine)
        quant = type(runner.model.lm_head.quant)

        def of(model=runner.model, config=engine.model_config, options=""):
            traced = [compiler.TracedPlugin("none", options, quant)]
            return compiler.key_of(compiler.traced_facts(model, config, torch.device("cpu"), traced))

        return of

    def test_nothing_changed(self, key):
        assert key() == key()

    def test_a_number_of_the_config(self, key, engine):
        config = engine.model_config
        assert key(config=compiler.dataclasses.replace(config, rms_norm_eps=config.rms_norm_eps * 2)) != key()

    def test_an_option_of_a_plugin(self, key):
        assert key(options="group_size=64") != key()

    def test_the_number_of_threads(self, key):
        before = key()
        torch.set_num_threads(2)
        assert key() != before

    def test_the_type_of_a_weight(self, key, engine):
        before = key()
        norm = runner_of(engine).model.norm
        norm.weight = norm.weight.bfloat16()
        assert key() != before

    def test_the_version_of_torch(self, key, monkeypatch):
        before = key()
        monkeypatch.setattr(torch, "__version__", "9.9.9")
        assert key() != before

    def test_the_compiler_and_the_processor(self, key, monkeypatch):
        before = key()
        monkeypatch.setattr(compiler, "_processor_flags", lambda: "flags: sse2")
        without_avx = key()
        monkeypatch.setattr(compiler, "find_compiler", lambda: None)
        assert len({before, without_avx, key()}) == 3

    @pytest.mark.parametrize("name", ["model/decoder.py", "model/layers/norm.py", "compile/pieces.py", "new/file.py"])
    def test_a_line_of_the_code(self, tmp_path, name):
        for path in ("model/decoder.py", "model/layers/norm.py", "compile/pieces.py"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text("x = 1\n")
        before = compiler._digest(tmp_path, ["."])
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 2\n")
        assert compiler._digest(tmp_path, ["."]) != before

    def test_the_digest_covers_what_is_traced(self):
        root = Path(compiler.__file__).resolve().parents[1]
        covered = {
            file
            for name in compiler.TRACED_CODE
            for file in ((root / name).rglob("*.py") if (root / name).is_dir() else [root / name])
        }
        for name in ("model/decoder.py", "model/layers/rope.py", "compile/units.py", "context.py", "contracts/quant.py"):
            assert root / name in covered


class TestNoCompiler:
    @pytest.fixture(autouse=True)
    def none_here(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)

    def test_auto_runs_eagerly_with_one_warning(self, open_llm, caplog, eager_tokens):
        with caplog.at_level(logging.WARNING, "lab"), open_llm() as llm:
            tokens, steps = generate(llm)
        assert tokens == eager_tokens and {step["mode"] for step in steps} == {"none"}
        assert [r.message for r in caplog.records if "compiler" in r.message] == [
            "no C++ compiler is installed; install g++ (Debian, Ubuntu: apt install g++), or name one in CXX: "
            "the model runs eagerly, and slower"
        ]

    def test_a_named_mode_is_refused(self, open_llm):
        with pytest.raises(
            setup.UserError, match=r"compile.mode=piecewise: no C\+\+ compiler .*install g\+\+.*compile.mode=none"
        ):
            open_llm("compile.mode=piecewise")


def test_without_the_headers_of_python_auto_is_eager_and_a_named_mode_is_refused(monkeypatch, caplog):
    monkeypatch.setattr(setup, "has_python_headers", lambda: False)
    with caplog.at_level(logging.WARNING, "lab"):
        assert setup.settle_mode("auto", torch.device("cpu")) == "none"
    assert "python3-dev" in caplog.text
    with pytest.raises(setup.UserError, match="python3-dev"):
        setup.settle_mode("piecewise", torch.device("cpu"))
