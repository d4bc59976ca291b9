"""Verbs, flags, help, exit codes; and that an answer to a mistake waits for nothing heavy."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import lab as package
from lab.__main__ import main
from lab.cli.verbs import VERBS
from lab.overrides import PLUGIN_GROUPS
from lab.registry import KINDS
from lab.train.options import TrainOptions
from tests import plugin_files
from tests.test_config import core_names

HEAVY = ("torch", "transformers", "wandb", "numpy", "triton", "pydantic", "rich")


def test_help_names_every_verb_and_each_verb_explains_itself(lab):
    outcome = lab("--help")
    assert outcome.code == 0
    for name, verb in VERBS.items():
        if verb.summary:
            assert f"  {name}" in outcome.out
            text = lab(name, "-h").out
            assert f"Usage: lab {name}" in text and "--plugins=DIR" in text and "--json" in text


def test_the_help_of_run_lists_every_setting(lab):
    text = lab("run", "--help").out.split("Settings, with their defaults:\n")[1]
    docs = dict(re.findall(r"^  ([\w.]+=\S*) +# (.+)$", text, re.MULTILINE))
    names = [line.partition("=")[0] for line in docs]
    assert len(names) == len(set(names)) == len(text.splitlines())
    open_ones = {"goodput", "sampling.temperature", "sampling.max_tokens", "scheduler.policy_options"}
    hydras = {"hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"}
    assert set(names) == {*core_names(), *PLUGIN_GROUPS, "model", *open_ones, *hydras}
    assert docs["cache.block_size=16"] == "tokens per block of the KV cache"
    assert docs["spec=none"] == "speculative decoding: `+spec=NAME`; none: one token a step"


def test_the_help_of_train_draft_lists_every_option(lab):
    lines = [line for line in lab("train-draft", "--help").out.splitlines() if line.startswith("  train.")]
    assert [line.split("=")[0] for line in lines] == [f"  train.{field.name}" for field in dataclasses.fields(TrainOptions)]
    assert "  train.steps=1000" in lines[3] and lines[3].endswith("# a whole number: optimiser steps")


@pytest.mark.parametrize("verb", ["plugins", "check"])
def test_help_names_every_kind(lab, verb):
    (named,) = re.findall(r"^KIND is one of ([\w, ]+)", lab(verb, "--help").out, re.MULTILINE)
    assert sorted(named.split(", ")) == sorted(KINDS)


def test_the_help_of_run_says_how_to_quote(lab):
    text = lab("run", "--help").out
    assert """sampling.stop='"a,b"'""" in text and """$'"\\n"'""" in text and "-m" in text


def test_without_a_verb_the_overview_is_a_mistake(lab):
    outcome = lab()
    assert outcome.code == 2 and "Usage: lab VERB" in outcome.out


def test_the_version(lab):
    assert lab("--version").out == f"lab {package.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["rnu"],
            "lab: no verb named 'rnu'. Did you mean 'run'?\n"
            "Available: calibrate, check, doctor, plugins, report, roofline, run, train-draft.",
        ),
        (["run", "--mutlirun"], "lab: `lab run` has no flag '--mutlirun'. Did you mean '--multirun'?"),
        (["--jsn"], "lab: lab has no flag '--jsn'. Did you mean '--json'?"),
        (["run", "--plugins"], "lab: the flag --plugins needs a value: --plugins=DIR."),
        (["run", "--foo"], "lab: `lab run` has no flag '--foo'.\nAvailable:"),
        (["plugins", f"--plugins={__file__}"], "test_main.py' is a file: name the folder that your plugins are in, "),
        (["run", "--json=yes"], "lab: the flag --json takes no value."),
        (["run", "--plugins=nowhere"], "lab: plugin folder 'nowhere' does not exist."),
        (["run", "--config-dir=nowhere"], "lab: config folder 'nowhere' does not exist."),
        (["plugins", "attenton"], "lab: no kind of plugin named 'attenton'. Did you mean 'attention'?"),
        (["plugins", "attention.sdap"], "lab: no attention plugin named 'sdap'. Did you mean 'sdpa'?"),
        (["plugins", "a", "b"], "lab: `lab plugins` takes one kind"),
        (["check"], "lab: name one plugin to check"),
        (["check", "attention=eager", "spec=none"], "lab: name one plugin to check"),
        (["check", "policy.fcsf"], "lab: no policy plugin named 'fcsf'. Did you mean 'fcfs'?"),
        (["check", "polcy.fcfs"], "lab: no kind of plugin named 'polcy'. Did you mean 'policy'?"),
        (["check", "policy"], "lab: 'policy' is no override"),
        (["check", "attention=eager,sdpa"], "lab: ambiguous value: attention=eager,sdpa"),
        (["check", "atention=eager"], "lab: no kind of plugin named 'atention'. Did you mean 'attention'?"),
        (["check", "attention=egaer"], "lab: no attention plugin named 'egaer'. Did you mean 'eager'?"),
        (["check", "attention=eager", "attention.x=1"], "lab: attention plugin 'eager' has no option 'x'."),
        (["doctor", "x=1"], "lab: `lab doctor` takes no overrides, got x=1."),
        (["roofline", "model.dtyp=float32"], "lab: no setting 'model.dtyp'. Did you mean 'model.dtype'?"),
        (["roofline", "model.path=."], "config.json"),
    ],
)
def test_a_mistake_is_one_message_and_code_2(lab, argv, message):
    outcome = lab(*argv)
    assert outcome.code == 2 and outcome.out == ""
    assert message in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["run", "--help"],
        ["train-draft", "--help"],
        ["train-draft", "--out=x", "train.stps=1"],
        ["train-draft", "--out=x", "workload.path=lost"],
        ["calibrate", "--out=x", "model.path=lost"],
        ["run", "model.path=lost"],
        ["run", "workload.path=lost"],
        ["run", "cache.dtype=int8", "cache.scales=lost"],
        ["run", "-m", "workload.path=null,lost"],
        ["run", "~cache.block_size"],
        ["run", "attention=flash", "attention.isa=avx1024"],
        ["run", "attention=lacking"],
        ["rnu"],
        ["run", "--hlep"],
        ["run", "atention=x"],
        ["run", "attention=sdap"],
        ["run", "spec=ngram", "spec.num_draft=3"],
        ["run", "attention=split", "attention.num_split=3"],
        ["run", "attention.num_split=3"],
        ["run", "cache.block_sise=3"],
        ["run", "cache.block_size=0"],
        ["run", "scheduler.policy=fcsf"],
        ["run", "workload=promts"],
        ["run", "workload.pth=x"],
        ["run", "model=smollm"],
        ["run", "sampling.temprature=1"],
        ["run", "-m", "attention=sdap,egaer"],
        ["run", "sampling.stop=a,b"],
        ["plugins", "attention"],
        ["check", "attention=sdap"],
    ],
    ids=" ".join,
)
def test_an_answer_at_once_imports_nothing_heavy(argv, tmp_path):
    plugin_files.attention(tmp_path / "mine", "split")
    plugin_files.attention(tmp_path / "mine", "lacking", packages="'no_such_package',")
    code = (
        "import sys\nfrom lab.__main__ import main\ncode = main(sys.argv[1:])\n"
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules])\nsys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1]), "LAB_PLUGIN_PATH": str(tmp_path / "mine")}
    done = subprocess.run([sys.executable, "-c", code, *argv], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == (0 if "--help" in argv or argv[0] == "plugins" else 2), done.stderr
    assert "HEAVY []" in done.stdout


def test_a_fault_of_ours_is_not_dressed_up(monkeypatch):
    def fail(arguments):
        raise ZeroDivisionError

    monkeypatch.setattr("lab.cli.doctor.doctor", fail)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


def test_ctrl_c_is_130(monkeypatch, lab):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.cli.doctor.doctor", interrupted)
    outcome = lab("doctor")
    assert outcome.code == 130 and outcome.err == "lab: interrupted\n"


def test_ctrl_c_while_a_package_is_imported_is_130(monkeypatch, lab):
    """numpy and torch turn the KeyboardInterrupt into an ImportError; one without a Ctrl-C is a fault as any other."""

    def broken_import(arguments):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("numpy.core.multiarray failed to import")

    monkeypatch.setattr("lab.cli.doctor.doctor", broken_import)
    before = signal.getsignal(signal.SIGINT)
    outcome = lab("doctor")
    assert outcome.code == 130 and outcome.err == "lab: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr("signal.raise_signal", lambda number: None)
    with pytest.raises(ImportError, match="multiarray"):
        main(["doctor"])


def test_a_reader_that_leaves_early_is_no_error(start):
    process = start("plugins")
    process.stdout.close()
    assert process.wait(60) == 0
    assert "Traceback" not in process.stderr.read()
