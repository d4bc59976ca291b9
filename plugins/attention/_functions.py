"""Functions of the user's own, named in options as FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from lab.api import UserError, nearest

SUFFIX = ".py"  # of a place that is a file, not a module


def load_function(reference: str, option: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """The function that `reference` names, e.g. "alibi.py:slopes" (relative to the working folder) or "my.package:slopes".

    Args:
        option: the option that holds the reference, for messages.
        parameters: names of what the function will be called with, by position.

    Raises:
        UserError: there is no such file, module or function, it cannot be imported, or it takes other arguments.
    """
    check_reference(reference, option)
    place, _, name = reference.rpartition(":")
    module = _import(place, f"{option}='{reference}'")
    function = getattr(module, name, None)
    if not callable(function):
        own = sorted(n for n, value in vars(module).items() if inspect.isfunction(value) and not n.startswith("_"))
        guess = nearest(name, own)
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise UserError(f"{option}: {place} has no function '{name}'.{hint}\nIt has: {', '.join(own) or 'none'}.")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        wanted = ", ".join(parameters)
        raise UserError(f"{option}: {name} of {place} must take the arguments ({wanted}): {error}.") from None
    return function


def check_reference(reference: str, option: str) -> None:
    """Raise UserError for a reference that is none, or whose file is not there; nothing is imported."""
    place, colon, name = reference.rpartition(":")
    if not (place and colon and name):
        raise UserError(f"{option}='{reference}': write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION.")
    if place.endswith(SUFFIX) and not _file(place).is_file():
        raise UserError(f"{option}='{reference}': there is no file {_file(place)}.")


def _file(place: str) -> Path:
    return Path(place).expanduser().resolve()


def _import(place: str, where: str) -> ModuleType:
    try:
        if not place.endswith(SUFFIX):
            return importlib.import_module(place)
        path = _file(place)
        label = f"lab_functions_{path.stem}"
        spec = importlib.util.spec_from_file_location(label, path)
        assert spec is not None and spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        sys.modules[label] = module  # dataclasses and torch.compile look modules up by name
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - a user's file may fail in any way; the message shows all of it
        told = "".join(traceback.format_exception(error)).strip()
        raise UserError(f"{where} cannot be imported:\n{told}") from None
    return module
