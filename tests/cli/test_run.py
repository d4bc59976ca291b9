"""`lab run` in this process: the run's folder, and what stands in its way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import lab as lab_package
from lab.cli import machine
from lab.cli.folders import named_folder, new_folder
from lab.config import compose, to_plain
from lab.errors import UserError
from tests import plugin_files


def runs(folder: Path) -> list[Path]:
    return sorted(p.parent for p in folder.rglob("config.yaml"))


def test_a_run_has_a_folder_of_its_own_with_its_settings(lab, small, somewhere_else):
    outcome = lab("run", *small, "cache.block_size=8", "++attention=eager", "--json")
    assert outcome.code == 0, outcome.err
    (folder,) = runs(somewhere_else / "outputs")
    result = json.loads(outcome.out.splitlines()[-1])
    assert result["folder"] == str(folder) and result["num_requests"] == 2
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved == to_plain(compose([*small, "cache.block_size=8", "attention=eager"]))
    assert saved["attention"] == {"name": "eager"} and saved["workload"]["arrival"] == "file"
    texts = [json.loads(line)["text"] for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert sorted(texts) == ["DEFG", "abcd"]


def test_the_settings_of_a_run_make_the_same_run_again(lab, small, somewhere_else):
    assert lab("run", *small).code == 0
    (folder,) = runs(somewhere_else)
    (somewhere_else / "experiment").mkdir()
    saved = (folder / "config.yaml").read_text()
    (somewhere_else / "experiment" / "again.yaml").write_text(f"# @package _global_\n{saved}")
    assert to_plain(compose(["experiment=again"], [somewhere_else])) == yaml.safe_load(saved)


def test_two_runs_of_the_same_second(lab, small, somewhere_else):
    (somewhere_else / "experiment").mkdir()
    then = "# @package _global_\nhydra: {run: {dir: outputs/then}}\n"  # as if the clock stood still
    (somewhere_else / "experiment" / "frozen.yaml").write_text(then)
    argv = ("run", "experiment=frozen", "--config-dir=.", *small)
    assert lab(*argv).code == lab(*argv).code == 0
    assert [f.name for f in runs(somewhere_else)] == ["then", "then_2"]
    assert all((f / "metrics.json").exists() for f in runs(somewhere_else))


def test_a_named_folder_is_used_once(lab, small, somewhere_else):
    name = "hydra.run.dir='my runs/a, b'"
    assert lab("run", *small, name).code == 0
    assert runs(somewhere_else) == [somewhere_else / "my runs" / "a, b"]
    outcome = lab("run", *small, name)
    assert outcome.code == 2 and "holds the results of another run" in outcome.err


def test_a_folder_of_an_interrupted_start_is_told_from_one_with_results(lab, small, somewhere_else):
    assert lab("run", *small, "hydra.run.dir=mine").code == 0
    for file in (somewhere_else / "mine").iterdir():
        if file.name not in ("config.yaml", "log.txt"):
            file.unlink()
    outcome = lab("run", *small, "hydra.run.dir=mine")
    assert outcome.code == 2 and "holds config.yaml and log.txt of another run, but no results" in outcome.err
    assert "remove this one if nothing is running" in outcome.err


def test_printing_the_settings_runs_nothing(lab, small, somewhere_else):
    outcome = lab("run", "--print-config", *small, 'sampling.stop="a,b"')
    assert outcome.code == 0 and list(somewhere_else.iterdir()) == []
    assert yaml.safe_load(outcome.out)["sampling"]["stop"] == "a,b"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.path=lost.jsonl", "cannot read lost.jsonl"),
        ("model.path=lost", "no model 'lost'"),
        ("model.max_model_len=100000", "the model was made for at most"),  # known once the model's configuration is read
    ],
)
def test_a_refused_run_leaves_nothing(lab, small, somewhere_else, override, message):
    outcome = lab("run", *small, override)
    assert outcome.code == 2 and message in outcome.err
    assert list(somewhere_else.iterdir()) == []


def test_a_refused_run_takes_nothing_of_its_users_away(lab, small, somewhere_else):
    (somewhere_else / "mine").mkdir()
    (somewhere_else / "mine" / "notes.txt").write_text("of the user")
    assert lab("run", *small, "model.max_model_len=100000", "hydra.run.dir=mine/deep/er").code == 2
    assert lab("run", *small, "model.max_model_len=100000", "hydra.run.dir=mine").code == 2
    assert [path.name for path in somewhere_else.rglob("*")] == ["mine", "notes.txt"]


def test_a_run_that_is_refused_with_results_says_where_they_are(lab, small, somewhere_else):
    Path("prompts.jsonl").write_text('{"prompt_token_ids": [999]}\n')
    outcome = lab("run", *small, "workload.path=prompts.jsonl", "hydra.run.dir=mine")
    assert outcome.code == 2 and "every request was refused" in outcome.err
    assert outcome.err.endswith(f"\nWhat there was by then is in {somewhere_else / 'mine'}.\n")
    assert json.loads((somewhere_else / "mine" / "metrics.json").read_text())["num_failed"] == 1


def test_the_folder_of_a_sweep_without_a_sweep(lab, small, somewhere_else):
    outcome = lab("run", *small, "hydra.sweep.dir=mine")
    assert outcome.code == 2 and not list(somewhere_else.iterdir())
    assert "hydra.sweep.dir names the folder of a sweep: add -m, or name that of this run by hydra.run.dir" in outcome.err


def test_a_folder_that_cannot_be_made(lab, small):
    outcome = lab("run", *small, "hydra.run.dir=/proc/nothing/here")
    assert outcome.code == 2 and outcome.err.startswith("lab: cannot make the folder /proc/nothing/here:")
    assert len(outcome.err.splitlines()) == 1


def test_a_file_in_the_way(lab, small, somewhere_else):
    (somewhere_else / "outputs").write_text("")
    outcome = lab("run", *small)
    assert outcome.code == 2 and "cannot make the folder" in outcome.err


def test_a_disk_that_takes_no_more(small):
    """A file may grow to 0 bytes, so the first write of the run fails."""
    command = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", sys.executable, "-m", "lab", "run", *small]
    env = {**os.environ, "PYTHONPATH": str(Path(lab_package.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr and "config.yaml: File too large." in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_users_plugin_is_run(lab, small, tmp_path, somewhere_else):
    plugin_files.policy(tmp_path / "mine", "shortest")
    argv = ("run", *small, f"--plugins={tmp_path / 'mine'}", "scheduler.policy=shortest", "scheduler.policy_options.weight=2")
    assert lab(*argv).code == 0
    (folder,) = runs(somewhere_else)
    record = json.loads((folder / "resolved.json").read_text())["policy"]
    assert record["source"] == "folder" and record["options"] == {"weight": 2}
    assert yaml.safe_load((folder / "config.yaml").read_text())["scheduler"]["policy_options"] == {"weight": 2.0, "tags": []}


def test_a_broken_plugin_file_is_warned_of_and_fails_only_the_run_that_chooses_it(lab, small, tmp_path):
    path = plugin_files.broken_syntax(tmp_path / "mine", "policy", "crooked")
    plugin_files.broken_import(tmp_path / "mine", "lost")
    argv = ("run", *small, f"--plugins={tmp_path / 'mine'}")
    outcome = lab(*argv)
    (warning,) = [line for line in outcome.err.splitlines() if line.startswith("lab: warning: ")]
    assert outcome.code == 0 and str(path) in warning and "policy.crooked cannot be used" in warning
    outcome = lab(*argv, "scheduler.policy=crooked")
    assert outcome.code == 2 and "SyntaxError" in outcome.err and "warning" not in outcome.err
    for outcome in (lab(*argv, "scheduler.policy=lost"), lab("check", "policy=lost", argv[-1])):
        assert outcome.code == 2 and "No module named 'no_such_package_anywhere'" in outcome.err
        files = [line.split('"')[1] for line in outcome.err.splitlines() if line.startswith("  File ")]
        assert files == [str(tmp_path / "mine" / "lost.py")]


def test_the_settings_of_a_sweeps_points_are_printed_and_none_is_run(lab, small, somewhere_else):
    outcome = lab("run", "-m", "--print-config", *small, "seed=3,4")
    assert outcome.code == 0 and [point["seed"] for point in yaml.safe_load_all(outcome.out)] == [3, 4]
    assert not Path("outputs").exists()


def test_ctrl_c_before_anything_is_loaded_ends_cleanly(start, small):
    Path("late.jsonl").write_text('{"prompt": "ABC", "arrival_s": 3600}\n')  # so that it does not end before it is interrupted
    process = start("run", *small, "workload.path=late.jsonl")
    while not list(Path("outputs").rglob("config.yaml")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in err
    assert "lab: " in err and len([line for line in err.splitlines() if line.startswith("lab: ")]) == 1


def test_new_folders_are_never_shared(tmp_path):
    made = [new_folder(tmp_path / "deep" / "run") for _ in range(3)]
    assert [f.name for f in made] == ["run", "run_2", "run_3"]


@pytest.mark.parametrize("file", ["config.yaml", "metrics.json", "sweep.json"])
def test_a_named_folder_with_results_is_refused(tmp_path, file):
    named_folder(tmp_path / "a")
    (tmp_path / "a" / "notes.txt").write_text("of the user")
    named_folder(tmp_path / "a")
    (tmp_path / "a" / file).write_text("")
    what = (
        "holds config.yaml of another run, but no results" if file == "config.yaml" else rf"results of another run \({file}\)"
    )
    with pytest.raises(UserError, match=what):
        named_folder(tmp_path / "a")


def test_a_gpu_that_is_not_here_is_told_before_torch_is_imported(tmp_path):
    code = (
        "import pathlib, sys\nfrom lab.__main__ import main\nfrom lab.cli import machine\n"
        f"machine.DEV = pathlib.Path({str(tmp_path)!r})\n"
        "code = main(['run', 'device=cuda'])\nassert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lab: device=cuda: there is no CUDA device here. Use device=cpu, or see `lab doctor`.\n"


@pytest.mark.parametrize(
    ("name", "found"), [("nvidia0", True), ("dxg", True), ("nvgpu", True), ("nvidiactl", False), ("null", False)]
)
def test_a_gpu_is_seen_by_its_device_file(name, found, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "DEV", tmp_path)
    (tmp_path / name).touch()
    assert ("cuda" in machine.devices()) == found
