"""plugins, check, doctor and roofline."""

import dataclasses
import json

import pytest

from lab.checks import CheckFailed, run_checks
from lab.cli import machine
from lab.cli.folders import short_name
from lab.metrics import roofline
from tests import plugin_files
from tests.cli.conftest import FACTS


class TestPlugins:
    def test_all_in_a_line_each(self, lab):
        out = lab("plugins").out
        assert all(f"{kind}  " in out for kind in ("attention", "spec", "quant", "moe", "policy", "sink", "workload"))
        assert "sdpa" in out and "fcfs" in out

    def test_one_with_everything(self, lab, tmp_path):
        plugin_files.attention(tmp_path, "split", packages="'no_such_package',")
        out = lab("plugins", "attention.split", f"--plugins={tmp_path}").out
        assert "attention.split  (folder, " in out
        assert "usable here: no: package 'no_such_package' is not installed" in out
        assert "attention.num_splits=4  # a whole number: parts that the context is cut into" in out
        assert "attention.mode=fast  # one of fast, exact" in out
        assert "head dims: 64" in out and "priority: -5" in out

    def test_the_options_of_a_policy_are_told_by_their_full_names(self, lab, tmp_path):
        plugin_files.policy(tmp_path, "shortest")
        out = lab("plugins", "policy.shortest", f"--plugins={tmp_path}").out
        assert "    scheduler.policy_options.weight=1.0  # a number: of the prompt's length" in out

    def test_broken_ones_are_listed_with_the_reason(self, lab, tmp_path):
        plugin_files.broken_syntax(tmp_path, "moe", "crooked")
        plugin_files.broken_import(tmp_path, "lost")
        outcome = lab("plugins", f"--plugins={tmp_path}")
        table = outcome.out.split("\n\n")[0]
        lines = {line.split()[1]: line for line in table.splitlines()}
        assert outcome.code == 0
        assert lines["crooked"].split() == ["moe", "crooked", "no", "folder"]
        assert lines["lost"].split()[:4] == ["policy", "lost", "no", "folder"]
        reasons = outcome.out.split("Not usable here:\n")[1]
        assert "  moe.crooked: broken: SyntaxError" in reasons
        assert "  policy.lost: broken: ModuleNotFoundError: No module named 'no_such_package_anywhere'" in reasons
        assert "no_such_package_anywhere" in lab("plugins", "policy.lost", f"--plugins={tmp_path}").out

    def test_json(self, lab):
        (record,) = json.loads(lab("plugins", "spec.ngram", "--json").out)["plugins"]
        assert (record["kind"], record["name"], record["unusable"]) == ("spec", "ngram", [])
        assert {"name": "num_drafts", "type": "a whole number"}.items() <= record["options"][-1].items()
        assert record["capabilities"]["api_version"] == 1
        assert len(json.loads(lab("plugins", "--json").out)["plugins"]) > 8


class TestCheck:
    @pytest.mark.parametrize(
        "spelling", ["policy=shortest", "+policy=shortest", "policy.shortest", "scheduler.policy=shortest"]
    )
    @pytest.mark.parametrize("option", ["policy.weight", "scheduler.policy_options.weight"])
    def test_a_users_own_plugin_passes(self, lab, tmp_path, spelling, option):
        plugin_files.policy(tmp_path, "shortest")
        assert lab("check", spelling, f"--plugins={tmp_path}", f"{option}=x").code == 2
        outcome = lab("check", spelling, f"--plugins={tmp_path}", f"{option}=2")
        assert outcome.code == 0, outcome.out
        lines = outcome.out.splitlines()
        assert lines[-1] == "policy plugin 'shortest' keeps its contract."
        assert len([line for line in lines if line.startswith("ok ")]) >= 3

    def test_a_plugin_that_breaks_its_contract_is_told_how(self, lab, tmp_path):
        plugin_files.policy(tmp_path, "odd", victim="object()")
        outcome = lab("check", "+policy=odd", f"--plugins={tmp_path}")
        assert outcome.code == 1
        assert "FAILED        victim_is_running" in outcome.out and "breaks its contract" in outcome.out

    def test_what_is_not_declared_is_not_called_ok(self, lab):
        outcome = lab("check", "moe.none")
        lines = outcome.out.splitlines()
        assert outcome.code == 0 and "not declared  experts (no feature moe)" in outcome.out
        assert [line.split()[0] for line in lines[:3]] == ["ok", "not", "not"]
        assert lines[-1] == (
            "moe plugin 'none' keeps its contract; 2 of 3 checks were left out: it does not claim what they test."
        )
        checks = json.loads(lab("check", "moe.none", "--json").out)["checks"]
        assert [(c["ok"], c["not_declared"]) for c in checks] == [(True, "")] + 2 * [(True, "no feature moe")]

    def test_a_plugin_that_raises_shows_where(self, lab, tmp_path):
        plugin_files.policy(tmp_path, "raising", victim="1 // 0")
        outcome = lab("check", "+policy=raising", f"--plugins={tmp_path}", "--json")
        record = json.loads(outcome.out)
        failed = [c for c in record["checks"] if not c["ok"]]
        assert outcome.code == 1 and not record["ok"] and failed
        assert "raising.py" in failed[0]["reason"] and "ZeroDivisionError" in failed[0]["reason"]

    def test_one_that_cannot_run_here_is_refused(self, lab, tmp_path):
        plugin_files.attention(tmp_path, "split", packages="'no_such_package',")
        outcome = lab("check", "attention=split", f"--plugins={tmp_path}")
        assert outcome.code == 2
        assert "cannot be checked on this machine: package 'no_such_package' is not installed" in outcome.err

    def test_the_runner_tells_a_failure_from_a_fault(self, own_registry, tmp_path, monkeypatch):
        plugin_files.policy(tmp_path, "shortest")
        own_registry.discover([tmp_path])
        checks = __import__("lab.checks.policy", fromlist=["policy"])

        def check_always(entry, options):
            """Nothing holds.

            More about it.
            """
            raise CheckFailed("as it should")

        monkeypatch.setattr(checks, "check_always", check_always, raising=False)
        entry = own_registry.get("policy", "shortest")
        last = list(run_checks(entry, entry.make_options({})))[-1]
        assert (last.name, last.proves, last.reason, last.ok) == ("always", "Nothing holds", "as it should", False)


class TestDoctor:
    def test_what_is_here(self, lab, tmp_path, monkeypatch):
        plugin_files.attention(tmp_path, "split", packages="'no_such_package',")
        monkeypatch.delenv("WANDB_MODE", raising=False)
        found = json.loads(lab("doctor", "--json", f"--plugins={tmp_path}").out)
        assert found["packages"]["torch"] and found["devices"]["cpu"]
        assert 1 <= found["usable_cores"] <= found["cores"] and found["memory_bytes"] > 1 << 28
        assert found["unusable_plugins"]["attention.split"] == ["package 'no_such_package' is not installed"]
        assert "attention.split: package 'no_such_package' is not installed" in found["will_not_run"]
        out = lab("doctor").out
        assert "C++ compiler" in out and "cache models" in out and "W&B" in out

    def test_without_a_compiler(self, lab, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CXX", raising=False)
        found = json.loads(lab("doctor", "--json").out)
        assert found["compiler"] is None and any("install g++ or clang" in p for p in found["will_not_run"])

    def test_wandb_follows_its_own_variable(self, lab, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "disabled")
        assert json.loads(lab("doctor", "--json").out)["wandb"] == "disabled (WANDB_MODE)"

    def test_the_limits_of_a_container(self, tmp_path, monkeypatch):
        monkeypatch.setattr(machine, "CGROUP", tmp_path)
        total, limit = machine.memory_bytes()
        assert limit is None
        (tmp_path / "memory.max").write_text("268435456\n")
        (tmp_path / "cpu.max").write_text("100000 100000\n")
        assert machine.memory_bytes() == (total, 268435456) and machine.usable_cores() == 1
        (tmp_path / "memory.max").write_text("max\n")
        assert machine.memory_bytes() == (total, None)


class TestRoofline:
    def test_the_numbers_of_a_known_model_on_a_known_device(self, lab, model):
        record = json.loads(lab("roofline", f"model.path={model}", "model.dtype=float32", "--json").out)
        assert record["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # keys and values, layers, KV heads, head dim, bytes
        assert record["bandwidth_gb_s"] == 40 and record["peak_gflop_s"] == 200 and record["ridge_flop_per_byte"] == 5
        assert record["decode_floor_ms"] < record["decode_floor_ms_at_max_len"]
        small = json.loads(lab("roofline", f"model.path={model}", "cache.memory_bytes=1024", "--json").out)
        assert small["max_concurrency"] == pytest.approx(1024 / (small["kv_bytes_per_token"] * small["max_model_len"]))

    def test_the_threads_are_those_of_a_run_and_the_quality_of_the_measurement_is_told(self, lab, model, monkeypatch):
        asked = []
        poor = dataclasses.replace(FACTS, quiet=False, busy_share=0.4, last_bandwidth=30e9, last_measured="later")
        monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: asked.append(threads) or poor)
        argv = ("roofline", f"model.path={model}", "model.dtype=float32", "num_threads=3")
        record = json.loads(lab(*argv, "--json").out)
        assert asked == [3] and (record["quiet"], record["busy_share"]) == (False, 0.4)
        monkeypatch.setattr(roofline, "busy_now", lambda: True)
        shown = lab(*argv).out
        assert "disturbed" in shown and "40% of its processor time" in shown and "only 30.0 GB/s when last measured" in shown
        assert "quiet" in lab("roofline", f"model.path={model}", "model.dtype=float32").out

    def test_a_disturbed_measurement_can_be_made_again(self, lab, model, monkeypatch):
        better = dataclasses.replace(FACTS, bandwidth=80e9, flops=dict.fromkeys(FACTS.flops, 1.0))
        monkeypatch.setattr(roofline, "_measure_apart", lambda kind, threads: better)
        argv = ("roofline", f"model.path={model}", "model.dtype=float32", "--json")
        assert json.loads(lab(*argv).out)["bandwidth_gb_s"] == 40
        assert json.loads(lab(*argv, "--measure").out)["bandwidth_gb_s"] == 80
        again = json.loads(lab(*argv).out)
        assert (again["bandwidth_gb_s"], again["peak_gflop_s"]) == (80, 200)

    def test_only_the_config_is_read(self, lab, model, tmp_path):
        (tmp_path / "bare").mkdir()
        (tmp_path / "bare" / "config.json").write_text((model / "config.json").read_text())
        outcome = lab("roofline", f"model.path={tmp_path / 'bare'}")
        assert outcome.code == 0
        assert all(word in outcome.out for word in ("KV cache", "B_sat", "ridge", "concurrency", "decode step, batch 1"))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "run"),
        (["+attention=sdpa", "cache.block_size=8"], "attention-sdpa_cache.block_size-8"),
        (["hydra.run.dir=x", "tracking.wandb.mode=offline"], "run"),
        (["model.path='/a/b c'"], "model.path-a-b-c"),
        (["+attention=eager,sdpa"], "attention-eager-sdpa"),
    ],
)
def test_names_of_folders(overrides, name):
    assert short_name(overrides) == name


def test_long_names_are_cut_and_stay_different():
    a, b = (short_name([f"model.path={'x' * 300}{end}"]) for end in "ab")
    assert a != b and len(a) == len(b) == 80


class TestReport:
    def test_runs_of_several_folders_get_a_page_of_their_own(self, lab, small, somewhere_else):
        for seed in (1, 2):
            assert lab("run", *small, f"seed={seed}", f"hydra.run.dir=run{seed}").code == 0
        outcome = lab("report", "run1", "run2", "--json")
        page = somewhere_else / "report" / "report.html"
        assert json.loads(outcome.out) == {"report": str(page), "table": str(page.with_suffix(".md"))}
        assert 'href="../run2/"' in page.read_text()
        assert lab("report", "run1", "run2", "--out=there").out.endswith(f"{somewhere_else / 'there' / 'report.html'}\n")
        lines = (somewhere_else / "there" / "report.md").read_text().splitlines()
        header, _, first, second = (line for line in lines if line.startswith("|"))
        assert header.split()[:4] == ["|", "run", "|", "seed"] and "reference" in first and "| same " in second

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ((), "name the folders"),
            (("nowhere",), "there is no folder nowhere"),
            ((".",), "is the folder of no run and no sweep"),
            ((".", "--out=a", "--out=b"), "--out is given more than once"),
        ],
    )
    def test_mistakes_are_told(self, lab, argv, message):
        outcome = lab("report", *argv)
        assert outcome.code == 2 and message in outcome.err and "Traceback" not in outcome.err
