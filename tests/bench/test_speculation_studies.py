"""What the studies of speculation share: prompts that are the same everywhere, methods as the command line has them, plots."""

import json
import sys
from xml.etree import ElementTree

import pytest

from experiments.acceptance_by_position import __main__ as acceptance_by_position
from experiments.spec_by_batch import __main__ as spec_by_batch
from experiments.spec_methods import __main__ as spec_methods
from experiments.spec_methods.__main__ import by_temperature
from experiments.speculation.copies import prompts
from experiments.speculation.engines import Tally, parse
from experiments.speculation.plot import lines
from experiments.speculation.sets import read_sets
from lab.bench.workloads.prompts import read_prompts
from lab.engine.request_output import CompletionOutput, RequestOutput
from lab.metrics.timeline import Timeline
from tests import rigs


def test_copies_are_seeded_and_a_workload_file(tmp_path):
    found = prompts(9, seed=3)
    assert found == prompts(9, seed=3) != prompts(9, seed=4)
    assert [line["category"] for line in found[:3]] == ["copy: code", "copy: quotes", "copy: lists"]
    path = tmp_path / "copies.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    assert [item.category for item in read_prompts(path)] == [line["category"] for line in found]


def test_sets_are_by_category(tmp_path):
    bench = tmp_path / "question.jsonl"
    rows = [{"question_id": i, "category": "writing", "turns": [f"Turn {i}", "again"]} for i in range(5)]
    bench.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_sets(str(bench), 2)
    assert {name: len(of_category) for name, of_category in found.items()} == {
        "writing": 2,
        "copy: code": 2,
        "copy: quotes": 2,
        "copy: lists": 2,
        "free text": 2,
    }
    assert found["writing"][1] == {"messages": [{"role": "user", "content": "Turn 1"}]}
    assert "writing" not in read_sets(None, 2)


def test_a_category_has_a_row_for_each_of_several_temperatures():
    sets = {"a": [1], "b": [2, 3]}
    assert by_temperature(sets, [1.0]) == {"a": (1.0, [1]), "b": (1.0, [2, 3])}
    both = by_temperature(sets, [0.0, 1.0])
    assert list(both.items()) == [
        ("a, T=0", (0.0, [1])),
        ("a, T=1", (1.0, [1])),
        ("b, T=0", (0.0, [2, 3])),
        ("b, T=1", (1.0, [2, 3])),
    ]


def test_both_studies_measure_both_temperatures_by_one_command(tmp_path, monkeypatch):
    model = rigs.count(tmp_path / "count")
    rigs.alpha_tokenizer(model)
    sets = {"copies of a kind": [{"prompt": "ABCABCAB"}], "free text": [{"prompt": "XYZ"}]}
    few = ["--model", str(model), "--max-tokens", "6", "--temperature", "0", "1", "--out", str(tmp_path)]
    few += ["--override", "compile.mode=none", "num_threads=1", "cache.num_blocks=64", "spec.min_n=1", "draft_length=fixed"]
    for study, methods in ((spec_methods, ["ngram:draft_length=acceptance", "ngram"]), (acceptance_by_position, ["ngram"])):
        monkeypatch.setattr(study, "read_sets", lambda *_: sets)
        monkeypatch.setattr(sys, "argv", ["study", *few, "--methods", *methods])
        study.main()
        results = json.loads((tmp_path / "results.json").read_text())
        assert {line["temperature"] for line in results} == {0.0, 1.0}


def test_the_study_of_batches_at_a_shape_of_random_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(spec_by_batch.SHAPES, "tiny", (64, 128, 2, 4, 2, 16))
    monkeypatch.setattr(spec_by_batch, "VOCABULARY", 10_001)
    small = ["--batches", "1", "3", "--rounds", "1", "--max-tokens", "12", "--prompt-tokens", "5", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["study", "--shape", "tiny", *small, "--override", "compile.mode=none", "num_threads=1"])
    spec_by_batch.main()
    rows = json.loads((tmp_path / "results_tiny.json").read_text())
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["tok_per_s"] > 0 and set(row["ratios"]) == {"none", "all drafts", "by batch"}
        assert row["formula"] == pytest.approx((1 - 0.8**6) / 0.2 / row["verify_cost"])
    assert (tmp_path / "plot_tiny.svg").read_text().startswith("<svg")


def test_a_method_is_a_name_with_overrides():
    assert parse("ngram") == ("ngram", ["+spec=ngram"])
    assert parse("ngram:spec.num_drafts=8;draft_length=fixed")[1] == ["+spec=ngram", "spec.num_drafts=8", "draft_length=fixed"]


def test_a_tally_counts_what_came_after_the_first_step():
    timeline = Timeline(0.0)
    for now, counts in ((1.0, (1, 0, 0)), (1.5, (3, 2, 4)), (2.0, (1, 0, 0))):
        timeline.add_tokens(now, *counts)
    output = CompletionOutput(0, "", [1] * 5, None, None, "length", None, timeline, 0)
    tally = Tally()
    tally.add(RequestOutput("0", None, [1], 0, None, [output], True, None))
    assert (tally.tokens, tally.steps, tally.seconds, tally.speed) == (4, 2, 1.0, 4.0)
    assert (tally.drafts.draft_tokens, tally.drafts.accepted_tokens) == (4, 2)


def test_a_plot_is_well_formed_and_holds_every_series():
    text = lines("a < b", "batch", {"one & two": [(1, 1.0), (8, 0.5)], "flat": [(1, 0.0), (8, 0.0)]}, log_x=True, level=1.0)
    tree = ElementTree.fromstring(text)
    texts = [node.text for node in tree.iter() if node.tag.endswith("text")]
    assert {"a < b", "batch", "one & two", "flat", "1", "8"} <= set(texts)
    assert sum(node.tag.endswith("polyline") for node in tree.iter()) == 2
