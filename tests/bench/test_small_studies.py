"""The commands of studies that need no trained model, each at a tiny size: that a change elsewhere has not broken them."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from experiments.batch_invariant import bench as batch_invariant
from experiments.sampling import bench as sampling
from experiments.sampling import ngram_ties
from experiments.scheduler import bench as scheduler
from experiments.spec_methods import shapes
from experiments.speculation import proposing
from lab import LLM
from lab.bench.workloads.prompts import read_prompts
from tests import draft_heads, rigs

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SMALL = ["compile.mode=none", "num_threads=1"]


def run(study, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["study", *arguments])
    study.main()


def rows(capsys) -> list[list[str]]:
    """The cells of the table that was printed, without its head."""
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_shapes_of_trees(tmp_path, monkeypatch, capsys):
    model = rigs.mix(tmp_path / "model")
    rigs.alpha_tokenizer(model)
    head = draft_heads.random(tmp_path / "head", model, "eagle3")
    monkeypatch.setattr(shapes, "PROMPTS", ("ABC", "XYZ"))
    monkeypatch.setattr(shapes, "method_of", lambda shape, known=shapes.method_of: f"{known(shape)};spec.head={head}")
    few = ["--model", str(model), "--shapes", "4x2", "--max-tokens", "4"]
    run(shapes, monkeypatch, *few, "--override", *SMALL, "cache.num_blocks=64")
    assert [row[0] for row in rows(capsys)] == ["none", "4x2"]


def test_prompts_of_the_draft_head(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS / "draft_heads")
    monkeypatch.setattr(sys, "argv", ["prompts.py", "--count=40", f"--out={tmp_path / 'prompts.jsonl'}"])
    runpy.run_path(str(EXPERIMENTS / "draft_heads" / "prompts.py"), run_name="__main__")
    assert len(read_prompts(tmp_path / "prompts.jsonl")) == 40


def test_time_of_a_proposal(monkeypatch, capsys):
    monkeypatch.setattr(proposing, "NUM_CALLS", 5)
    run(proposing, monkeypatch, "--contexts", "64")
    assert [row[0] for row in rows(capsys)] == ["ngram", "suffix"]


def test_time_of_the_sampler(monkeypatch, capsys):
    run(sampling, monkeypatch, "--rows", "2", "--vocab", "1500", "--repeats", "1")
    assert [row[0] for row in rows(capsys)] == list(sampling.CASES)


def test_which_of_equal_matches(tmp_path, monkeypatch, capsys):
    folder = rigs.alpha_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "text").write_text("ABCDABCEABCD" * 4)
    run(ngram_ties, monkeypatch, str(folder), str(tmp_path / "text"))
    assert all(float(cell) >= 1 for row in rows(capsys) for cell in row[2:])


@pytest.mark.parametrize("kind", ["generated", "mooncake", "azure"])
def test_cost_of_scheduling(kind, tmp_path, monkeypatch):
    trace = tmp_path / ("trace.csv" if kind == "azure" else "trace.jsonl")
    if kind == "azure":
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "0,40,3\n" * 20)
    else:
        trace.write_text((json.dumps({"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}) + "\n") * 20)
    given = ["--requests", "20"] if kind == "generated" else ["--requests", "20", "--trace", str(trace)]
    run(scheduler, monkeypatch, "trace", *given, "--json", str(tmp_path / "figures.json"))
    found = json.loads((tmp_path / "figures.json").read_text())["trace"]
    assert [(line["mode"], line["requests"]) for line in found] == [("sync", 20), ("async", 20)]


def test_cost_of_steps_and_adds():
    assert scheduler.bench_steps(2, is_async=True)["steps"] > 100
    assert scheduler.bench_adds(64, shared=True, count=4)["admit_us"] > 0


def test_cost_of_batch_invariance(tmp_path, monkeypatch, capsys):
    model = rigs.mix(tmp_path / "model", vocab_size=40_000)
    monkeypatch.setattr(batch_invariant, "LLM", lambda path, overrides: LLM(path, overrides=[*overrides, "compile.mode=none"]))
    monkeypatch.setattr(batch_invariant, "DECODES", (2,))
    monkeypatch.setattr(batch_invariant, "PREFILLS", (40,))
    monkeypatch.setattr(batch_invariant, "CONTEXT", 8)
    monkeypatch.setattr(batch_invariant, "OUTPUT", 6)
    run(batch_invariant, monkeypatch, "--rounds", "1", "--threads", "1", "--dtype", "float32", "--model", str(model))
    assert len(rows(capsys)) == 2
