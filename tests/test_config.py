"""Overrides to settings: every spelling, every mistake, and the manual that conf/config.yaml is."""

import dataclasses
import re
import typing

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from lab.config import compose, normalise, to_plain, to_settings
from lab.errors import UserError
from lab.overrides import CONF_DIR, PLUGIN_GROUPS, quoted
from lab.settings import PluginChoice, Settings
from tests import plugin_files

EXAMPLES = {  # a value that each setting takes and that is not its default
    "model.path": "some/folder",
    "model.dtype": "float32",
    "model.max_model_len": 100,
    "model.load_format": "dummy",
    "model.tokenizer": "some/folder",
    "cache.block_size": 8,
    "cache.num_blocks": 7,
    "cache.memory_utilization": 0.5,
    "cache.memory_bytes": 1000,
    "cache.dtype": "int8",
    "cache.scales": "token_head",
    "cache.enable_prefix_caching": False,
    "cache.free_behind_window": False,
    "cache.hash_algo": "sha256",
    "scheduler.max_num_batched_tokens": 64,
    "scheduler.max_num_seqs": 3,
    "scheduler.policy": "priority",
    "scheduler.long_prefill_token_threshold": 5,
    "scheduler.enable_chunked_prefill": False,
    "scheduler.async_scheduling": False,
    "scheduler.batching": "static",
    "compile.mode": "none",
    "compile.cudagraph_mode": "full",
    "compile.capture_sizes": [1, 2],
    "compile.pad": "always",
    "compile.cache_dir": "some/folder",
    "tracking.wandb.mode": "offline",
    "tracking.wandb.project": "mine",
    "tracking.wandb.group": "g",
    "tracking.wandb.job_type": "sweep",
    "tracking.wandb.name": "n",
    "tracking.wandb.tags": ["a", "b"],
    "tracking.sinks": ["mine"],
    "tracking.progress": "off",
    "debug.preempt_every": 3,
    "debug.check_integrity": True,
    "debug.batch_invariant": True,
    "profile": True,
    "device": "cpu",
    "seed": 5,
    "num_threads": 1,
}


def core_names(cls=Settings, prefix=""):
    """The dotted names of all settings but the open ones."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint) and hint is not PluginChoice:
            yield from core_names(hint, f"{prefix}{name}.")
        elif hint is not PluginChoice and typing.get_origin(hint) is not dict:
            yield f"{prefix}{name}"


def get(settings, name):
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


class TestTheManual:
    TEXT = (CONF_DIR / "config.yaml").read_text()

    def test_it_holds_every_setting_with_its_default_and_nothing_else(self):
        held = yaml.safe_load(self.TEXT)
        del held["defaults"], held["hydra"]
        expected = dataclasses.asdict(Settings())
        expected["tracking"]["wandb"]["tags"] = []
        expected["tracking"]["sinks"] = []
        for kind in PLUGIN_GROUPS:
            del expected[kind]["options"]
        assert held == expected
        assert list(held) and set(EXAMPLES) == set(core_names())

    def test_every_setting_has_a_comment(self):
        body = self.TEXT.split("\n  - model:")[1].split("\nhydra:")[0]
        lines = [line for line in body.splitlines()[1:] if re.match(r"\s*\w+:", line)]
        assert len(lines) >= len(EXAMPLES)
        sections = {"model:", "cache:", "scheduler:", "compile:", "tracking:", "wandb:", "debug:"}
        assert [line for line in lines if "#" not in line and line.strip() not in sections] == []

    def test_composed_without_overrides_it_is_the_default_settings(self):
        assert compose() == Settings()


class TestSpellings:
    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_every_setting_can_be_given(self, plus):
        excluding = (
            ("cache.num_blocks", "cache.memory_bytes"),
            ("scheduler.long_prefill_token_threshold", "scheduler.enable_chunked_prefill"),
        )
        for left_out in zip(*excluding, strict=True):
            given = {name: value for name, value in EXAMPLES.items() if name not in left_out}
            texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in given.items()}
            settings = compose([f"{plus}{name}={text}" for name, text in texts.items()])
            for name, value in given.items():
                assert get(settings, name) == (tuple(value) if isinstance(value, list) else value)
                assert get(settings, name) != get(Settings(), name)

    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_plugin_groups_and_their_options(self, plus):
        settings = compose([f"{plus}spec=ngram", f"{plus}spec.num_drafts=3", f"{plus}workload=random"])
        assert settings.spec == PluginChoice("ngram", {"num_drafts": 3}) and settings.workload.name == "random"

    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_open_settings(self, plus):
        settings = compose([f"{plus}sampling.temperature=0.5", f"{plus}sampling.stop=[a,b]", f"{plus}goodput.ttft=5"])
        assert settings.sampling == {"temperature": 0.5, "max_tokens": 128, "stop": ["a", "b"]} and settings.goodput == {
            "ttft": 5.0
        }

    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_the_model_group_and_a_path_over_it(self, plus):
        assert compose([f"{plus}model=smollm2"]).model.path == "smollm2"
        assert compose([f"{plus}model=smollm2", "model.path=other"]).model.path == "other"

    def test_options_may_come_before_the_name_and_be_nested(self):
        settings = compose(["workload.input.mean=7", "attention=auto", "workload=random"])
        assert settings.workload.options == {"input": {"mean": 7}} and settings.attention == PluginChoice()

    def test_the_last_of_two_counts(self):
        assert compose(["spec=ngram", "+spec=none", "seed=1", "seed=2"]).spec.name == "none"
        assert compose(["seed=1", "seed=2"]).seed == 2

    def test_a_whole_mapping_and_a_removal(self):
        assert compose(["sampling={temperature: 0, stop: [x]}"]).sampling == {
            "temperature": 0,
            "max_tokens": 128,
            "stop": ["x"],
        }
        assert compose(["~sampling.max_tokens"]).sampling == {"temperature": 0.0}
        assert compose(["spec=ngram", "spec.num_drafts=3", "~spec.num_drafts"]).spec == PluginChoice("ngram")

    def test_hydras_own_names_are_left_alone(self):
        texts = ["hydra.run.dir=x", "+hydra.job.env_set.A=b", "~seed"]
        assert normalise(texts) == texts


class TestMistakes:
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["cache.block_sise=8"], "no setting 'cache.block_sise'. Did you mean 'cache.block_size'?"),
            (["+cache.block_sise=8"], "no setting 'cache.block_sise'. Did you mean 'cache.block_size'?"),
            (["hydra.run.dri=x"], "no setting 'hydra.run.dri'. Did you mean 'hydra.run.dir'?"),
            (["hydra.swep.dir=x"], "no setting 'hydra.swep'. Did you mean 'hydra.sweep'?"),
            (["+atention=x"], "no setting 'atention'. Did you mean 'attention'?"),
            (["++sceduler.policy=x"], "no setting 'sceduler'. Did you mean 'scheduler'?"),
            (["tracking.wandb.foo=1"], "no setting 'tracking.wandb.foo'.\nAvailable: tracking.wandb.mode"),
            (["seed.x=1"], "no setting 'seed.x': seed is a single value."),
            (
                ["attention=sdap"],
                "no attention plugin named 'sdap'. Did you mean 'sdpa'?\n"
                "Available: auto, eager, fa, flash, flashinfer, flex, hybrid, sdpa.",
            ),
            (["attention=null"], "no attention plugin named 'null'."),
            (["spec=auto"], "no spec plugin named 'auto'."),
            (["workload=promts"], "no workload plugin named 'promts'. Did you mean 'prompts'?"),
            (["scheduler.policy=fcsf"], "no policy plugin named 'fcsf'. Did you mean 'fcfs'?"),
            (["model=smollm"], "no model named 'smollm'. Did you mean 'smollm2'?"),
            (["experiment=nothing"], "no experiment named 'nothing'."),
            (["spec=ngram", "spec.num_draft=3"], "spec plugin 'ngram' has no option 'num_draft'. Did you mean 'num_drafts'?"),
            (["spec=ngram", "spec.num_drafts=x"], "spec.num_drafts must be a whole number; got 'x'."),
            (
                ["workload=random", "workload.input.men=3"],
                "no setting 'workload.input.men'. Did you mean 'workload.input.mean'?",
            ),
            (
                ["scheduler.policy_options.x=1"],
                "policy plugin 'fcfs' has no option 'x'.\nAvailable: none, it takes no options.",
            ),
            (["scheduler.policy_options=3"], "scheduler.policy_options must be a mapping; got 3."),
            (["quant.bits=4"], "quant.bits is set, but no quant plugin is named: add +quant=NAME."),
            (
                ["spec.num_drafts=4"],
                "spec.num_drafts is set, but no spec plugin is named: add +spec=NAME. Plugins with this option:",
            ),
            (["attention=[sdpa]"], "attention takes one name; `-m attention=NAME,NAME` makes a run of each."),
            (["hydra.run.dir="], "hydra.run.dir is empty: give a folder, or leave it out."),
            (["cache.block_size=abc"], "cache.block_size must be a whole number; got 'abc'."),
            (["cache.block_size=true"], "cache.block_size must be a whole number; got true."),
            (["cache.block_size=1.0"], "cache.block_size must be a whole number; got 1.0."),
            (["device=gpu"], "device must be one of auto, cpu, cuda; got 'gpu'."),
            (["cache=3"], "cache must be a mapping; got 3."),
            (["sampling.temprature=1"], "sampling: no parameter named 'temprature'. Did you mean 'temperature'?"),
            (["sampling.temperature=-1"], "sampling: temperature must be"),
            (["sampling.bad_words_ids=[[1]]"], "sampling: no parameter named 'bad_words_ids'."),
            (["goodput=ttft500"], "goodput must be a mapping; got 'ttft500'."),
            (["goodput.ttft=abc"], "goodput.ttft must be a number; got 'abc'."),
            (["goodput.tft=1"], "no limit of goodput named 'tft'. Did you mean 'ttft'?"),
            (["attention={name: sdpa}"], "attention takes a name; give the rest one by one: attention.NAME=VALUE."),
            (["tracking.wandb.name=12"], "tracking.wandb.name must be text or null; got 12. To give it as text, quote"),
            (["seed"], "'seed' is no override: give NAME=VALUE."),
            (
                ["sampling.stop=\N{PARTY POPPER}"],
                "cannot read 'sampling.stop=\N{PARTY POPPER}'.\nA value with spaces or special",
            ),
            (["sampling.stop=[a"], "cannot read 'sampling.stop=[a':"),
            (["hydra.run.dr=x"], "no setting 'hydra.run.dr'. Did you mean 'hydra.run.dir'?"),
            (
                ["hydra.sweeper.params.x=1"],
                "hydra.sweeper.params.x: an axis of a sweep is given by its own name, with the flag",
            ),
            (["+hydra.sweeper.params={seed: 1}"], "hydra.sweeper.params: an axis of a sweep is given by its own name"),
            (
                ["~cache.block_size"],
                "~cache.block_size: a run cannot be without this setting. Leave ~cache.block_size out, or give its default: "
                "cache.block_size=16.",
            ),
            (["cache.num_blocks=8", "~cache.num_blocks"], "~cache.num_blocks: a run cannot be without this setting. Leave"),
            (["~cache.num_blocks=null"], "~cache.num_blocks: a run cannot be without this setting. Leave ~cache.num_blocks"),
            (
                ["~device"],
                "~device: a run cannot be without this setting. Leave ~device out, or give its default: device=auto.",
            ),
            (
                ["~spec.name"],
                "~spec.name: a run cannot be without this setting. Leave ~spec.name out, or give its default: spec.",
            ),
            (["~cache"], "~cache: a run cannot be without this setting. Leave ~cache out."),
            (["~model"], "~model: a run cannot be without this setting. Leave ~model out."),
            (["hydra=1"], "Hydra cannot be set up with hydra=1: ValueError: Config group override must be"),
            (["seed=1", "hydra/sweeper=[1]"], "Hydra cannot be set up with hydra/sweeper=[1]: TypeError: "),
            (["hydra.job.env_copy=[NOT_SET]"], "Hydra cannot be set up with hydra.job.env_copy=[NOT_SET]: KeyError: "),
        ],
    )
    def test_each_is_one_message_in_our_words(self, overrides, message):
        with pytest.raises(UserError) as error:
            compose(overrides)
        assert str(error.value).startswith(message)

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("cache.block_size=0", "cache.block_size must be at least 1; got 0."),
            ("cache.num_blocks=0", "cache.num_blocks must be at least 1; got 0."),
            ("cache.memory_bytes=-5", "cache.memory_bytes must be at least 1; got -5."),
            ("cache.memory_utilization=0", "cache.memory_utilization must be over 0 and at most 1; got 0."),
            ("cache.memory_utilization=1.01", "cache.memory_utilization must be over 0 and at most 1; got 1.01."),
            ("scheduler.max_num_batched_tokens=0", "scheduler.max_num_batched_tokens must be at least 1; got 0."),
            ("scheduler.max_num_seqs=0", "scheduler.max_num_seqs must be at least 1; got 0."),
            ("scheduler.long_prefill_token_threshold=-1", "scheduler.long_prefill_token_threshold must be at least 0; got -1."),
            (
                "scheduler.long_prefill_token_threshold=8 scheduler.enable_chunked_prefill=false",
                "scheduler.long_prefill_token_threshold=8 splits prompts, which scheduler.enable_chunked_prefill=false forbids",
            ),
            ("model.max_model_len=0", "model.max_model_len must be at least 1; got 0."),
            ("model.path=''", "model.path is empty"),
            ("debug.preempt_every=-1", "debug.preempt_every must be at least 0; got -1."),
            ("num_threads=0", "num_threads must be at least 1; got 0."),
            ("seed=-1", "seed must be from 0"),
            ("goodput.ttft=0", "goodput.ttft must be over 0 ms; got 0."),
        ],
    )
    def test_a_value_out_of_range_is_named(self, override, message):
        with pytest.raises(UserError) as error:
            compose(override.split())
        assert str(error.value).startswith(message)

    def test_two_sizes_of_the_cache_contradict(self):
        with pytest.raises(UserError, match="give one of them"):
            compose(["cache.num_blocks=5", "cache.memory_bytes=1000"])

    def test_a_mistake_in_a_file_is_found_too(self, tmp_path):
        for name, text in (("a", "cache: {block_sise: 8}"), ("b", "cash: {}"), ("c", "cache: [unclosed")):
            (tmp_path / "experiment").mkdir(exist_ok=True)
            (tmp_path / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
        for name, message in (
            ("a", "Did you mean 'cache.block_size'"),
            ("b", "no setting 'cash'"),
            ("c", "cannot be composed"),
        ):
            with pytest.raises(UserError, match=message):
                compose([f"experiment={name}"], [tmp_path])

    def test_a_missing_folder(self, tmp_path):
        with pytest.raises(UserError, match="config folder '.*nowhere' does not exist"):
            compose([], [tmp_path / "nowhere"])


class TestUsersFolders:
    def test_a_plugin_needs_no_yaml_and_a_preset_may_name_a_set_of_options(self, own_registry, tmp_path):
        plugin_files.attention(tmp_path, "split")
        preset = tmp_path / "conf" / "attention" / "split_wide.yaml"
        preset.parent.mkdir(parents=True)
        preset.write_text("name: split\nnum_splits: 32\n")
        own_registry.discover([tmp_path])
        assert compose(["attention=split", "attention.mode=exact"]).attention == PluginChoice("split", {"mode": "exact"})
        settings = compose(["attention=split_wide", "attention.scale=2"])
        assert settings.attention == PluginChoice("split", {"num_splits": 32, "scale": 2})
        assert to_plain(settings)["attention"] == {"name": "split", "num_splits": 32, "scale": 2.0, "mode": "fast"}
        with pytest.raises(UserError, match="(?s)'split_wid'. Did you mean 'split_wide'.*Available: auto, .*sdpa, split"):
            compose(["attention=split_wid"])

    @pytest.mark.parametrize("plus", ["", "+", "++"])
    def test_options_of_a_policy(self, own_registry, tmp_path, plus):
        plugin_files.policy(tmp_path, "shortest")
        own_registry.discover([tmp_path])
        settings = compose(["scheduler.policy=shortest", f"{plus}scheduler.policy_options.weight=2"])
        assert settings.scheduler.policy_options == {"weight": 2}
        plain = to_plain(settings)
        assert plain["scheduler"]["policy_options"] == {"weight": 2.0, "tags": []}
        assert to_plain(to_settings(plain)) == plain
        for given, message in (
            ("wieght=2", "Did you mean 'weight'"),
            ("weight=x", r"scheduler\.policy_options\.weight must be"),
        ):
            with pytest.raises(UserError, match=message):
                compose(["scheduler.policy=shortest", f"scheduler.policy_options.{given}"])

    def test_an_option_without_a_name_says_which_plugins_have_it(self, own_registry, tmp_path):
        plugin_files.attention(tmp_path, "split")
        own_registry.discover([tmp_path])
        with pytest.raises(UserError, match=r"add \+attention=NAME. Plugins with this option: .*split\."):
            compose(["attention.num_splits=2"])

    def test_a_broken_plugin_raises_its_own_error_when_chosen(self, own_registry, tmp_path):
        plugin_files.broken_syntax(tmp_path, "attention", "crooked")
        own_registry.discover([tmp_path])
        assert compose().attention.name == "auto"
        with pytest.raises(UserError, match="(?s)attention plugin 'crooked'.*SyntaxError"):
            compose(["attention=crooked"])

    def test_the_command_line_wins_over_an_experiment_wherever_it_stands(self, tmp_path):
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "study.yaml").write_text("# @package _global_\nspec: {name: ngram}\nseed: 5\n")
        assert compose(["experiment=study"], [tmp_path]).spec.name == "ngram"
        settings = compose(["spec=none", "seed=6", "experiment=study"], [tmp_path])
        assert (settings.spec.name, settings.seed) == ("none", 6)


def test_plain_data_and_back():
    settings = compose(["spec=ngram", "spec.num_drafts=3", "sampling.stop=['a,b']", "tracking.wandb.tags=[x]", "goodput.e2e=9"])
    again = to_settings(to_plain(settings))
    assert again.spec.options["num_drafts"] == 3 and set(again.spec.options) > {"num_drafts"}
    same = {kind: getattr(settings, kind) for kind in ("spec", "draft_length", "workload")}  # only they gain their defaults
    assert dataclasses.replace(again, **same) == settings


def test_a_program_that_uses_hydra_itself_keeps_its_state(tmp_path):
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose(["seed=3"]).seed == 3
        with pytest.raises(UserError):
            compose(["seeed=3"])
        assert hydra.compose("mine").a == 1
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize(
    "value", ["plain", "a b,c|d", "it's", "back\\slash", "ends\\", "\\'", "new\nline", "${x}", "a=b#c", ""]
)
def test_quoted_text_arrives_as_it_is(value):
    if "${" in value:
        pytest.raises(UserError, compose, [f"tracking.wandb.name={quoted(value)}"])  # an interpolation, quoted or not
    else:
        assert compose([f"tracking.wandb.name={quoted(value)}"]).tracking.wandb.name == value
