"""The one exception type for mistakes that the user can mend, and the wording that goes with it."""

import difflib
from collections.abc import Iterable

LIKE = 0.74  # share of letters that a name and its misspelling have in common: a letter lost of three, one wrong of four
SHORT = 4  # letters of an abbreviation, at least
OTHER_WORD = 3  # so many letters with others in their place are another word, however long the rest that both share


class UserError(Exception):
    """A mistake the user can mend: shown as one message without a traceback; the command exits with 2."""


class PluginFault(Exception):
    """A plugin broke its contract during a run; the message names it and says how."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice most like `word`, or the one that it is short for; None when it can be neither."""
    names = list(choices)
    swapped = [name for name in names if sorted(name) == sorted(word)]  # two letters in the wrong order, most often
    if swapped:
        return difflib.get_close_matches(word, swapped, n=1, cutoff=0.0)[0]
    matches = difflib.get_close_matches(word, names, cutoff=LIKE)
    alike = next((name for name in matches if _longest_replacement(word, name) < OTHER_WORD), None)
    if alike:
        return alike
    abbreviated = [name for name in names if len(word) >= SHORT and _is_short_for(word, name)]
    return abbreviated[0] if len(abbreviated) == 1 else None


def unknown(what: str, word: str, choices: Iterable[str]) -> UserError:
    """The error for a name that is not one of `choices`: it names the nearest one and lists them all."""
    names = sorted(choices)
    guess = nearest(word, names)
    hint = f" Did you mean '{guess}'?" if guess else ""
    return UserError(f"no {what} named '{word}'.{hint}\nAvailable: {', '.join(names) or 'none'}.")


def _is_short_for(word: str, name: str) -> bool:
    """Whether `word` is the name's beginning, or what is left of it with the same first and last letter: prio, bf16."""
    rest = iter(name)
    return name.startswith(word) or (name[0] + name[-1] == word[0] + word[-1] and all(letter in rest for letter in word))


def _longest_replacement(word: str, name: str) -> int:
    codes = difflib.SequenceMatcher(None, word, name).get_opcodes()
    return max((max(a1 - a0, b1 - b0) for tag, a0, a1, b0, b1 in codes if tag == "replace"), default=0)
