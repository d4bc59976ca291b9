"""Typed dataclasses from plain data: what YAML, JSON and the command line hold, checked field by field. Torch-free.

Strict on purpose: a whole number is not a truth value, text is not a number, and an unknown name is never dropped. Only
what loses nothing is converted: a whole number where a float is wanted, a list where a tuple is wanted.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from lab.errors import UserError, nearest

T = TypeVar("T")

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
}


def from_plain(cls: type[T], data: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass `cls`, nested dataclasses included, from plain data.

    Args:
        where: the dotted name of `data` in the user's settings, e.g. "attention"; empty at the root.

    Raises:
        UserError: an unknown name (with the nearest one), a value of the wrong type, a missing value. Errors raised by
            the dataclass itself pass through.
    """
    if not isinstance(data, Mapping):
        raise _wrong(where, "a mapping", data)
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in data:
        if key not in known:
            raise no_setting(_join(where, key), [_join(where, name) for name in known])
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise UserError(f"{_join(where, name)} must be given: {describe(hints[name])}.")
    return cls(**{key: _convert(hints[key], value, _join(where, key)) for key, value in data.items()})


def no_setting(name: str, available: list[str]) -> UserError:
    """The error for a dotted name that does not exist: the nearest one, and all there are (`available`) at that place."""
    parent, dot, last = name.rpartition(".")  # what they have in common would make all of them alike
    guess = nearest(last, [other.removeprefix(parent + dot) for other in available])
    hint = f" Did you mean '{parent}{dot}{guess}'?" if guess else ""
    return UserError(f"no setting '{name}'.{hint}\nAvailable: {', '.join(available) or 'none'}.")


def describe(hint: Any) -> str:
    """A type hint in words: `int | None` is "a whole number or null"."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return "any value"
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin in (list, tuple) and args:
        inner = [a for a in args if a is not Ellipsis]
        return f"a list of {len(inner)} values" if len(inner) > 1 else f"a list, each {describe(inner[0])}"
    if dataclasses.is_dataclass(hint) or origin in (dict, Mapping) or hint is Mapping:
        return "a mapping"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _literal(args, value, where)
    if origin in (Union, types.UnionType):
        return _union(hint, args, value, where)
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, where)
    if (origin or hint) in (list, tuple):
        return _sequence(hint, origin or hint, args, value, where)
    if (origin or hint) in (dict, Mapping):
        return _mapping(hint, args, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint not in (bool, int, float, str, type(None)):
        raise UserError(f"{where} is declared as {describe(hint)}, which settings cannot hold.")
    if type(value) is not hint:
        raise _wrong(where, describe(hint), value)
    return value


def _literal(allowed: tuple, value: Any, where: str) -> Any:
    for choice in allowed:
        if type(value) is type(choice) and value == choice:
            return value
    guess = nearest(value, [a for a in allowed if isinstance(a, str)]) if isinstance(value, str) else None
    hint = f" Did you mean '{guess}'?" if guess else ""
    raise UserError(f"{where} must be one of {', '.join(str(a) for a in allowed)}; got {_show(value)}.{hint}")


def _union(hint: Any, members: tuple, value: Any, where: str) -> Any:
    if value is None and type(None) in members:
        return None
    inner = [m for m in members if m is not type(None)]
    if len(inner) == 1 and not _is_plain(inner[0]):
        return _convert(inner[0], value, where)  # its own message says more than the union's
    for exact in inner:
        if type(value) is exact:
            return value
    for member in inner:
        try:
            return _convert(member, value, where)
        except UserError:
            continue
    raise _wrong(where, describe(hint), value)


def _sequence(hint: Any, kind: type, args: tuple, value: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _wrong(where, describe(hint), value)
    if not args:
        return kind(value)
    if kind is tuple and Ellipsis not in args:
        if len(args) != len(value):
            raise _wrong(where, describe(hint), value)
        members = args
    else:
        members = (args[0],) * len(value)
    return kind(_convert(m, item, f"{where}[{i}]") for i, (m, item) in enumerate(zip(members, value, strict=True)))


def _mapping(hint: Any, args: tuple, value: Any, where: str) -> dict:
    if not isinstance(value, Mapping):
        raise _wrong(where, describe(hint), value)
    if not args:
        return dict(value)
    return {_convert(args[0], k, f"{where}, key {k!r},"): _convert(args[1], v, f"{where}.{k}") for k, v in value.items()}


def _is_plain(hint: Any) -> bool:
    return hint in (bool, int, float, str)


def _wrong(where: str, wanted: str, value: Any) -> UserError:
    hint = ""
    if "text" in wanted and isinstance(value, bool | int | float):
        hint = f" To give it as text, quote it twice: {where}='\"{_show(value)}\"'."
    return UserError(f"{where or 'the settings'} must be {wanted}; got {_show(value)}.{hint}")


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _show(value: Any) -> str:
    """A value as YAML would write it, short enough for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
