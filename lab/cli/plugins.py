"""`lab plugins`: what there is to choose from."""

import dataclasses
import json
import typing
from typing import Any

from lab import registry
from lab.cli.arguments import Arguments
from lab.cli.machine import unusable
from lab.cli.table import print_table
from lab.errors import UserError
from lab.plugin_source import field_docs
from lab.registry import BrokenPlugin, Entry
from lab.typed import describe


def plugins(arguments: Arguments) -> int:
    """Print the plugins that were asked for."""
    registry.discover(arguments.plugins)
    chosen, detailed = _chosen(arguments.overrides)
    if arguments.json:
        print(json.dumps({"plugins": [_record(e) for e in chosen]}))
    elif detailed:
        for entry in chosen:
            _print_entry(entry)
    else:
        reasons = {f"{e.kind}.{e.name}": unusable(e) for e in chosen}
        rows = [(e.kind, e.name, "no" if reasons[f"{e.kind}.{e.name}"] else "yes", e.source, e.doc) for e in chosen]
        print_table(("kind", "name", "usable here", "from", ""), rows)
        if any(reasons.values()):
            print("\nNot usable here:")
        for name, why in reasons.items():
            if why:
                print(f"  {name}: {'; '.join(why)}")
        print("\n`lab plugins KIND` and `lab plugins KIND.NAME` show options and capabilities.")
    return 0


def _chosen(words: list[str]) -> tuple[list[Entry], bool]:
    if len(words) > 1:
        raise UserError(f"`lab plugins` takes one kind or one KIND.NAME, got {' '.join(words)}.")
    if not words:
        return registry.entries(), False
    kind, _, name = words[0].partition(".")
    if name:
        return [registry.get(kind, name)], True
    if kind not in registry.KINDS:
        registry.get(kind, "")  # raises, naming the kinds
    return registry.entries(kind), True


def _record(entry: Entry) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kind": entry.kind,
        "name": entry.name,
        "doc": entry.doc,
        "source": entry.source,
        "path": str(entry.path) if entry.path else None,
        "unusable": unusable(entry),
    }
    try:
        record["options"] = [dict(zip(("name", "type", "default", "doc"), o, strict=True)) for o in options_of(entry)]
        limits = dataclasses.asdict(entry.capabilities)
        record["capabilities"] = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in limits.items()}
    except BrokenPlugin as error:
        record["error"] = str(error)
    return record


def options_of(entry: Entry) -> list[tuple[str, str, str, str]]:
    """Name, type, default and documentation of each option; a nested one by its dotted name."""
    return fields_of(entry.options, entry.option_docs, "")


def fields_of(cls: type, docs: dict[str, str], prefix: str) -> list[tuple[str, str, str, str]]:
    """Of the fields of a dataclass what `options_of` tells, by their names after `prefix`; `docs` are the comments on them."""
    rows = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint, name = hints[field.name], f"{prefix}{field.name}"
        if dataclasses.is_dataclass(hint):
            rows += fields_of(hint, field_docs(hint), f"{name}.")
            continue
        default = "required"
        if field.default is not dataclasses.MISSING:
            default = json.dumps(field.default) if not isinstance(field.default, str) else field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = json.dumps(field.default_factory())
        rows.append((name, describe(hint), default, docs.get(field.name, "")))
    return rows


def _print_entry(entry: Entry) -> None:
    reasons = unusable(entry)
    print(f"{entry.kind}.{entry.name}  ({entry.source}{f', {entry.path}' if entry.path else ''})")
    print(f"  {entry.doc}")
    print(f"  usable here: {'no: ' + '; '.join(reasons) if reasons else 'yes'}")
    try:
        options, limits = options_of(entry), entry.capabilities
    except BrokenPlugin as error:
        print(f"  {str(error).strip()}\n")
        return
    for field in dataclasses.fields(limits):
        value = getattr(limits, field.name)
        if value != field.default and value not in (frozenset(), ()) and field.name != "api_version":
            shown = ", ".join(str(v) for v in sorted(value)) if isinstance(value, frozenset | tuple) else str(value)
            print(f"  {field.name.replace('_', ' ')}: {shown}")
    if not options:
        print("  options: none\n")
        return
    group = f"{registry.OPTIONS_OF[entry.kind]}." if entry.kind in registry.OPTIONS_OF else ""  # a sink takes none in a run
    print("  options:")
    for name, wanted, default, doc in options:
        print(f"    {group}{name}={default}  # {wanted}{': ' + doc if doc else ''}")
    print()
