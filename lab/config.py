"""From the command line's overrides to frozen Settings, by way of Hydra. Torch-free.

Hydra composes plain values (`lab.overrides`); what they may be is decided there, here and in `lab.settings`, so that every
message is ours: names are compared with the settings and the registry before Hydra sees them, values are typed afterwards,
and a plugin's options are checked against its `Options` without importing it. Past this module there is no DictConfig.

The plugin groups are not in the defaults list of conf/config.yaml: Hydra would refuse `+attention=x` if they were, and
`attention=x` since they are not. `normalise` makes the three spellings `x=`, `+x=` and `++x=` alike for every name.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from lab import registry
from lab.errors import UserError, nearest, unknown
from lab.overrides import (
    AUTO_GROUPS,
    EXPERIMENT,
    LISTED_GROUPS,
    PLUGIN_GROUPS,
    ambiguous,
    open_session,
    our_words,
    plain_value,
)
from lab.settings import PluginChoice, Settings
from lab.typed import from_plain

T = TypeVar("T")

ROOTS = tuple(f.name for f in dataclasses.fields(Settings))
OPEN = (*PLUGIN_GROUPS, "sampling", "goodput", registry.OPTIONS_OF["policy"])  # hold names that config.yaml does not


@dataclass(frozen=True)
class Composed:
    """What one point's overrides come to."""

    settings: Settings
    run_dir: str  # hydra.run.dir
    sweep_subdir: str  # hydra.sweep.subdir, of this point


@dataclass(frozen=True)
class SweepPlan:
    """A sweep: a list of overrides per point, which of their names vary, and where it goes."""

    points: list[list[str]]
    swept: list[str]
    directory: str  # hydra.sweep.dir
    notes: tuple[str, ...] = ()  # what the user must know of the points


def compose(overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = ()) -> Settings:
    """The settings that these overrides, in Hydra's syntax, come to.

    Args:
        config_dirs: more folders to look for groups in, after lab's own and those of the plugin folders.

    Raises:
        UserError: an unknown name, a value of the wrong type or out of range, an override that cannot be read.
    """
    return compose_run(overrides, config_dirs).settings


def compose_run(overrides: Sequence[str] = (), config_dirs: Sequence[str | Path] = (), *, point: int = 0) -> Composed:
    """`compose`, and the folders that Hydra's part of the configuration names; `point` counts the points of a sweep."""
    with open_session(config_dirs) as session:
        parsed = session.parse(normalise(overrides))
        for override in parsed:
            if override.is_sweep_override():
                raise ambiguous(override)
            session.check_choice(override)
        cfg = session.compose(parsed)
        cfg.hydra.job.num = point
        with our_words():
            plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"]), resolve=True)
            run_dir, subdir = (_folder(cfg, f"hydra.{name}") for name in ("run.dir", "sweep.subdir"))
        return Composed(to_settings(plain), run_dir, subdir)


def plan_sweep(overrides: Sequence[str], config_dirs: Sequence[str | Path] = (), *, multirun: bool) -> SweepPlan | None:
    """The points of a sweep, or None when these overrides ask for a single run.

    It is a sweep with `multirun` (the flag -m), or when an experiment says `hydra.mode: MULTIRUN`. The axes are those of
    the command line and of `hydra.sweeper.params`; the command line replaces an axis of the same name.
    """
    with open_session(config_dirs) as session:
        parsed = session.parse(normalise(overrides))
        fixed = [o for o in parsed if not o.is_sweep_override()]
        for override in fixed:
            session.check_choice(override)
        if not multirun and not any(o.key_or_group in (EXPERIMENT, "hydra.mode") for o in fixed):
            return None
        cfg = session.compose(fixed)
        mode = OmegaConf.select(cfg, "hydra.mode")
        if (mode is None and not multirun) or (mode is not None and mode.name != "MULTIRUN"):
            return None
        params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
        parsed = session.parse(normalise([f"{key}={value}" for key, value in params.items()])) + parsed
        axes = {o.get_key_element(): o for o in parsed}  # the last of a name wins, in the place of the first
        points: list[list[str]] = [[]]
        for override in axes.values():
            points = [[*point, text] for point in points for text in session.choices(override)]
        swept = [key for key, override in axes.items() if override.is_sweep_override()]
        points, notes = _fitting_options(points, swept)
        return SweepPlan(points, swept, _folder(cfg, "hydra.sweep.dir"), notes)


def _fitting_options(points: list[list[str]], swept: Sequence[str]) -> tuple[list[list[str]], tuple[str, ...]]:
    """Where a sweep goes over plugins of a kind, an option is for those of them that have it, and points that are then the same
    are one. An option that none of them has stays, and fails its points.
    """
    notes: dict[str, None] = {}
    for kind in PLUGIN_GROUPS:
        if f"+{kind}" not in swept:
            continue
        known = {entry.name: entry.known_option_names for entry in registry.entries(kind)}
        chosen = [next(t.partition("=")[2] for t in texts if t.startswith(f"+{kind}=")) for texts in points]
        lacking: dict[str, list[str]] = {}  # plugins without an option that others have
        for texts in points:
            for name in {t.lstrip("+").partition("=")[0] for t in texts if t.startswith(f"++{kind}.")}:
                option = name.split(".")[1]
                if any(option in known.get(plugin, ()) for plugin in chosen):
                    lacking[name] = [p for p in dict.fromkeys(chosen) if p in known and option not in known[p]]
        for name, plugins in lacking.items():
            notes |= {f"{name} is not an option of {plugin}: those points run without it": None for plugin in plugins}
        points = [
            [t for t in texts if plugin not in lacking.get(t.lstrip("+").partition("=")[0], ())]
            for texts, plugin in zip(points, chosen, strict=True)
        ]
    return [list(texts) for texts in dict.fromkeys(map(tuple, points))], tuple(notes)


def normalise(overrides: Sequence[str]) -> list[str]:
    """Overrides as Hydra wants them: one spelling per name, the experiment first so that all else wins over it.

    Of two choices of one group the last counts, as it does for values.
    """
    first, groups, rest = [], {}, []
    for text in overrides:
        match = re.match(r"(\+\+|\+)?([^=~+]+)=(.*)", text, re.DOTALL)
        if not match:
            rest.append(text)
            continue
        _, name, value = match.groups()
        if name in AUTO_GROUPS and value == "auto":
            name = f"{name}.name"
        root = re.split(r"[.@]", name)[0]
        if name == EXPERIMENT:
            first.append(f"+{name}={value}")
        elif name in PLUGIN_GROUPS:
            groups[name] = f"+{name}={value}"
        elif name in LISTED_GROUPS:
            groups[name] = f"{name}={value}"
        elif f"{name}.".startswith(tuple(f"{holder}." for holder in OPEN)):
            rest.append(f"++{name}={value}")
        elif root in ROOTS:
            rest.append(f"{name}={value}")
        else:
            rest.append(text)
    return first + list(groups.values()) + rest


def to_settings(plain: Mapping[str, Any]) -> Settings:
    """Typed settings from the composed plain values; plugins and their options are checked by name and type."""
    data = dict(plain)
    for kind in PLUGIN_GROUPS:
        if isinstance(data.get(kind), Mapping):
            options = dict(data[kind])
            data[kind] = {"name": options.pop("name", PluginChoice().name), "options": options}
    settings = from_plain(Settings, data, "")
    _policy_options(settings)
    for kind in PLUGIN_GROUPS:
        _check_plugin(kind, getattr(settings, kind))
    return settings


def to_plain(settings: Settings) -> dict[str, Any]:
    """The inverse of `to_settings`, with the plugins' options complete: what config.yaml of a run folder holds."""
    data = _lists(dataclasses.asdict(settings))
    for kind in PLUGIN_GROUPS:
        choice: PluginChoice = getattr(settings, kind)
        options: dict[str, Any] = {}
        if choice.name != "auto":
            options = _lists(dataclasses.asdict(registry.get(kind, choice.name).make_options(choice.options)))
        data[kind] = {"name": choice.name, **options}
    data["scheduler"]["policy_options"] = _lists(dataclasses.asdict(_policy_options(settings)))
    return data


def to_yaml(settings: Settings) -> str:
    """`to_plain` as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(settings)))


def plugin_to_check(overrides: Sequence[str]) -> tuple[registry.Entry, Any]:
    """The plugin that `+KIND=NAME` names, of any kind, with its options from `KIND.OPTION=VALUE`.

    As well understood: KIND.NAME, and for a policy the names of the settings, scheduler.policy and scheduler.policy_options.
    """
    name_of: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}
    with open_session(()) as session:
        for text in overrides:
            text = _as_group(text.lstrip("+"))
            override = session.read(text)
            kind, _, option = override.key_or_group.partition(".")
            if kind not in registry.KINDS:
                raise unknown("kind of plugin", kind, registry.KINDS)
            value = plain_value(override)
            if option:
                _put(options.setdefault(kind, {}), option, value)
            else:
                name_of[kind] = str(value)
    if len(name_of) != 1 or set(options) - set(name_of):
        raise UserError(
            "name one plugin to check, and options of that one only: lab check KIND=NAME KIND.OPTION=VALUE,\n"
            f"where KIND is one of {', '.join(registry.KINDS)}."
        )
    ((kind, name),) = name_of.items()
    entry = registry.get(kind, name)
    return entry, entry.make_options(options.get(kind, {}))


def take_options(prefix: str, cls: type[T], overrides: Sequence[str]) -> tuple[T, list[str]]:
    """The options that PREFIX.NAME=VALUE among the overrides set, as a `cls`, and the other overrides."""
    options: dict[str, Any] = {}
    rest = []
    with open_session(()) as session:
        for text in overrides:
            if not text.lstrip("+").startswith(f"{prefix}."):
                rest.append(text)
                continue
            override = session.read(text.lstrip("+"))
            value = plain_value(override)
            _put(options, override.key_or_group.removeprefix(f"{prefix}."), value)
    return from_plain(cls, options, prefix), rest


def _check_plugin(kind: str, choice: PluginChoice) -> None:
    if choice.name == "none" or (choice.name == "auto" and kind in AUTO_GROUPS):
        options_of = {entry.name: entry.known_option_names for entry in registry.entries(kind)}
        for option in choice.options:
            having = [name for name, options in options_of.items() if option in options]
            guess = nearest(option, {name for options in options_of.values() for name in options})
            hint = f" Did you mean '{guess}'?" if guess else ""
            known = f" Plugins with this option: {', '.join(having)}." if having else f" No {kind} plugin has it.{hint}"
            raise UserError(f"{kind}.{option} is set, but no {kind} plugin is named: add +{kind}=NAME.{known}")
    if choice.name == "auto" and kind in AUTO_GROUPS:
        return
    registry.get(kind, choice.name).make_options(choice.options)


def _as_group(text: str) -> str:
    """The other ways to name a plugin or its option in `lab check`, as KIND=NAME and KIND.OPTION=VALUE."""
    if "=" not in text:
        kind, dot, name = text.partition(".")
        return f"{kind}={name}" if dot else text
    for setting, name in (("scheduler.policy=", "policy="), (f"{registry.OPTIONS_OF['policy']}.", "policy.")):
        if text.startswith(setting):
            return name + text.removeprefix(setting)
    return text


def _policy_options(settings: Settings) -> Any:
    return registry.get("policy", settings.scheduler.policy).make_options(settings.scheduler.policy_options)


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a dotted name in nested dictionaries."""
    *parents, last = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _lists(value: Any) -> Any:
    """Tuples as lists, all the way down: plain data as YAML and JSON have it."""
    if isinstance(value, Mapping):
        return {k: _lists(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(v) for v in value]
    return value


def _folder(cfg: Any, name: str) -> str:
    folder = OmegaConf.select(cfg, name)
    if folder is None or not str(folder).strip():
        raise UserError(f"{name} is empty: give a folder, or leave it out.")
    return str(folder)
