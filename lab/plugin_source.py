"""What a plugin's source says of it, read without importing the file. Torch-free.

A plugin is a class under `@register(kind, name)`, both written as text. Its `Options` and `capabilities` are evaluated on
their own when they use nothing but literals and what `lab.api` offers for declaring them; otherwise they are known once the
class is imported.
"""

import ast
import dataclasses
import re
import sys
import traceback
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lab.capabilities import Capabilities
from lab.errors import UserError

REGISTER_CALL = re.compile(r"""\bregister\(\s*(?:kind\s*=\s*)?["'](\w+)["']\s*,\s*(?:name\s*=\s*)?["']([^"']+)["']""")


@dataclass(frozen=True)
class NoOptions:
    """The options of a plugin that declares none."""


@dataclass(frozen=True)
class Found:
    """One `@register` in a source file."""

    kind: str
    name: str
    class_name: str = ""
    doc: str = ""
    broken: str | None = None  # why the file cannot be parsed
    options: type | None = None  # None: known once the class is imported
    capabilities: Capabilities | None = None
    option_docs: dict[str, str] = field(default_factory=dict)


class Declared(NamedTuple):
    """What a class declares or inherits; None for what only an import can tell."""

    options: type | None = None
    capabilities: Capabilities | None = None
    option_docs: dict[str, str] = {}  # noqa: RUF012 - never written to


def read_plugins(path: Path, contracts: set[str]) -> list[Found]:
    """The plugins of one file. One that does not parse is returned as broken, by what its text says; without a name when
    its text does not tell.

    Args:
        contracts: the names of the base classes that declare no options and no limits themselves.

    Raises:
        UserError: the file cannot be read, or registers under something other than two literal texts.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"plugin file {path} cannot be read: {error.strerror}.") from None
    if b"register" not in source:
        return []
    try:
        tree = ast.parse(source, filename=str(path))
    except (SyntaxError, ValueError):
        why = traceback.format_exc(limit=0).removeprefix("Traceback (most recent call last):\n")
        named = REGISTER_CALL.findall(source.decode("utf-8", "replace")) or [("", "")]
        return [Found(kind, name, broken=why) for kind, name in dict.fromkeys(named)]
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [_describe(tree, node, kind, name, path, contracts) for kind, name in _registrations(node, path)]
    return found


def imports_beyond_api(path: Path) -> list[str]:
    """The parts of lab other than lab.api that a file imports, those for type checkers alone left out."""
    found: dict[str, None] = {}
    queue: list[ast.AST] = [ast.parse(path.read_bytes())]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            queue += node.orelse
            continue
        queue += ast.iter_child_nodes(node)
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"lab.{alias.name}" for alias in node.names] if node.module == "lab" else [node.module or ""]
        found |= dict.fromkeys(name for name in names if name.split(".")[0] == "lab" and name != "lab.api")
    return sorted(found)


def field_docs(cls: type) -> dict[str, str]:
    """The comments beside the fields of an imported dataclass and of those it derives from."""
    docs: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        file = getattr(sys.modules.get(part.__module__), "__file__", None)
        if file is None or not dataclasses.is_dataclass(part):
            continue
        node: Any = ast.parse(Path(file).read_bytes())
        for name in part.__qualname__.split("."):
            node = next((n for n in node.body if isinstance(n, ast.ClassDef) and n.name == name), None)
            if node is None:  # made by a function
                break
        docs |= _comments(node, Path(file))
    return docs


def first_line(doc: str | None) -> str:
    """The first line of a docstring; empty when there is none."""
    return (doc or "").strip().split("\n")[0]


def _registrations(node: ast.ClassDef, path: Path) -> list[tuple[str, str]]:
    found = []
    for decorator in node.decorator_list:
        if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func).rpartition(".")[2] != "register":
            continue
        given = dict(zip(("kind", "name"), decorator.args, strict=False)) | {k.arg: k.value for k in decorator.keywords}
        values = [given[k].value for k in ("kind", "name") if isinstance(given.get(k), ast.Constant)]
        if len(values) != 2 or not all(isinstance(v, str) for v in values):
            where = f"{path}, line {decorator.lineno}"
            raise UserError(f'{where}: a plugin is registered by two literal texts, e.g. @register("attention", "mine").')
        found.append((values[0], values[1]))
    return found


def _describe(tree: ast.Module, node: ast.ClassDef, kind: str, name: str, path: Path, contracts: set[str]) -> Found:
    declared = _declarations(tree, node, path, contracts)
    doc = first_line(ast.get_docstring(node))
    return Found(kind, name, node.name, doc, None, declared.options, declared.capabilities, declared.option_docs)


def _declarations(tree: ast.Module, node: ast.ClassDef, path: Path, contracts: set[str]) -> Declared:
    declared = {name: n for n in node.body if (name := _declares(n)) in ("Options", "capabilities")}
    try:
        namespace = _evaluate(tree, list(declared.values()))
    except (NameError, AttributeError, TypeError, ValueError):
        return Declared()  # its declarations need the file's imports
    own = Declared(namespace.get("Options"), namespace.get("capabilities"), _comments(declared.get("Options"), path))
    if len(node.bases) != 1 or (own.options and own.capabilities):
        return own
    inherited = _base_declarations(tree, ast.unparse(node.bases[0]).rpartition(".")[2], path, contracts)
    options = own if own.options else inherited
    return Declared(options.options, own.capabilities or inherited.capabilities, options.option_docs)


def _base_declarations(tree: ast.Module, base: str, path: Path, contracts: set[str]) -> tuple[type | None, Capabilities | None]:
    """Those of a base class that is a contract, stands in the same file, or comes from a file beside it."""
    if base in contracts:
        return Declared(NoOptions, Capabilities())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == base:
            return _declarations(tree, node, path, contracts)
        if isinstance(node, ast.ImportFrom) and node.module and any((a.asname or a.name) == base for a in node.names):
            package, _, module = node.module.rpartition(".")
            beside = path.parent / f"{module}.py"
            is_here = node.level == 1 and not package or package.split(".")[-1] == path.parent.name
            if is_here and beside.is_file():
                try:
                    imported = ast.parse(beside.read_bytes(), filename=str(beside))
                except (SyntaxError, ValueError):
                    return Declared()  # importing the plugin will tell
                original = next(a.name for a in node.names if (a.asname or a.name) == base)
                found = (n for n in imported.body if isinstance(n, ast.ClassDef) and n.name == original)
                return next((_declarations(imported, n, beside, contracts) for n in found), Declared())
    return Declared()


def _declares(node: ast.stmt) -> str | None:
    if isinstance(node, ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _comments(node: ast.stmt | None, path: Path) -> dict[str, str]:
    """The comment at the end of each field's line."""
    if not isinstance(node, ast.ClassDef):
        return {}
    lines = path.read_bytes().splitlines()
    docs = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            rest = lines[statement.end_lineno - 1][statement.end_col_offset :].decode("utf-8", "replace").strip()
            if rest.startswith("#"):
                docs[statement.target.id] = rest.lstrip("# ")
    return docs


def _evaluate(tree: ast.Module, declared: list[ast.stmt]) -> dict[str, Any]:
    """Run just the declarations, with the file's literal constants and the names a declaration may use."""
    namespace: dict[str, Any] = {
        "__name__": "lab_static",  # the __module__ of what is declared
        "Capabilities": Capabilities,
        "dataclass": dataclasses.dataclass,
        "dataclasses": dataclasses,
        "field": dataclasses.field,
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
