"""The rules of the tree, as tests: size limits, who may import whom, what the code must not contain.

Each rule is a function from one source file to its violations, and is itself tried on a planted violation.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from lab import registry

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("lab", "plugins", "conf", "experiments", "tests", "scripts", "docs", ".ci")
TEXTS = (".py", ".toml", ".txt", ".yaml", ".md", ".jsonl")

MODULE_LINES, MODULE_LINES_AIM, FUNCTION_LINES, CLASS_METHODS = 600, 400, 80, 20

# What each part of lab may import of lab at run time. An import for type checking only is free. The order is that of the
# layers: nothing imports from below itself, apart from lab.__init__, which offers the engine on demand.
LEAVES = {
    "errors",
    "interrupt",
    "types",
    "sampling_params",
    "settings",
    "capabilities",
    "typed",
    "cache",
    "context",
    "contracts",
    "native",
    "memory",
}
MAY_IMPORT = {
    "errors": set(),
    "interrupt": set(),
    "sampling_params": {"errors"},
    "types": {"sampling_params"},
    "settings": {"errors", "sampling_params"},
    "typed": {"errors"},
    "cache": {"errors"},
    "native": {"cache", "errors", "native"},
    "context": set(),
    "memory": set(),
    "capabilities": {"errors", "native"},
    "plugin_source": {"capabilities", "errors"},
    "registry": {"plugin_source", "capabilities", "typed", "errors"},
    "contracts": {"capabilities", "types", "errors"},
    "api": {"contracts", "capabilities", "registry", "native", "types", "errors"},
    "overrides": {"registry", "settings", "typed", "errors"},
    "config": {"overrides", "registry", "settings", "typed", "errors"},
    "kv": LEAVES | {"kv"},
    "sched": LEAVES | {"api", "kv", "sched"},
    "sample": LEAVES | {"sample"},
    "model": LEAVES | {"registry", "model"},
    "compile": LEAVES | {"model", "compile"},
    "runner": LEAVES | {"api", "registry", "kv", "model", "sample", "compile", "runner"},
    "metrics": LEAVES | {"api", "registry", "model", "metrics"},
    "engine": LEAVES | {"registry", "config", "kv", "sched", "model", "sample", "compile", "runner", "metrics", "engine"},
    "bench": LEAVES | {"api", "registry", "config", "engine", "model", "metrics", "report", "bench"},
    "train": LEAVES | {"registry", "engine", "model", "compile", "bench", "train"},
    "checks": LEAVES | {"registry", "kv", "sched", "model", "sample", "runner", "engine", "checks"},
    "report": LEAVES | {"metrics", "report"},
    "cli": LEAVES
    | {"plugin_source", "registry", "overrides", "config", "engine", "model"}
    | {"metrics", "bench", "train", "checks", "report", "cli"},
    "__main__": {"errors", "interrupt", "config", "registry", "cli"},
    "__init__": {"errors", "sampling_params", "engine"},
}
HYDRA_IMPORTERS = ("lab/config.py", "lab/overrides.py", "lab/__main__.py", "lab/cli/")
PLUGINS_MAY_IMPORT = {"torch", "numpy", "triton", "plugins"} | set(sys.stdlib_module_names)

NEITHER_TORCH_NOR_NUMPY = (
    *("lab", "lab.errors", "lab.types", "lab.sampling_params", "lab.settings", "lab.typed", "lab.cache", "lab.context"),
    *("lab.capabilities", "lab.registry", "lab.api", "lab.kv.blocks", "lab.kv.prefix", "lab.sched"),
    "lab.compile.dispatch",
)
NO_TORCH = ("lab.config", "lab.overrides", "lab.__main__", "lab.cli", "lab.model.config")

# Where an exception of any type may be caught, and why nothing is hidden by it.
BROAD_EXCEPTS = {
    ("lab/registry.py", "load"): "a plugin's import may fail in any way; its traceback becomes the message",
    (
        "lab/__main__.py",
        "_run_verb",
    ): "what a plugin raises is told with its name, below its traceback; all else passes through",
    ("lab/engine/engine.py", "step"): "whatever a step raises ends its requests, with the error, and not the engine",
    ("lab/bench/recorder.py", "_guarded"): "tracking may fail in any way and never fails the run; the log has it all",
    ("lab/checks/__init__.py", "_reason"): "whatever a plugin raises under a check is a finding, and is reported as one",
    ("plugins/attention/_functions.py", "_import"): "a user's file may fail in any way; its traceback becomes the message",
    ("lab/engine/tokenizer.py", "encode"): "the tokenizers package raises the bare type; any other is raised again",
}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_CALLERS = {"lab/plugin_source.py": "runs a plugin's declarations, code that the user chose to have run"}
UNSAFE_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

NOT_FINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK|NotImplementedError)\b|\bfor now\b")
OF_THIS_MACHINE = re.compile(
    r"(?<![\w.~$}])/(?:work|opt|home|root|Users|tmp)/\w" + r"|\b(?:pypi|pythonhosted|npmjs|download\.pytorch)\.(?:org|com)\b"
)


@dataclass(frozen=True)
class Source:
    """One file: `path` is relative to the checkout, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def in_core(self) -> bool:
        return self.path.startswith("lab/")


Rule = Callable[[Source], Iterator[str]]


def text_files() -> Iterator[Source]:
    """The text files of the tree, without what is built or written by runs."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    for path in sorted([*ROOT.iterdir(), *inside]):
        if path.is_file() and (path.suffix in TEXTS or path.parent.name in ("scripts", ".ci")):
            yield Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


SOURCES = list(text_files())
PYTHON = [s for s in SOURCES if s.path.endswith(".py")]


def walk_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from walk_run_time(child)


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of what a file imports at run time; `from a import b` counts as a.b."""
    package = Path(source.path).with_suffix("").parts
    for node in walk_run_time(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: -node.level]) if node.level else ""
            module = ".".join(p for p in (base, node.module) if p)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def part_of(path: str) -> str:
    """The part of lab that a file belongs to, as in MAY_IMPORT."""
    return path.split("/")[1].removesuffix(".py")


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def is_too_large(source: Source) -> Iterator[str]:
    lines = source.text.count("\n")
    if lines > MODULE_LINES:
        yield f"{lines} lines; the limit is {MODULE_LINES}"
    for function in functions(source):
        length = function.end_lineno - function.body[0].lineno + 1  # arguments stand a line each: a table, no code to follow
        if length > FUNCTION_LINES:
            yield f"line {function.lineno}: {function.name} has {length} lines; the limit is {FUNCTION_LINES}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            if len(methods) > CLASS_METHODS and not node.name.startswith("Test"):
                yield f"line {node.lineno}: {node.name} has {len(methods)} methods; the limit is {CLASS_METHODS}"


def imports_against_the_layers(source: Source) -> Iterator[str]:
    if not source.in_core:
        return
    part = part_of(source.path)
    if part not in MAY_IMPORT:
        yield f"the part {part} is not in MAY_IMPORT: give it a place among the layers"
        return
    for line, name in imported(source):
        root, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if root == "plugins":
            yield f"line {line}: imports {name}; only the registry loads plugins"
        elif root == "lab" and target in MAY_IMPORT and target != part and target not in MAY_IMPORT[part]:
            yield f"line {line}: {part} imports {name}"


def imports_hydra(source: Source) -> Iterator[str]:
    if source.in_core and not source.path.startswith(HYDRA_IMPORTERS):
        for line, name in imported(source):
            if name.split(".")[0] in ("hydra", "omegaconf"):
                yield f"line {line}: imports {name}; past lab/config.py there is no DictConfig"


def plugin_reaches_into_the_core(source: Source) -> Iterator[str]:
    if source.path.startswith("plugins/"):
        for line, name in imported(source):
            package = name.split(".")[0]
            is_late = any(f.lineno <= line <= f.end_lineno for f in functions(source))
            if is_late and package in packages_declared_in(source):
                continue
            if not name.startswith("lab.api.") and package not in PLUGINS_MAY_IMPORT:
                yield (
                    f"line {line}: imports {name}; a plugin imports lab.api, torch, numpy, triton and its siblings, "
                    "and in its functions the packages that its capabilities name"
                )


def packages_declared_in(source: Source) -> set[str]:
    here = [e for e in registry.entries() if e.path == ROOT / source.path]
    return {package.rpartition(":")[2] for entry in here for package in entry.capabilities.packages}


def names_a_plugin(source: Source) -> Iterator[str]:
    if source.in_core:
        names = {e.name for e in registry.entries() if e.kind in registry.FOLDER_OF_KIND} - {"auto", "none"}
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "torch.compile"]
        torchs = [k.value for call in calls for k in call.keywords if k.arg == "backend"]  # a name of torch's
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and node.value in names and node not in torchs:
                yield f"line {node.lineno}: names the plugin {node.value!r}"


def catches_broadly(source: Source) -> Iterator[str]:
    for function in [source.tree, *functions(source)]:
        name = getattr(function, "name", "module")
        for node in ast.walk(function):
            if isinstance(node, ast.ExceptHandler) and innermost(source, node) == name:
                caught = ast.unparse(node.type) if node.type else "everything"
                if re.search(r"\b(everything|Exception|BaseException)\b", caught) and (source.path, name) not in BROAD_EXCEPTS:
                    yield f"line {node.lineno}: {name} catches {caught}"


def innermost(source: Source, node: ast.AST) -> str:
    around = [f for f in functions(source) if f.lineno <= node.lineno <= f.end_lineno]
    return max(around, key=lambda f: f.lineno).name if around else "module"


def is_unsafe(source: Source) -> Iterator[str]:
    for line, name in imported(source):
        if name.split(".")[0] in UNSAFE_IMPORTS:
            yield f"line {line}: imports {name}, which can run code from a file"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "torch.load" and given.get("weights_only") != "True":
                yield f"line {node.lineno}: torch.load without weights_only=True"
            if called in UNSAFE_CALLS and source.path not in UNSAFE_CALLERS:
                yield f"line {node.lineno}: calls {called}"
            if called in ("yaml.load", "os.system") or given.get("shell") == "True":
                yield f"line {node.lineno}: calls {called}, which can run a command"
            if given.get("trust_remote_code") == "True":
                yield f"line {node.lineno}: runs a model repository's code"


def lacks_a_docstring(source: Source) -> Iterator[str]:
    if source.path.startswith(("lab/", "plugins/")) and source.tree.body:
        if not ast.get_docstring(source.tree):
            yield "the module has no docstring"
        for node in source.tree.body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                yield f"line {node.lineno}: {node.name} has no docstring"


def is_not_finished(source: Source) -> Iterator[str]:
    if source.path.startswith(("lab/", "plugins/", "conf/", "scripts/")):
        yield from (f"line {n}: {found}" for n, found in matches(NOT_FINISHED, source.text))


def is_not_ascii(source: Source) -> Iterator[str]:
    if source.path.endswith((".py", ".toml", ".txt", ".yaml", ".sh", ".md")) or source.path.startswith("scripts/"):
        yield from (f"line {n}: {found!r}" for n, found in matches(re.compile(r"[^\x00-\x7f]"), source.text))


def tells_of_this_machine(source: Source) -> Iterator[str]:
    yield from (f"line {n}: {found}" for n, found in matches(OF_THIS_MACHINE, source.text))


def matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    return ((text.count("\n", 0, m.start()) + 1, m.group()) for m in pattern.finditer(text))


def at(*parts: str) -> str:
    """A text in pieces, so that this file does not break the rule that it is tried on."""
    return "".join(parts)


PYTHON_RULES: dict[Rule, tuple[str, str]] = {  # rule: a file that breaks it
    is_too_large: ("lab/a.py", "def f():\n" + "    pass\n" * (FUNCTION_LINES + 1)),
    imports_against_the_layers: ("lab/kv/a.py", "def f():\n    from lab.engine import engine\n"),
    imports_hydra: ("lab/engine/a.py", "from omegaconf import DictConfig\n"),
    plugin_reaches_into_the_core: ("plugins/attention/a.py", "from lab.kv.blocks import BlockManager\n"),
    names_a_plugin: ("lab/engine/a.py", at("if name == 'e", "ager': pass\n")),
    catches_broadly: ("lab/a.py", "try:\n    pass\nexcept (OSError, Exception):\n    pass\n"),
    is_unsafe: ("lab/a.py", "torch.load('weights.pt')\n"),
    lacks_a_docstring: ("lab/a.py", "'''Doc.'''\n\ndef f(): pass\n"),
}
TEXT_RULES: dict[Rule, tuple[str, str]] = {
    is_not_finished: ("lab/a.py", "x = 1  # good enough for now\n"),
    is_not_ascii: ("conf/a.yaml", "a: 1  # \u2014\n"),
    tells_of_this_machine: ("README.md", at("cd /ho", "me/me\n")),
}
IDS = [rule.__name__ for rule in (*PYTHON_RULES, *TEXT_RULES)]


@pytest.fixture(scope="module", autouse=True)
def _discovered():
    registry.discover()


@pytest.mark.parametrize("rule", [*PYTHON_RULES, *TEXT_RULES], ids=IDS)
def test_nothing(rule):
    sources = PYTHON if rule in PYTHON_RULES else SOURCES
    violations = [f"{source.path}: {what}" for source in sources for what in rule(source)]
    assert not violations, "\n".join(["", *violations])


@pytest.mark.parametrize("rule", [*PYTHON_RULES, *TEXT_RULES], ids=IDS)
def test_a_planted_violation_is_seen(rule):
    planted = Source(*{**PYTHON_RULES, **TEXT_RULES}[rule])
    assert list(rule(planted))


def test_the_tree_is_really_read():
    paths = {s.path for s in PYTHON}
    assert {"lab/types.py", "lab/kv/blocks.py", "plugins/attention/eager.py", "tests/test_rules.py"} <= paths
    assert {"README.md", "pyproject.toml", "scripts/setup"} <= {s.path for s in SOURCES}
    assert any(name == "lab.errors.UserError" for s in PYTHON for _, name in imported(s))


def test_every_exception_to_a_rule_is_still_used():
    found = {(s.path, innermost(s, n)) for s in PYTHON for n in ast.walk(s.tree) if isinstance(n, ast.ExceptHandler)}
    assert set(BROAD_EXCEPTS) <= found
    assert set(UNSAFE_CALLERS) <= {s.path for s in PYTHON}


def test_the_layers_have_no_cycle():
    done: set[str] = set()
    below = {part: MAY_IMPORT[part] - {part} for part in MAY_IMPORT}
    while ready := {part for part, needs in below.items() if needs <= done} - done:
        done |= ready
    assert done == set(MAY_IMPORT), f"these import each other: {sorted(set(MAY_IMPORT) - done)}"


def test_modules_over_the_aim_are_listed(capsys):
    long = sorted(((s.text.count("\n"), s.path) for s in PYTHON), reverse=True)
    with capsys.disabled():
        for lines, path in long:
            if lines > MODULE_LINES_AIM:
                print(f"\n{path}: {lines} lines, over the aim of {MODULE_LINES_AIM}", end="")


def test_torch_stays_out_of_the_torch_free_modules():
    plain = list(with_submodules(NEITHER_TORCH_NOR_NUMPY))
    assert {"lab.sched.scheduler", "lab.kv.prefix"} <= set(plain)
    script = (
        "import importlib, sys\n"
        "for heavy, modules in ((('numpy', 'torch'), sys.argv[1].split()), (('torch',), sys.argv[2].split())):\n"
        "    for name in modules:\n"
        "        importlib.import_module(name)\n"
        "        found = [h for h in heavy if h in sys.modules]\n"
        "        if found: sys.exit(f'importing {name} imports {found[0]}')\n"
    )
    command = [sys.executable, "-c", script, " ".join(plain), " ".join(with_submodules(NO_TORCH))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def with_submodules(names: tuple[str, ...]) -> Iterator[str]:
    """The modules named, and for a package other than lab itself all that is in it."""
    for name in names:
        yield name
        folder = ROOT / name.replace(".", "/")
        if name != "lab" and folder.is_dir():
            for path in sorted(folder.rglob("*.py")):
                if path.stem != "__init__":
                    yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_the_pins_cover_the_direct_dependencies_and_satisfy_them():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(r) for r in (*project["dependencies"], *project["optional-dependencies"]["test"])]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    for requirement in wanted:
        assert requirement.name in pins, f"{requirement.name} has no pin"
        assert pins[requirement.name] in requirement.specifier, f"the pin of {requirement.name} is outside {requirement}"
