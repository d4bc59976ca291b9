"""One registry for every kind of plugin. Torch-free: files are read, not imported, until a plugin is chosen.

A plugin is a class under `@register(kind, name)`. Discovery parses the source of every file in the plugin folders for that
decorator, so `lab plugins` and the answer to a typo cost milliseconds whatever the plugins import. The class is imported
when it is chosen, or when its declarations (`Options`, `capabilities`) use more than the names that `lab.api` offers.

Where plugins come from: the `plugins/` folder beside this package; folders inside `lab` for the small kinds; the user's
folders (`--plugins=DIR`, LAB_PLUGIN_PATH); the entry points `lab.plugins` of installed packages; classes registered at run
time. Two sources that claim one name are an error. A file that cannot be parsed or imported is listed as broken, with its
own traceback when it is chosen. Folders and packages may ship configuration too: DIR/conf, and entry points `lab.conf`.
"""

import dataclasses
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from lab.capabilities import Capabilities
from lab.errors import UserError, nearest, unknown
from lab.plugin_source import Found, NoOptions, field_docs, first_line, imports_beyond_api, read_plugins
from lab.typed import from_plain

FOLDER_OF_KIND = {"attention": "attention", "spec": "spec_decode", "quant": "quant", "moe": "moe"}
SMALL_KINDS = {
    "draft_length": "runner/draft_lengths",
    "policy": "sched/policies",
    "sink": "metrics/sinks",
    "workload": "bench/workloads",
}
KINDS = (*FOLDER_OF_KIND, *SMALL_KINDS)
CONTRACTS = {
    "attention": "Attention",
    "spec": "Proposer",
    "quant": "Quant",
    "moe": "Moe",
    "draft_length": "DraftLength",
    "policy": "Policy",
    "sink": "Sink",
    "workload": "Workload",
}
OPTIONS_OF = {kind: kind for kind in (*FOLDER_OF_KIND, "draft_length", "workload")} | {"policy": "scheduler.policy_options"}
RESERVED = "auto"  # what a user writes to let the capabilities decide
ENTRY_POINT_GROUP = "lab.plugins"
CONF_ENTRY_POINT_GROUP = "lab.conf"
PATH_VARIABLE = "LAB_PLUGIN_PATH"

LAB_DIR = Path(__file__).resolve().parent
BUILTIN_DIR = LAB_DIR.parent / "plugins"

T = TypeVar("T", bound=type)


class BrokenPlugin(UserError):
    """A plugin's file cannot be imported; the message carries its own traceback."""


@dataclasses.dataclass
class Entry:
    """One plugin: where it is, and what can be known of it without importing it."""

    kind: str
    name: str
    module: str
    class_name: str
    path: Path | None  # None: registered at run time, or a package whose file is not known before its import
    source: str  # built-in | folder | package | runtime
    doc: str = ""
    broken: str | None = None  # the error of a file that does not parse
    cls: type | None = None
    static_options: type | None = None
    static_capabilities: Capabilities | None = None
    static_option_docs: dict[str, str] = dataclasses.field(default_factory=dict)

    def load(self) -> type:
        """The plugin's class, imported on first use. Raises BrokenPlugin with the plugin's own traceback."""
        if self.cls is None:
            if self.broken:
                raise BrokenPlugin(f"{self.kind} plugin '{self.name}' ({self.path}) is broken:\n{self.broken}")
            before = set(_entries)
            try:
                cls = getattr(importlib.import_module(self.module), self.class_name)
            except Exception as error:  # noqa: BLE001 - a plugin's import may fail in any way; nothing of it is swallowed
                sys.modules.pop(self.module, None)
                for key in set(_entries) - before:
                    del _entries[key]  # a half-imported file leaves nothing behind
                raise BrokenPlugin(
                    f"{self.kind} plugin '{self.name}' ({self.path or self.module}) cannot be imported:\n"
                    f"{_own_traceback(error, self.path)}"
                ) from None
            _check_contract(self, cls)
            self.cls = cls
        return self.cls

    @property
    def options(self) -> type:
        """The plugin's `Options` dataclass."""
        return self.static_options or getattr(self.load(), "Options", NoOptions)

    @property
    def capabilities(self) -> Capabilities:
        return self.static_capabilities or getattr(self.load(), "capabilities", Capabilities())

    @property
    def option_names(self) -> list[str]:
        return [f.name for f in dataclasses.fields(self.options) if f.init]

    @property
    def option_docs(self) -> dict[str, str]:
        """What the comment beside each option says."""
        return self.static_option_docs if self.static_options else field_docs(self.options)

    @property
    def known_option_names(self) -> list[str]:
        """The names of the options as far as they are known without importing the plugin."""
        return self.option_names if self.static_options or self.cls else []

    @property
    def digest(self) -> str:
        """A short hash of the plugin's source, for the record of a run; empty when it has no file."""
        return hashlib.blake2b(self.path.read_bytes(), digest_size=8).hexdigest() if self.path else ""

    def with_options(self, options: Any) -> "Entry":
        """This plugin as it is with these options: of some, what they can serve depends on them."""
        return dataclasses.replace(self, static_capabilities=self.load().capabilities_with(options))

    def make_options(self, given: Mapping[str, Any]) -> Any:
        """An instance of the plugin's `Options`. Raises UserError for an unknown option, or a value of the wrong type."""
        names = self.option_names
        for name in given:
            if name not in names:
                guess = nearest(str(name), names)
                hint = f" Did you mean '{guess}'?" if guess else ""
                raise UserError(
                    f"{self.kind} plugin '{self.name}' has no option '{name}'.{hint}\n"
                    f"Available: {', '.join(names) or 'none, it takes no options'}."
                )
        return from_plain(self.options, given, OPTIONS_OF.get(self.kind, self.kind))


def to_blame(error: BaseException) -> Entry | None:
    """The plugin of the user's in whose file an exception was raised, or what it called raised it; None when it was none."""
    files = [Path(frame.filename).resolve() for frame in traceback.extract_tb(error.__traceback__)]
    of_file = {entry.path.resolve(): entry for entry in _entries.values() if entry.path and entry.source != "built-in"}
    return next((of_file[file] for file in reversed(files) if file in of_file), None)


_entries: dict[tuple[str, str], Entry] = {}
_seen_roots: set[Path] = set()
_user_roots: list[Path] = []
_unparsed: dict[Path, str] = {}  # files that speak of `register` and do not parse: file -> the error


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class decorator that makes a plugin known as `name` among those of `kind`.

    Raises UserError for an unknown kind, or when another class has the name already.
    """
    _check_label(kind, name, "register")

    def decorate(cls: T) -> T:
        cls.kind, cls.name = kind, name
        known = _entries.get((kind, name))
        if known is None:
            entry = Entry(kind, name, cls.__module__, cls.__qualname__, None, "runtime", first_line(cls.__doc__), cls=cls)
            _entries[kind, name] = entry
        elif known.source == "runtime":
            known.cls, known.module, known.doc = cls, cls.__module__, first_line(cls.__doc__)  # a notebook cell run again
        elif known.module != cls.__module__ and known.source != "package":
            raise _claimed_twice(known, f"module {cls.__module__}")
        return cls

    return decorate


def discover(folders: Iterable[str | Path] = ()) -> None:
    """Find every plugin of every source; idempotent. Raises UserError for a missing folder or a name claimed twice."""
    package = _mount_builtin()
    for folder in FOLDER_OF_KIND.values():
        _scan(BUILTIN_DIR / folder, f"{package}.{folder}", "built-in")
    for folder in SMALL_KINDS.values():
        _scan(LAB_DIR / folder, "lab." + folder.replace("/", "."), "built-in")
    listed = os.environ.get(PATH_VARIABLE, "")
    for folder in [*(f for f in listed.split(os.pathsep) if f), *folders]:
        root = Path(folder).expanduser().resolve()
        if root.is_file():
            raise UserError(f"'{folder}' is a file: name the folder that your plugins are in, '{root.parent}'.")
        if not root.is_dir():
            raise UserError(f"plugin folder '{folder}' does not exist.")
        package = "lab_user_" + hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()
        _mount(package, root)
        _scan(root, package, "folder")
        if root not in _user_roots:
            _user_roots.append(root)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        _add_entry_point(point)


def entries(kind: str | None = None) -> list[Entry]:
    """All known plugins, or those of one kind, by kind and name."""
    found = [e for e in _entries.values() if kind is None or e.kind == kind]
    return sorted(found, key=lambda e: (KINDS.index(e.kind), e.name))


def get(kind: str, name: str) -> Entry:
    """The plugin of that name. Raises UserError naming the nearest one and the alternatives."""
    if kind not in KINDS:
        raise unknown("kind of plugin", kind, KINDS)
    if (kind, name) not in _entries:
        error = unknown(f"{kind} plugin", name, [e.name for e in entries(kind)])
        raise UserError(f"{error}\nOne of your own is found by --plugins=FOLDER or {PATH_VARIABLE}.")
    return _entries[kind, name]


def unparsed() -> list[str]:
    """A line for each plugin file that cannot be parsed: where, why, and the plugins that it would have held."""
    lines = []
    for path, error in _unparsed.items():
        *where, why = error.strip().splitlines()
        number = re.search(r", line (\d+)", where[0] if where else "")
        held = [f"{e.kind}.{e.name}" for e in entries() if e.path == path]
        place = f"{path}, line {number[1]}" if number else str(path)
        lines.append(f"{place} cannot be parsed ({why}): {', '.join(held) or 'what plugins it has'} cannot be used.")
    return lines


def conf_paths() -> list[str]:
    """Where the user's folders and installed packages keep configuration, in the form of Hydra's search path."""
    paths = [f"file://{root / 'conf'}" for root in _user_roots if (root / "conf").is_dir()]
    return paths + [f"pkg://{point.value}" for point in entry_points(group=CONF_ENTRY_POINT_GROUP)]


def _mount_builtin() -> str:
    """Mount plugins/ under its own name, unless the program that imports lab has another package of that name."""
    taken = sys.modules.get("plugins")
    package = "plugins" if taken is None or str(BUILTIN_DIR) in map(str, getattr(taken, "__path__", ())) else "lab_plugins"
    _mount(package, BUILTIN_DIR)
    return package


def _mount(package: str, root: Path) -> None:
    """Make `root` importable as `package` without touching sys.path, whatever the working folder holds."""
    if package not in sys.modules:
        module = types.ModuleType(package)
        module.__path__ = [str(root)]
        sys.modules[package] = module


def _scan(root: Path, package: str, source: str) -> None:
    """Add the plugins of a folder: all of them, or, when one is in the way, none."""
    if root in _seen_roots:
        return
    added: dict[tuple[str, str], Entry] = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if any(part.startswith((".", "_")) and part != "__init__" or part == "site-packages" for part in parts):
            continue
        module = ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))
        for found in read_plugins(path, set(CONTRACTS.values())):
            if found.broken:
                _unparsed[path] = found.broken
            elif source != "built-in" and (beyond := imports_beyond_api(path)):
                found = dataclasses.replace(
                    found, broken=f"it imports {', '.join(beyond)}: a plugin imports lab.api alone of lab."
                )
            if not found.name:
                continue
            _check_label(found.kind, found.name, str(path))
            entry = _entry(found, module, path, source)
            known = added.get((entry.kind, entry.name)) or _entries.get((entry.kind, entry.name))
            if known is not None and known.source != "runtime":
                raise _claimed_twice(known, f"{path}{', which cannot be parsed' if entry.broken else ''}")
            added[entry.kind, entry.name] = entry
    _entries.update(added)
    _seen_roots.add(root)


def _entry(found: Found, module: str, path: Path | None, source: str) -> Entry:
    return Entry(
        found.kind,
        found.name,
        module,
        found.class_name,
        path,
        source,
        found.doc,
        found.broken,
        static_options=found.options,
        static_capabilities=found.capabilities,
        static_option_docs=found.option_docs,
    )


def _add_entry_point(point: EntryPoint) -> None:
    where = f"entry point '{point.name}' of {ENTRY_POINT_GROUP}"
    kind, _, name = point.name.partition(".")
    if not name:
        raise UserError(f"{where}: its name must be KIND.NAME, e.g. attention.mine.")
    _check_label(kind, name, where)
    module, _, class_name = point.value.partition(":")
    if not class_name:
        raise UserError(f"{where}: its value must be module:Class.")
    known = _entries.get((kind, name))
    if known is not None and known.source == "package" and known.module == module:
        return
    if known is not None and known.source != "runtime":
        raise _claimed_twice(known, f"{where} ({point.value})")
    path = _source_file(module)
    described = [f for f in read_plugins(path, set(CONTRACTS.values())) if (f.kind, f.name) == (kind, name)] if path else []
    found = described[0] if described else Found(kind, name)
    _entries[kind, name] = _entry(dataclasses.replace(found, class_name=class_name), module, path, "package")


def _source_file(module: str) -> Path | None:
    """The file of an installed module, found without importing any part of it; None when it is not a plain file."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin.endswith(".py") else None
    base = Path(spec.origin).parent.joinpath(*rest)
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


def _check_label(kind: str, name: str, where: str) -> None:
    if kind not in KINDS:
        error = unknown("kind of plugin", kind, KINDS)
        raise UserError(f"{where}: {error}")
    if name == RESERVED or not name.replace("_", "").replace("-", "").isalnum():
        raise UserError(f"{where}: '{name}' cannot name a plugin: letters, digits, - and _ only, and '{RESERVED}' is taken.")


def _own_traceback(error: BaseException, path: Path | None) -> str:
    """The traceback of a plugin's import, without the frames of the import machinery and of lab."""
    told = traceback.TracebackException.from_exception(error)
    chain: list[traceback.TracebackException | None] = [told]
    while chain:
        part = chain.pop()
        if part is not None:
            part.stack[:] = [f for f in part.stack if f.filename == str(path) or not _is_ours(f.filename)]
            chain += [part.__cause__, part.__context__]
    return "".join(told.format())


def _is_ours(file: str) -> bool:
    return file.startswith("<frozen ") or LAB_DIR in Path(file).parents or file == importlib.__file__


def _check_contract(entry: Entry, cls: type) -> None:
    """Refuse a class that is not what its kind asks for. Raises BrokenPlugin naming what is missing."""
    base = CONTRACTS[entry.kind]
    contract = getattr(importlib.import_module(f"lab.contracts.{entry.kind}"), base)
    label = f"{entry.kind} plugin '{entry.name}' ({entry.path or entry.module})"
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        raise BrokenPlugin(f"{label}: {entry.class_name} must derive from lab.api.{base}.")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise BrokenPlugin(f"{label}: {entry.class_name} lacks {', '.join(missing)}.")


def _claimed_twice(known: Entry, other: str) -> UserError:
    return UserError(f"{known.kind} plugin '{known.name}' is claimed twice: by {known.path or known.module} and by {other}.")
