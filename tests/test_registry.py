"""Plugins of every source: found without being imported, refused when two claim a name, told when they are broken."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab import registry
from lab.api import Attention, Capabilities, Policy
from lab.errors import UserError
from lab.plugin_source import NoOptions, field_docs
from tests import plugin_files

ROOT = Path(registry.__file__).resolve().parents[1]


def in_child(code: str, *, cwd: Path, **environment: str) -> str:
    """What a fresh interpreter prints for `code`."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [environment.pop("PYTHONPATH", "")])])
    env = {k: v for k, v in os.environ.items() if k != registry.PATH_VARIABLE} | {"PYTHONPATH": paths} | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_users_folder(own_registry, tmp_path):
    plugin_files.policy(tmp_path / "sub", "shortest")
    own_registry.discover([tmp_path])
    entry = own_registry.get("policy", "shortest")
    assert (entry.source, entry.cls, entry.doc) == ("folder", None, "Serves the shortest prompt first.")
    assert entry.make_options({"weight": 2, "tags": ["a"]}) == entry.options(weight=2.0, tags=("a",))
    assert entry.option_docs == {"weight": "of the prompt's length"}
    cls = entry.load()
    assert issubclass(cls, Policy) and (cls.kind, cls.name) == ("policy", "shortest")
    assert len(entry.digest) == 16


def test_the_plugin_path_variable(own_registry, tmp_path, monkeypatch):
    plugin_files.policy(tmp_path / "a", "first")
    plugin_files.policy(tmp_path / "b", "second")
    monkeypatch.setenv(registry.PATH_VARIABLE, os.pathsep.join([str(tmp_path / "a"), "", str(tmp_path / "b")]))
    own_registry.discover()
    assert {"first", "second"} <= {e.name for e in own_registry.entries("policy")}


def test_files_of_a_folder_may_import_each_other(own_registry, tmp_path):
    plugin_files.policy(tmp_path, "based")
    (tmp_path / "_base.py").write_text("VICTIM = -1\n")
    text = (tmp_path / "based.py").read_text().replace("from lab.api", "from ._base import VICTIM\nfrom lab.api", 1)
    (tmp_path / "based.py").write_text(text.replace("running[-1]", "running[VICTIM]"))
    own_registry.discover([tmp_path])
    assert own_registry.get("policy", "based").load()(NoOptions()).victim([1, 2]) == 2


def test_discovery_is_idempotent_and_keeps_what_was_loaded(own_registry, tmp_path):
    plugin_files.policy(tmp_path, "mine")
    own_registry.discover([tmp_path])
    cls = own_registry.get("policy", "mine").load()
    own_registry.discover([tmp_path])
    own_registry.discover()
    assert own_registry.get("policy", "mine").cls is cls


def test_a_missing_folder(own_registry, tmp_path):
    with pytest.raises(UserError, match="plugin folder '.*nowhere' does not exist"):
        own_registry.discover([tmp_path / "nowhere"])


def test_unknown_names_are_answered_with_the_nearest(own_registry):
    own_registry.discover()
    with pytest.raises(UserError, match="no policy plugin named 'fcsf'. Did you mean 'fcfs'?"):
        own_registry.get("policy", "fcsf")
    with pytest.raises(UserError, match="no kind of plugin named 'atention'. Did you mean 'attention'?"):
        own_registry.get("atention", "x")


def test_an_unknown_option_and_a_wrong_type(own_registry, tmp_path):
    plugin_files.attention(tmp_path, "split")
    own_registry.discover([tmp_path])
    entry = own_registry.get("attention", "split")
    with pytest.raises(UserError) as error:
        entry.make_options({"numsplits": 2})
    assert str(error.value).startswith("attention plugin 'split' has no option 'numsplits'. Did you mean 'num_splits'?")
    with pytest.raises(UserError, match="attention.num_splits must be a whole number; got 1.5"):
        entry.make_options({"num_splits": 1.5})
    assert entry.cls is None  # none of it needed the import


class TestOneNameTwice:
    def test_two_files(self, own_registry, tmp_path):
        a, b = plugin_files.policy(tmp_path, "same", file="a.py"), plugin_files.policy(tmp_path, "same", file="b.py")
        with pytest.raises(UserError) as error:
            own_registry.discover([tmp_path])
        assert "policy plugin 'same' is claimed twice" in str(error.value)
        assert str(a) in str(error.value) and str(b) in str(error.value)

    def test_the_error_comes_back_when_asked_again_and_leaves_nothing(self, own_registry, tmp_path):
        plugin_files.policy(tmp_path, "innocent", file="a.py")
        plugin_files.policy(tmp_path, "fcfs", file="b.py")
        for _ in range(2):
            with pytest.raises(UserError, match="claimed twice"):
                own_registry.discover([tmp_path])
        assert "innocent" not in {e.name for e in own_registry.entries("policy")}
        assert own_registry.get("policy", "fcfs").source == "built-in"

    def test_a_broken_file_does_not_hide_behind_a_working_one(self, own_registry, tmp_path):
        plugin_files.broken_syntax(tmp_path, "policy", "fcfs")
        with pytest.raises(UserError, match="'fcfs' is claimed twice: .* which cannot be parsed"):
            own_registry.discover([tmp_path])

    def test_a_class_registered_at_run_time(self, own_registry):
        own_registry.discover()
        with pytest.raises(UserError, match="claimed twice"):

            @own_registry.register("policy", "fcfs")
            class Mine(Policy):
                """Mine."""


class TestRunTime:
    def test_a_class_is_known_at_once_and_its_cell_may_be_run_again(self, own_registry):
        for attempt in (1, 2):

            @own_registry.register("policy", "of_a_notebook")
            class Mine(Policy):
                """From a cell."""

                number = attempt

            entry = own_registry.get("policy", "of_a_notebook")
            assert entry.load() is Mine and entry.load().number == attempt
            assert (entry.source, entry.doc, entry.digest) == ("runtime", "From a cell.", "")

    @pytest.mark.parametrize(("kind", "name"), [("polcy", "x"), ("policy", "auto"), ("policy", "a.b"), ("policy", "")])
    def test_labels_that_nobody_could_choose(self, own_registry, kind, name):
        with pytest.raises(UserError, match="cannot name a plugin|Did you mean 'policy'"):
            own_registry.register(kind, name)


class TestBroken:
    def test_syntax_is_listed_and_told_when_chosen(self, own_registry, tmp_path):
        path = plugin_files.broken_syntax(tmp_path, "moe", "crooked")
        plugin_files.policy(tmp_path, "whole")
        own_registry.discover([tmp_path])
        assert own_registry.get("policy", "whole").load()
        entry = own_registry.get("moe", "crooked")
        assert "SyntaxError" in entry.broken
        with pytest.raises(registry.BrokenPlugin, match="(?s)moe plugin 'crooked'.*line 2.*SyntaxError") as error:
            entry.load()
        assert str(path) in str(error.value)
        (line,) = own_registry.unparsed()
        assert line.startswith(f"{path}, line 2 cannot be parsed (SyntaxError:") and "moe.crooked cannot be used" in line

    def test_a_file_that_does_not_parse_is_told_even_when_it_names_no_plugin(self, own_registry, tmp_path):
        (tmp_path / "cut.py").write_text('@register("policy",\n')
        (tmp_path / "notes.py").write_text("of another kind (\n")
        own_registry.discover([tmp_path])
        (line,) = own_registry.unparsed()
        assert line.startswith(f"{tmp_path / 'cut.py'}, line 1 cannot be parsed (SyntaxError:")

    def test_an_import_raises_its_own_traceback_each_time(self, own_registry, tmp_path):
        path = plugin_files.broken_import(tmp_path, "lost")
        own_registry.discover([tmp_path])
        entry = own_registry.get("policy", "lost")
        assert entry.broken is None
        for _ in range(2):
            with pytest.raises(registry.BrokenPlugin, match="(?s)Traceback.*no_such_package_anywhere") as error:
                entry.load()
            assert str(path) in str(error.value)

    def test_the_traceback_is_the_plugins_own(self, own_registry, tmp_path):
        plugin_files.policy(tmp_path, "lost", file="lost.py")
        text = (tmp_path / "lost.py").read_text()
        (tmp_path / "lost.py").write_text(f"from . import _helper\n{text}")
        (tmp_path / "_helper.py").write_text("try:\n    1 / 0\nexcept ZeroDivisionError:\n    import no_such_package\n")
        own_registry.discover([tmp_path])
        with pytest.raises(registry.BrokenPlugin) as error:
            own_registry.get("policy", "lost").load()
        files = [line.split('"')[1] for line in str(error.value).splitlines() if line.startswith("  File ")]
        assert files == [str(tmp_path / name) for name in ("_helper.py", "lost.py", "_helper.py")]
        assert "ZeroDivisionError" in str(error.value) and "no_such_package" in str(error.value)

    def test_a_file_that_fails_half_way_leaves_nothing_registered(self, own_registry, tmp_path):
        path = plugin_files.policy(tmp_path, "half")
        path.write_text(path.read_text() + "\nregister('policy', 'by_call')(type('Other', (Policy,), {}))\nraise OSError\n")
        own_registry.discover([tmp_path])
        with pytest.raises(registry.BrokenPlugin, match="OSError"):
            own_registry.get("policy", "half").load()
        assert "by_call" not in {e.name for e in own_registry.entries("policy")}

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("class Mine(Policy)", "class Mine", "must derive from lab.api.Policy"),
            ("def victim", "def victims", "lacks victim"),
        ],
    )
    def test_a_class_that_is_not_what_its_kind_asks_for(self, own_registry, tmp_path, old, new, message):
        path = plugin_files.policy(tmp_path, "odd")
        path.write_text(path.read_text().replace(old, new))
        own_registry.discover([tmp_path])
        with pytest.raises(registry.BrokenPlugin, match=message):
            own_registry.get("policy", "odd").load()

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('"policy", ', '"polcy", ', "Did you mean 'policy'"),
            ('"odd"', "NAME", "two literal texts"),
            ('"odd"', '"auto"', "'auto' is taken"),
        ],
    )
    def test_a_registration_that_would_be_lost_is_an_error_at_once(self, own_registry, tmp_path, old, new, message):
        path = plugin_files.policy(tmp_path, "odd")
        path.write_text(path.read_text().replace(old, new, 1))
        with pytest.raises(UserError, match=message) as error:
            own_registry.discover([tmp_path])
        assert str(path) in str(error.value)


class TestStatic:
    def test_every_built_in_plugin_declares_what_its_class_has(self, own_registry):
        own_registry.discover()
        entries = own_registry.entries()
        assert {e.kind for e in entries} == set(registry.KINDS)
        for entry in entries:
            static_options, static_capabilities = entry.static_options, entry.static_capabilities
            cls = entry.load()
            assert static_capabilities == cls.capabilities or static_capabilities is None, entry.name
            if static_options is not None:
                declared = [(f.name, f.default) for f in dataclasses.fields(static_options)]
                assert declared == [(f.name, f.default) for f in dataclasses.fields(cls.Options)], entry.name
                assert entry.static_option_docs == field_docs(cls.Options), entry.name
        by_kind = {e.kind for e in entries if e.static_options and e.static_capabilities}
        assert {"attention", "spec", "quant", "moe", "policy"} <= by_kind

    def test_literals_and_what_the_api_offers_are_enough(self, own_registry, tmp_path):
        plugin_files.attention(tmp_path, "split", packages='"no_such_package",')
        own_registry.discover([tmp_path])
        entry = own_registry.get("attention", "split")
        assert entry.option_names == ["num_splits", "scale", "mode"]
        assert entry.options().num_splits == 4
        assert entry.capabilities == Capabilities(devices={"cpu"}, head_dims={64}, packages=("no_such_package",), priority=-5)
        assert entry.cls is None

    def test_what_a_base_beside_it_declares_is_inherited(self, own_registry, tmp_path):
        plugin_files.attention(tmp_path, "split")
        (tmp_path / "finer.py").write_text(
            "from lab.api import register\nfrom .split import Mine as Base\n\n"
            '@register("attention", "finer")\nclass Finer(Base):\n    """Finer."""\n'
        )
        own_registry.discover([tmp_path])
        entry = own_registry.get("attention", "finer")
        assert entry.static_options().num_splits == 4 and entry.static_capabilities.head_dims == {64}
        assert entry.option_docs == {"num_splits": "parts that the context is cut into"}
        assert issubclass(entry.load(), Attention)

    def test_declarations_that_need_the_files_imports_wait_for_them(self, own_registry, tmp_path):
        path = plugin_files.policy(tmp_path, "computed")
        text = path.read_text().replace("from lab.api", "import math\nfrom lab.api", 1)
        path.write_text(text.replace("weight: float = 1.0", "weight: float = math.pi"))
        own_registry.discover([tmp_path])
        entry = own_registry.get("policy", "computed")
        assert entry.static_options is None and entry.known_option_names == []
        assert round(entry.options().weight, 2) == 3.14 and entry.cls is not None


class TestInstalledPackages:
    CODE = (
        "import sys\nfrom lab import registry\nregistry.discover()\n"
        "e = registry.get('policy', 'packaged')\n"
        "print(e.source, e.option_names, 'their_package' in sys.modules, e.load().__module__)"
    )

    def install(self, site: Path, entry_points: str) -> None:
        plugin_files.policy(site / "their_package", "packaged", file="policies.py")
        (site / "their_package" / "__init__.py").write_text("")
        info = site / "their_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lab.plugins]\n{entry_points}\n")

    def test_an_entry_point(self, tmp_path):
        self.install(tmp_path, "policy.packaged = their_package.policies:Mine")
        printed = in_child(self.CODE, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert printed.split() == ["package", "['weight',", "'tags']", "False", "their_package.policies"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("packaged = their_package.policies:Mine", "must be KIND.NAME"),
            ("polcy.packaged = their_package.policies:Mine", "Did you mean 'policy'"),
            ("policy.packaged = their_package.policies", "must be module:Class"),
            ("policy.fcfs = their_package.policies:Mine", "claimed twice"),
        ],
    )
    def test_a_bad_entry_point_is_named(self, tmp_path, line, message):
        self.install(tmp_path, line)
        code = "from lab import registry\ntry:\n    registry.discover()\nexcept registry.UserError as e:\n    print(e)"
        assert message in in_child(code, cwd=tmp_path, PYTHONPATH=str(tmp_path))


class TestShadowing:
    CODE = "from lab import registry\nregistry.discover()\nprint(registry.get('spec', 'none').load().__module__)"

    def theirs(self, folder: Path) -> None:
        (folder / "plugins").mkdir()
        (folder / "plugins" / "__init__.py").write_text("WHOSE = 'theirs'\n")

    def test_a_folder_plugins_where_one_works_does_not_hide_ours(self, tmp_path):
        self.theirs(tmp_path)
        assert in_child(self.CODE, cwd=tmp_path).strip() == "plugins.spec_decode.none"

    def test_a_program_that_has_its_own_package_plugins_keeps_it(self, tmp_path):
        self.theirs(tmp_path)
        code = f"import sys\nsys.path.insert(0, '')\nimport plugins\n{self.CODE}\nprint(plugins.WHOSE)"
        assert in_child(code, cwd=tmp_path).split() == ["lab_plugins.spec_decode.none", "theirs"]


def test_a_plugin_imports_nothing_of_lab_but_its_api(own_registry, tmp_path):
    text = plugin_files.policy(tmp_path, "fine").read_text()
    allowed = "import typing\nfrom lab import api\nif typing.TYPE_CHECKING:\n    from lab.types import Request\n"
    (tmp_path / "fine.py").write_text(allowed + text)
    greedy = "def late():\n    from lab.engine.engine import Engine\n    import lab.kv\n"
    (tmp_path / "greedy.py").write_text(text.replace('"fine"', '"greedy"') + greedy)
    own_registry.discover([tmp_path])
    own_registry.get("policy", "fine").load()
    with pytest.raises(
        UserError, match="'greedy' .* is broken:\nit imports lab.engine.engine, lab.kv: a plugin imports lab.api"
    ):
        own_registry.get("policy", "greedy").load()
    assert own_registry.unparsed() == []  # it is told to who chooses it
