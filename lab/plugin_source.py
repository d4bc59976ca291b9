"""What a plugin's source says of it, read without importing the file. Torch-free.

A plugin is a class under `@register(kind, name)`, both written as text. Its `Options` and `capabilities` are evaluated on
their own when they use nothing but literals and what `lab.api` offers for declaring them; otherwise they are known once the
class is imported.
"""

import ast
import dataclasses
import re
import traceback
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def read_plugins(path: Path, contracts: set[str]) -> list[Found]:
    """The plugins of one file. One that does not parse is returned as broken, by what its text says or by its name.

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
        named = REGISTER_CALL.findall(source.decode("utf-8", "replace"))
        return [Found(kind, name, broken=why) for kind, name in dict.fromkeys(named)]
    found = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [_describe(tree, node, kind, name, path, contracts) for kind, name in _registrations(node, path)]
    return found


def first_line(doc: str | None) -> str:
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
    options, capabilities = _declarations(tree, node, path, contracts)
    return Found(kind, name, node.name, first_line(ast.get_docstring(node)), options=options, capabilities=capabilities)


def _declarations(
    tree: ast.Module, node: ast.ClassDef, path: Path, contracts: set[str]
) -> tuple[type | None, Capabilities | None]:
    """`Options` and `capabilities` of a class, its own or inherited; None for what only an import can tell."""
    declared = [n for n in node.body if _declares(n) in ("Options", "capabilities")]
    try:
        namespace = _evaluate(tree, declared)
    except (NameError, AttributeError, TypeError, ValueError):
        return None, None  # its declarations need the file's imports
    options, capabilities = namespace.get("Options"), namespace.get("capabilities")
    if len(node.bases) == 1 and (options is None or capabilities is None):
        inherited = _base_declarations(tree, ast.unparse(node.bases[0]).rpartition(".")[2], path, contracts)
        options, capabilities = options or inherited[0], capabilities or inherited[1]
    return options, capabilities


def _base_declarations(tree: ast.Module, base: str, path: Path, contracts: set[str]) -> tuple[type | None, Capabilities | None]:
    """Those of a base class that is a contract, stands in the same file, or comes from a file beside it."""
    if base in contracts:
        return NoOptions, Capabilities()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == base:
            return _declarations(tree, node, path, contracts)
        if isinstance(node, ast.ImportFrom) and node.module and any((a.asname or a.name) == base for a in node.names):
            package, _, module = node.module.rpartition(".")
            beside = path.parent / f"{module}.py"
            is_here = node.level == 1 and not package or package.split(".")[-1] == path.parent.name
            if is_here and beside.is_file():
                imported = ast.parse(beside.read_bytes(), filename=str(beside))
                original = next(a.name for a in node.names if (a.asname or a.name) == base)
                found = (n for n in imported.body if isinstance(n, ast.ClassDef) and n.name == original)
                return next((_declarations(imported, n, beside, contracts) for n in found), (None, None))
    return None, None


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
