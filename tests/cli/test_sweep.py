"""`lab run -m`: every point in a process of its own; what fails, what is kept, and what the exit code tells."""

import csv
import json
import signal
import time
from pathlib import Path

import pytest
import yaml

from lab.cli.folders import point_folder
from lab.cli.sweep import STOPPING_POINT, Point, Sweep
from lab.errors import UserError
from tests import plugin_files, rigs


def the_sweep(folder: Path) -> tuple[Path, list[dict]]:
    (path,) = folder.rglob("sweep.json")
    return path.parent, json.loads(path.read_text())["points"]


def test_one_bad_point_does_not_stop_the_others(lab, small, tmp_path, somewhere_else):
    plugin_files.policy(tmp_path / "mine", "raising", victim="running[-1]")
    path = tmp_path / "mine" / "raising.py"
    path.write_text(path.read_text().replace("return (request.num_prompt", "raise OSError('no key today')  # ("))
    plugin_files.broken_import(tmp_path / "mine", "early")
    outcome = lab("run", "-m", f"--plugins={tmp_path / 'mine'}", *small, "scheduler.policy=fcfs,raising,early,priority")
    assert outcome.code == 1
    folder, rows = the_sweep(somewhere_else)
    assert [(r["scheduler.policy"], r["status"]) for r in rows] == [
        ("fcfs", "ok"),
        ("raising", "failed"),
        ("early", "failed"),
        ("priority", "ok"),
    ]
    assert "2 ok, 2 failed" in outcome.out and str(folder) in outcome.out
    assert "[2/4] scheduler.policy=raising ... failed:" in outcome.out
    assert outcome.out.endswith(f"plots and tokens: {folder / 'report.html'}\n")
    lines = (folder / "report.md").read_text().splitlines()
    assert lines[2].startswith("- model: ") and lines[5].startswith("- code: lab ")
    of_table = [[cell.strip() for cell in text.split("|")[1:-1]] for text in lines if text.startswith("|")][2:]
    assert [(cells[1], cells[2], cells[-2]) for cells in of_table] == [
        ("fcfs", "ok", "reference"),
        ("raising", "failed", ""),
        ("early", "failed", ""),
        ("priority", "ok", "same"),
    ]
    assert "no key today" in of_table[1][-1] and "'early'" in of_table[2][-1]
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    again = lab("report", str(folder))
    assert again.code == 0 and "| fcfs" in again.out and again.out.endswith(f"{folder / 'report.html'}\n")
    assert (folder / "report.html").read_text() == page
    printed = {line.split()[0]: line for line in outcome.out.split("\npoint ")[1].splitlines()[1:5]}  # the rows of the table
    assert printed["2"].endswith(rows[1]["reason"]) and printed["3"].endswith(rows[2]["reason"])
    assert rows[1]["exit_code"] == 1 and "no key today" in rows[1]["reason"]
    assert rows[1]["reason"].startswith("lab: policy plugin 'raising' (") and "failed, see above: OSError" in rows[1]["reason"]
    assert "Traceback" in (folder / rows[1]["folder"] / "console.txt").read_text()
    assert rows[2]["exit_code"] == 2 and "policy plugin 'early'" in rows[2]["reason"]
    assert "No module named 'no_such_package_anywhere'" in (folder / rows[2]["folder"] / "console.txt").read_text()
    table = list(csv.DictReader((folder / "sweep.csv").open()))
    assert [r["status"] for r in table] == [r["status"] for r in rows]
    assert float(table[0]["output_tok_per_s"]) > 0 and table[0]["num_requests"] == "2"
    saved = yaml.safe_load((folder / rows[3]["folder"] / "config.yaml").read_text())
    assert saved["scheduler"]["policy"] == "priority"
    assert saved["tracking"]["wandb"]["job_type"] == "sweep" and saved["tracking"]["wandb"]["group"] == folder.name


def test_every_attention_gives_the_same_tokens(lab, small, tmp_path, somewhere_else):
    """Rows of the family's table: prompts in chunks beside decodes, in float32, with a model whose output attention decides."""
    folder = rigs.mix(tmp_path / "mix", vocab_size=64)
    rigs.alpha_tokenizer(folder)
    prompts = [json.dumps({"prompt_token_ids": [(11 * i + n) % 64 for i in range(n)]}) for n in (3, 40, 90)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    names = ["eager", "sdpa", "flex", "flash", "hybrid"]
    own = [f"model.path='{folder}'", "model.dtype=float32", "sampling={temperature: 0, max_tokens: 12, ignore_eos: true}"]
    outcome = lab("run", "-m", *small, *own, "scheduler.max_num_batched_tokens=32", f"+attention={','.join(names)}")
    assert outcome.code == 0, outcome.out + outcome.err
    path, rows = the_sweep(somewhere_else)
    assert [(row["attention"], row["status"]) for row in rows] == [(name, "ok") for name in names]
    ran = [json.loads((path / row["folder"] / "resolved.json").read_text())["attention"]["name"] for row in rows]
    assert ran == names
    outputs = []
    for row in rows:
        lines = (path / row["folder"] / "requests.jsonl").read_text().splitlines()
        outputs.append({r["id"]: r["output_token_ids"] for r in map(json.loads, lines)})
    assert all(output == outputs[0] for output in outputs)
    report = (path / "report.md").read_text()
    assert report.count("| same ") == 4 and report.count("| reference ") == 1
    assert (path / "report.html").read_text().count("<svg") >= 4
    assert len({tuple(ids) for ids in outputs[0].values()}) == 3 and all(len(ids) == 12 for ids in outputs[0].values())


def test_fail_fast_stops_at_the_first_failure(lab, small, tmp_path, somewhere_else):
    plugin_files.broken_import(tmp_path / "mine", "early")
    mine = f"--plugins={tmp_path / 'mine'}"
    outcome = lab("run", "-m", "--fail-fast", "--json", mine, *small, "scheduler.policy=early,fcfs")
    result = json.loads(outcome.out)
    assert outcome.code == 2  # a mistake, and no point went well
    assert [p["status"] for p in result["points"]] == ["failed", "skipped"]
    assert result["counts"] == {"ok": 0, "failed": 1, "skipped": 1}


def test_a_wrong_point_is_told_before_any_is_run(lab, somewhere_else):
    outcome = lab("run", "-m", "cache.block_size=8,0", "attention=flash,flahs", "seed=3")
    assert outcome.code == 2 and outcome.out == "" and list(somewhere_else.iterdir()) == []
    unknown = "no attention plugin named 'flahs'. Did you mean 'flash'?"
    told = [line for line in outcome.err.splitlines() if not line.startswith("Available")]
    assert told == [
        "lab: nothing was run, for 3 of the sweep's 4 points cannot be:",
        "[2/4] attention=flash cache.block_size=0: cache.block_size must be at least 1; got 0.",
        f"[3/4] attention=flahs cache.block_size=8, [4/4] attention=flahs cache.block_size=0: {unknown}",
    ]


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("workload.path={good},lost.jsonl", "[2/2] workload.path=lost.jsonl: workload: cannot read lost.jsonl: No such file"),
        ("model.path={model},smolm2", "[2/2] model.path=smolm2: no model 'smolm2'. Did you mean 'smollm2'?"),
        (
            "spec=eagle spec.format=eagle1,eagle3 spec.head=lost",
            "[1/2] spec.format=eagle1, [2/2] spec.format=eagle3: spec.head=lo",
        ),
        ("spec=draft_model spec.model={model},smolm2", "[2/2] spec.model=smolm2: no model 'smolm2'. Did you mean 'smollm2'?"),
        ("model.tokenizer={model},lost", "[2/2] model.tokenizer=lost: model.tokenizer=lost: there is no such folder."),
        ("cache.scales=one,lost.json", "[2/2] cache.scales=lost.json: cache.scales=lost.json: there is no such file."),
        (
            "tracking.sinks=[jsonl],[jsonll]",
            "[2/2] tracking.sinks=[jsonll]: no sink plugin named 'jsonll'. Did you mean 'jsonl'",
        ),
    ],
)
def test_a_file_or_model_that_is_not_there_is_told_before_any_point_is_run(lab, small, somewhere_else, model, axis, message):
    good = small[2].removeprefix("workload.path=")
    axis = axis.format(good=good, model=f"'{model}'")
    outcome = lab("run", "-m", *small, "cache.dtype=int8", *axis.split())
    assert outcome.code == 2 and message in outcome.err
    assert list(somewhere_else.iterdir()) == []


def test_when_no_point_can_be_composed_nothing_is_made(lab, somewhere_else):
    outcome = lab("run", "-m", "cache.block_size=0,-1")
    assert outcome.code == 2 and "cache.block_size must be at least 1; got 0." in outcome.err
    assert list(somewhere_else.iterdir()) == []


def test_an_experiment_is_a_sweep_without_m(lab, small, somewhere_else):
    (somewhere_else / "experiment").mkdir()
    (somewhere_else / "experiment" / "study.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 1,2\n"
    )
    outcome = lab("run", "+experiment=study", "--config-dir=.", *small, "sampling.stop='F,G'")
    assert outcome.code == 0 and "2 ok, 0 failed" in outcome.out
    folder, rows = the_sweep(somewhere_else)
    assert [r["seed"] for r in rows] == ["1", "2"]
    for row in rows:
        saved = yaml.safe_load((folder / row["folder"] / "config.yaml").read_text())
        assert saved["seed"] == int(row["seed"]) and saved["sampling"]["stop"] == "F,G"


def test_two_sweeps_of_the_same_second_keep_apart(start, small, somewhere_else):
    (somewhere_else / "experiment").mkdir()
    then = "# @package _global_\nhydra: {sweep: {dir: multirun/then}}\n"  # as if the clock stood still
    (somewhere_else / "experiment" / "frozen.yaml").write_text(then)
    long = "sampling.stop=" + ",".join(f'"{letter * 300}"' for letter in "ab")
    sweeps = [start("run", "-m", "experiment=frozen", "--config-dir=.", *small, long) for _ in range(2)]
    for process in sweeps:
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out + err
    folders = sorted(p.parent for p in somewhere_else.rglob("sweep.json"))
    assert [f.name for f in folders] == ["then", "then_2"]
    points = [p for f in folders for p in f.iterdir() if p.is_dir()]
    assert len(points) == 4 and all((p / "metrics.json").exists() for p in points)
    assert len({p.name for p in points}) == 2 and all(len(p.name) < 100 for p in points)  # cut, told apart by a hash


def test_points_that_would_share_a_folder_are_an_error(lab, small, somewhere_else):
    outcome = lab("run", "-m", *small, "seed=1,2", "hydra.sweep.subdir=same")
    assert outcome.code == 2 and "two points of the sweep would share the folder" in outcome.err
    assert list(somewhere_else.iterdir()) == []


def test_a_named_sweep_folder_is_used_once(lab, small, somewhere_else):
    argv = ("run", "-m", *small, "seed=1", "hydra.sweep.dir=mine")
    assert lab(*argv).code == 0
    (row,) = csv.DictReader((somewhere_else / "mine" / "sweep.csv").open())
    assert list(row)[:3] == ["point", "status", "reason"] and row["status"] == "ok"
    outcome = lab(*argv)
    assert outcome.code == 2 and "holds the results of another run" in outcome.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_its_finished_rows(start, small, somewhere_else, number):
    (somewhere_else / "late.jsonl").write_text('{"prompt": "ABC"}\n{"prompt": "ABC", "arrival_s": 3600}\n')
    axes = ("sampling.max_tokens=4,5", "workload.num_requests=1,2")  # with the second request a point does not end by itself
    process = start("run", "-m", *small, "workload.path=late.jsonl", *axes)
    while process.poll() is None:
        points = [json.loads(p.read_text())["points"] for p in somewhere_else.rglob("sweep.json")]
        running = list(somewhere_else.rglob("2_*/requests.jsonl"))
        if points and points[0][0]["status"] == "ok" and running and running[0].read_text():
            break
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    folder, rows = the_sweep(somewhere_else)
    assert [r["status"] for r in rows] == ["ok", "interrupted", "skipped", "skipped"]
    assert "1 ok, 0 failed, 1 interrupted, 2 skipped" in out and "Traceback" not in err
    assert err.splitlines()[-1] == STOPPING_POINT
    assert json.loads((folder / rows[1]["folder"] / "metrics.json").read_text())["num_unfinished"] == 1


def test_the_exit_code_of_a_sweep():
    def code(*points):
        sweep = object.__new__(Sweep)
        sweep.points = [Point(1, [], {}, Path(), status, exit_code) for status, exit_code in points]
        return sweep._exit_code()

    assert code(("ok", 0), ("ok", 0)) == 0
    assert code(("ok", 0), ("failed", 2)) == 1
    assert code(("failed", 1), ("failed", 2)) == 1
    assert code(("failed", 2), ("skipped", None)) == 2


def test_a_folder_is_never_merged(tmp_path):
    point_folder(tmp_path / "1_x")
    with pytest.raises(UserError, match="must tell them apart"):
        point_folder(tmp_path / "1_x")
