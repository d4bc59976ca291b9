"""Overrides to the points of a sweep, and the folders that Hydra names."""

import re

import pytest

from lab.config import compose, compose_run, plan_sweep
from lab.errors import UserError


class TestSweeps:
    def points(self, *overrides, **kwargs):
        plan = plan_sweep(overrides, multirun=True, **kwargs)
        return [compose(point) for point in plan.points]

    def test_every_combination_in_order(self):
        plan = plan_sweep(["cache.block_size=8,16", "seed=3", "attention=eager,sdpa"], multirun=True)
        found = [(s.attention.name, s.cache.block_size, s.seed) for s in map(compose, plan.points)]
        assert found == [("eager", 8, 3), ("eager", 16, 3), ("sdpa", 8, 3), ("sdpa", 16, 3)]
        assert plan.swept == ["+attention", "cache.block_size"]

    def test_an_option_is_for_the_plugins_that_have_it(self):
        plan = plan_sweep(["+spec=none,ngram", "spec.num_drafts=2,4", "seed=3"], multirun=True)
        found = [(s.spec.name, s.spec.options, s.seed) for s in map(compose, plan.points)]
        assert found == [("none", {}, 3), ("ngram", {"num_drafts": 2}, 3), ("ngram", {"num_drafts": 4}, 3)]
        assert plan.notes == ("spec.num_drafts is not an option of none: those points run without it",)

    def test_an_option_that_no_plugin_has_fails(self):
        plan = plan_sweep(["+spec=none,ngram", "spec.num_draft=2"], multirun=True)
        assert plan.notes == () and len(plan.points) == 2
        for point, guess in zip(plan.points, ("no spec plugin is named", "has no option 'num_draft'"), strict=True):
            with pytest.raises(UserError, match="Did you mean 'num_drafts'") as refusal:
                compose(point)
            assert guess in str(refusal.value)

    def test_what_nothing_sets_cannot_be_taken_away(self):
        for name in ("spec", "spec.num_drafts"):
            with pytest.raises(UserError) as refusal:
                compose([f"~{name}"])
            assert str(refusal.value) == f"~{name}: nothing sets it, so there is nothing to take away. Leave ~{name} out."
        assert compose(["+spec=ngram", "~spec"]).spec.name == "none"

    def test_only_what_varies_is_swept(self):
        plan = plan_sweep(["cache.block_size=8", "seed=3", "hydra.job.name=x"], multirun=True)
        assert len(plan.points) == 1 and plan.swept == []
        assert compose(plan.points[0]).cache.block_size == 8

    @pytest.mark.parametrize(
        ("override", "values"),
        [
            ('sampling.stop="a,b"', ["a,b"]),
            ("sampling.stop=a\\,b", ["a,b"]),
            ('sampling.stop="a|b"', ["a|b"]),
            ("sampling.stop='a b'", ["a b"]),
            ('sampling.stop="\\n"', ["\\n"]),
            ('sampling.stop="\n"', ["\n"]),
            ('sampling.stop="a,b",c', ["a,b", "c"]),
            ("sampling.stop_token_ids=[1,2],[3]", [[1, 2], [3]]),
            ("sampling.seed=range(0,4,2)", [0, 2]),
            ("sampling.seed=choice(5,7)", [5, 7]),
        ],
    )
    def test_quotes_lists_and_functions_mean_what_they_do_in_hydra(self, override, values):
        name = override.partition("=")[0].split(".")[1]
        assert [s.sampling[name] for s in self.points(override)] == values

    def test_glob_takes_every_plugin(self):
        assert {s.attention.name for s in self.points("attention=glob(*)")} >= {"eager", "sdpa"}
        assert [s.attention.name for s in self.points("+attention=glob(sd*)")] == ["sdpa"]

    def test_the_same_comma_without_m_is_ambiguous(self):
        assert plan_sweep(["sampling.stop=a,b"], multirun=False) is None
        with pytest.raises(UserError) as error:
            compose(["sampling.stop=a,b"])
        message = str(error.value)
        assert message.startswith("ambiguous value: sampling.stop=a,b") and "-m" in message
        assert """sampling.stop='"a,b"'""" in message and "sampling.stop='[a,b]'" in message

    def test_the_suggested_quoting_works(self):
        assert compose(['sampling.stop="a,b"']).sampling["stop"] == "a,b"
        assert compose(["sampling.stop=[a,b]"]).sampling["stop"] == ["a", "b"]

    @pytest.mark.parametrize("override", ["hydra.sweeper.params.x=1", "hydra.sweeper.params.cache.block_size=8,16", "hydra=1"])
    def test_what_hydra_falls_over_is_one_message(self, override):
        with pytest.raises(UserError, match="axis of a sweep is given by its own name|Hydra cannot be set up with"):
            plan_sweep([override], multirun=True)

    def test_an_interval_cannot_be_enumerated(self):
        with pytest.raises(UserError, match="not an interval"):
            plan_sweep(["seed=interval(0,1)"], multirun=True)

    def test_an_experiment_may_be_a_sweep(self, tmp_path):
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "study.yaml").write_text(
            "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n"
            "      attention: eager,sdpa\n      cache.block_size: 8,16\nseed: 5\n"
        )
        plan = plan_sweep(["+experiment=study"], [tmp_path], multirun=False)
        found = [compose(p, [tmp_path]) for p in plan.points]
        assert len(found) == 4 and {s.seed for s in found} == {5}
        plan = plan_sweep(["experiment=study", "attention=sdpa"], [tmp_path], multirun=False)
        found = [compose(p, [tmp_path]) for p in plan.points]
        assert [(s.attention.name, s.cache.block_size) for s in found] == [("sdpa", 8), ("sdpa", 16)]
        assert plan_sweep(["experiment=study", "hydra.mode=RUN"], [tmp_path], multirun=False) is None

    def test_the_study_that_comes_with_lab(self):
        plan = plan_sweep(["+experiment=block_size"], multirun=False)
        found = [compose(point) for point in plan.points]
        assert plan.swept == ["cache.block_size"] and [s.cache.block_size for s in found] == [8, 16, 32]
        assert {s.workload.name for s in found} == {"random"} and found[0].workload.options["num_requests"] == 8

    def test_folders_are_those_that_hydra_names(self):
        overrides = ["hydra.job.name=abc", "hydra.sweep.dir=there", "hydra.run.dir=here"]
        assert plan_sweep([*overrides, "seed=1,2"], multirun=True).directory == "there"
        composed = compose_run(overrides, point=7)
        assert (composed.run_dir, composed.sweep_subdir) == ("here", "7_abc")
        assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d_abc", compose_run(["hydra.job.name=abc"]).run_dir)
