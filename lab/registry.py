"""One registry for every kind of plugin. Torch-free: files are read, not imported, until a plugin is chosen.

A plugin is a class under `@register(kind, name)`. Discovery parses the source of every file in the plugin folders for that
decorator, so `lab plugins` and the answer to a typo cost milliseconds whatever the plugins import. The class is imported
when it is chosen, or when its declarations (`Options`, `capabilities`) use more than the names that `lab.api` offers.

Where plugins come from: the `plugins/` folder beside this package; folders inside `lab` for the small kinds; the user's
folders (`--plugins=DIR`, LAB_PLUGIN_PATH); the entry points `lab.plugins` of installed packages; classes registered at run
time. Two sources that claim one name are an error. A file that cannot be parsed or imported is listed as broken, with its
own traceback when it is chosen.
"""

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from lab.capabilities import Capabilities
from lab.errors import UserError, unknown

FOLDER_OF_KIND = {"attention": "attention", "spec": "spec_decode", "quant": "quant", "moe": "moe"}
SMALL_KINDS = {"policy": "sched/policies", "sink": "metrics/sinks", "workload": "bench/workloads"}
KINDS = (*FOLDER_OF_KIND, *SMALL_KINDS)
ENTRY_POINT_GROUP = "lab.plugins"
PATH_VARIABLE = "LAB_PLUGIN_PATH"

LAB_DIR = Path(__file__).resolve().parent
BUILTIN_DIR = LAB_DIR.parent / "plugins"

T = TypeVar("T", bound=type)


class BrokenPlugin(UserError):
    """A plugin's file cannot be imported; the message carries its own traceback."""


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a plugin that declares none."""


@dataclasses.dataclass
class Entry:
    """One plugin: where it is, and what can be known of it without importing it."""

    kind: str
    name: str
    module: str
    class_name: str
    path: Path | None  # None: an entry point, or registered at run time
    source: str  # built-in | folder | package | runtime
    doc: str = ""
    broken: str | None = None  # the traceback of a file that does not parse
    cls: type | None = None
    static_options: type | None = None
    static_capabilities: Capabilities | None = None

    def load(self) -> type:
        """The plugin's class, imported on first use. Raises BrokenPlugin with the plugin's own traceback."""
        if self.cls is None:
            if self.broken:
                raise BrokenPlugin(f"{self.kind} plugin '{self.name}' ({self.path}) is broken:\n{self.broken}")
            try:
                self.cls = getattr(importlib.import_module(self.module), self.class_name)
            except Exception:  # noqa: BLE001 - a plugin's import may fail in any way; nothing of it is swallowed
                sys.modules.pop(self.module, None)
                raise BrokenPlugin(
                    f"{self.kind} plugin '{self.name}' ({self.path or self.module}) cannot be imported:\n"
                    f"{traceback.format_exc()}"
                ) from None
        return self.cls

    @property
    def options(self) -> type:
        """The plugin's `Options` dataclass."""
        return self.static_options or getattr(self.load(), "Options", NoOptions)

    @property
    def capabilities(self) -> Capabilities:
        return self.static_capabilities or getattr(self.load(), "capabilities", Capabilities())

    @property
    def digest(self) -> str:
        """A short hash of the plugin's source, for the record of a run; empty when it has no file."""
        return hashlib.blake2b(self.path.read_bytes(), digest_size=8).hexdigest() if self.path else ""


_entries: dict[tuple[str, str], Entry] = {}
_seen_roots: set[Path] = set()


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class decorator that makes a plugin known as `name` among those of `kind`.

    Raises UserError for an unknown kind, or when another class has the name already.
    """
    if kind not in KINDS:
        raise unknown("kind of plugin", kind, KINDS)

    def decorate(cls: T) -> T:
        cls.kind, cls.name = kind, name
        known = _entries.get((kind, name))
        if known is None:
            entry = Entry(kind, name, cls.__module__, cls.__qualname__, None, "runtime", _first_line(cls.__doc__), cls=cls)
            _entries[kind, name] = entry
        elif known.source == "runtime":
            known.cls = cls  # a notebook cell run again
        elif known.module != cls.__module__ and known.source != "package":
            raise _claimed_twice(known, f"module {cls.__module__}")
        return cls

    return decorate


def discover(folders: Iterable[str | Path] = ()) -> None:
    """Find every plugin of every source; idempotent. Raises UserError for a missing folder or a name claimed twice."""
    _mount("plugins", BUILTIN_DIR)
    for kind, folder in FOLDER_OF_KIND.items():
        _scan(BUILTIN_DIR / folder, f"plugins.{folder}", "built-in", kind)
    for kind, folder in SMALL_KINDS.items():
        _scan(LAB_DIR / folder, "lab." + folder.replace("/", "."), "built-in", kind)
    listed = os.environ.get(PATH_VARIABLE, "")
    for folder in [*(f for f in listed.split(os.pathsep) if f), *folders]:
        root = Path(folder).expanduser().resolve()
        if not root.is_dir():
            raise UserError(f"plugin folder '{folder}' does not exist.")
        package = "lab_user_" + hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()
        _mount(package, root)
        _scan(root, package, "folder", None)
    _scan_entry_points()


def entries(kind: str | None = None) -> list[Entry]:
    """All known plugins, or those of one kind, by kind and name."""
    found = [e for e in _entries.values() if kind is None or e.kind == kind]
    return sorted(found, key=lambda e: (KINDS.index(e.kind), e.name))


def get(kind: str, name: str) -> Entry:
    """The plugin of that name. Raises UserError naming the nearest one and the alternatives."""
    if kind not in KINDS:
        raise unknown("kind of plugin", kind, KINDS)
    if (kind, name) not in _entries:
        raise unknown(f"{kind} plugin", name, [e.name for e in entries(kind)])
    return _entries[kind, name]


def _mount(package: str, root: Path) -> None:
    """Make `root` importable as `package` without touching sys.path, whatever the working folder holds."""
    if package not in sys.modules:
        module = types.ModuleType(package)
        module.__path__ = [str(root)]
        sys.modules[package] = module


def _scan(root: Path, package: str, source: str, folder_kind: str | None) -> None:
    if root in _seen_roots:
        return
    _seen_roots.add(root)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith((".", "_")) and part != "__init__" for part in parts):
            continue
        if parts[-1] == "__init__":
            parts = parts[:-1]
        module = ".".join((package, *parts))
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        except (SyntaxError, UnicodeDecodeError):
            kind = folder_kind or next((k for k, f in FOLDER_OF_KIND.items() if f in parts), "attention")
            _add(Entry(kind, path.stem, module, "", path, source, broken=traceback.format_exc(limit=0)))
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for kind, name in _registrations(node):
                    _add(_static_entry(tree, node, kind, name, module, path, source))


def _scan_entry_points() -> None:
    for point in entry_points(group=ENTRY_POINT_GROUP):
        kind, _, name = point.name.partition(".")
        if kind not in KINDS or not name:
            raise UserError(
                f"entry point '{point.name}' of {ENTRY_POINT_GROUP}: its name must be KIND.NAME, e.g. attention.mine."
            )
        module, _, class_name = point.value.partition(":")
        if not class_name:
            raise UserError(f"entry point '{point.name}' of {ENTRY_POINT_GROUP}: its value must be module:Class.")
        known = _entries.get((kind, name))
        if known is None or known.module != module:
            _add(Entry(kind, name, module, class_name, None, "package"))


def _add(entry: Entry) -> None:
    known = _entries.get((entry.kind, entry.name))
    if known is not None and known.source != "runtime":
        raise _claimed_twice(known, str(entry.path or entry.module))
    if known is None:
        _entries[entry.kind, entry.name] = entry


def _claimed_twice(known: Entry, other: str) -> UserError:
    return UserError(f"{known.kind} plugin '{known.name}' is claimed twice: by {known.path or known.module} and by {other}.")


def _registrations(node: ast.ClassDef) -> list[tuple[str, str]]:
    found = []
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func).rpartition(".")[2] != "register":
            continue
        values = [a.value for a in decorator.args if isinstance(a, ast.Constant)]
        values += [k.value.value for k in decorator.keywords if isinstance(k.value, ast.Constant)]
        if len(values) == 2 and values[0] in KINDS:
            found.append((values[0], values[1]))
    return found


def _static_entry(tree: ast.Module, node: ast.ClassDef, kind: str, name: str, module: str, path: Path, source: str) -> Entry:
    entry = Entry(kind, name, module, node.name, path, source, _first_line(ast.get_docstring(node)))
    declared = [n for n in node.body if _declares(n) in ("Options", "capabilities")]
    present = {_declares(n) for n in declared}
    try:
        namespace = _evaluate(tree, declared)
    except (NameError, AttributeError, TypeError):
        return entry  # its declarations need its imports: they are read when the class is loaded
    plain_base = all(
        ast.unparse(b) in ("Attention", "Proposer", "Quant", "Moe", "Policy", "Sink", "Workload") for b in node.bases
    )
    if "Options" in present or plain_base:  # another base may declare them
        entry.static_options = namespace.get("Options", NoOptions)
    if "capabilities" in present or plain_base:
        entry.static_capabilities = namespace.get("capabilities", Capabilities())
    return entry


def _declares(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _evaluate(tree: ast.Module, declared: list[ast.stmt]) -> dict[str, Any]:
    """Run just the declarations, with the file's literal constants and the names a declaration may use."""
    namespace: dict[str, Any] = {
        "__name__": "lab_static",
        "Capabilities": Capabilities,
        "dataclass": dataclasses.dataclass,
        "dataclasses": dataclasses,
        "field": dataclasses.field,
        "frozenset": frozenset,
        **{n: getattr(typing, n) for n in ("Any", "ClassVar", "Literal", "Optional", "Union")},
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                namespace[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    exec(compile(ast.Module(declared, type_ignores=[]), "<plugin declarations>", "exec"), namespace)  # noqa: S102
    return namespace


def _first_line(doc: str | None) -> str:
    return (doc or "").strip().split("\n")[0]
