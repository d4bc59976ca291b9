"""Contract checks of every kind of plugin: `lab check` runs them on one plugin, tests/contracts on all of them.

lab/checks/KIND.py holds functions `check_*(entry, options)`: the first line of the docstring says what one proves, and it
raises CheckFailed with a reason that the plugin's author can act on, or NotDeclared when it asks for what the plugin does
not claim to do.
"""

import importlib
import importlib.util
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.errors import UserError

if TYPE_CHECKING:
    from lab.registry import Entry

TRACEBACK_LINES = 12  # of a plugin that raised, the last ones


class CheckFailed(AssertionError):
    """A plugin breaks its contract; the message says how, in words its author can act on."""


class NotDeclared(Exception):  # noqa: N818 - no error
    """The plugin does not declare what the check is about, so there is nothing to judge; the message says what."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found. `reason` is empty when the plugin passed; `not_declared` says what there was not to judge."""

    name: str
    proves: str
    reason: str
    seconds: float
    not_declared: str = ""

    @property
    def ok(self) -> bool:
        return not self.reason


def run_checks(entry: "Entry", options: Any) -> Iterator[CheckResult]:
    """Run every check of the plugin's kind, one after another, yielding each result as it is known.

    Raises UserError when the plugin cannot be imported, or when its kind has no checks.
    """
    module_name = f"lab.checks.{entry.kind}"
    if importlib.util.find_spec(module_name) is None:
        raise UserError(f"there are no checks for plugins of the kind '{entry.kind}'.")
    entry.load()
    module = importlib.import_module(module_name)
    for name, check in vars(module).items():
        if name.startswith("check_") and callable(check):
            start = time.perf_counter()
            reason, not_declared = "", ""
            try:
                reason = _reason(check, entry, options)
            except NotDeclared as what:
                not_declared = str(what)
            proves = (check.__doc__ or "").strip().split("\n")[0].removesuffix(".")
            seconds = time.perf_counter() - start
            yield CheckResult(name.removeprefix("check_"), proves, reason, seconds, not_declared)


def _reason(check: Any, entry: "Entry", options: Any) -> str:
    try:
        check(entry, options)
    except NotDeclared:
        raise
    except CheckFailed as failure:
        return str(failure) or "failed without a reason"
    except Exception:  # noqa: BLE001 - whatever a plugin raises under a check is a finding about the plugin
        return "it raised:\n" + "\n".join(traceback.format_exc().strip().splitlines()[-TRACEBACK_LINES:])
    return ""
