"""Reading the command line into a verb, its flags and its overrides. Flags may stand anywhere."""

from dataclasses import dataclass, field

from lab.cli.verbs import COMMON_FLAGS, VERBS, Flag
from lab.errors import UserError, nearest, unknown


@dataclass
class Arguments:
    """What was asked for. `overrides` are the words that are neither verb nor flag, in their order."""

    verb: str | None = None
    overrides: list[str] = field(default_factory=list)
    plugins: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    wants_help: bool = False
    json: bool = False
    multirun: bool = False
    fail_fast: bool = False
    print_config: bool = False
    measure: bool = False
    out: list[str] = field(default_factory=list)
    per: list[str] = field(default_factory=list)


def parse(argv: list[str]) -> Arguments:
    """Raises UserError for an unknown verb or flag, with the nearest one, and for a flag without its value."""
    arguments = Arguments()
    words = iter(argv)
    flags: list[tuple[str, str | None]] = []
    values = {name for f in _all_flags() if f.value for name in f.names}
    for word in words:
        if word == "--":
            arguments.overrides += words
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            if not equals and name in values:
                value, equals = next(words, ""), "="
            flags.append((name, value if equals else None))
        elif arguments.verb is None:
            arguments.verb = word
        else:
            arguments.overrides.append(word)
    if arguments.verb is None and [name for name, _ in flags] == ["--version"]:
        arguments.verb = "version"
        return arguments
    if arguments.verb is not None and arguments.verb not in VERBS:
        raise unknown("verb", arguments.verb, [name for name, verb in VERBS.items() if verb.summary])
    known = VERBS[arguments.verb].all_flags() if arguments.verb else COMMON_FLAGS
    for name, value in flags:
        _set(arguments, known, name, value)
    return arguments


def _set(arguments: Arguments, known: tuple[Flag, ...], name: str, value: str | None) -> None:
    flag = next((f for f in known if name in f.names), None)
    if flag is None:
        names = [n for f in known for n in f.names]
        guess = nearest(name, names)
        hint = f" Did you mean '{guess}'?" if guess else ""
        verb = f"`lab {arguments.verb}`" if arguments.verb else "lab"
        raise UserError(f"{verb} has no flag '{name}'.{hint}\nAvailable: {', '.join(names)}.")
    if flag.value and not value:
        raise UserError(f"the flag {name} needs a value: {name}={flag.value}.")
    if not flag.value and value is not None:
        raise UserError(f"the flag {name} takes no value.")
    if flag.value:
        getattr(arguments, flag.target).append(value)
    else:
        setattr(arguments, flag.target, True)


def _all_flags() -> list[Flag]:
    return [f for verb in VERBS.values() for f in verb.all_flags()]
