"""The one exception type for mistakes that the user can mend, and the wording that goes with it."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend: shown as one message without a traceback; the command exits with 2."""


class PluginFault(Exception):
    """A plugin broke its contract during a run; the message names it and says how."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or None when nothing is near enough to be helpful."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return matches[0] if matches else None


def unknown(what: str, word: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not one of `choices`: it names the nearest one and lists them all."""
    names = sorted(choices)
    guess = nearest(word, names)
    hint = f" Did you mean '{guess}'?" if guess else ""
    return UserError(f"no {what} named '{word}'.{hint}\nAvailable: {', '.join(names) or 'none'}.")
