"""From the command line's overrides to frozen Settings, by way of Hydra. Torch-free.

Hydra composes plain values; what they may be is decided here and in `lab.settings`, so that every message is ours: names
are compared with the settings and the registry before Hydra sees them, values are typed afterwards, and a plugin's options
are checked against its `Options` without importing it. Past this module there is no DictConfig.

The plugin groups are not in the defaults list of conf/config.yaml: Hydra would refuse `+attention=x` if they were, and
`attention=x` since they are not. `normalise` makes the three spellings `x=`, `+x=` and `++x=` alike for every name.
"""

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lab import registry
from lab.errors import UserError, unknown
from lab.settings import PluginChoice, Settings
from lab.typed import from_plain, no_setting

T = TypeVar("T")

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
PLUGIN_GROUPS = ("attention", "spec", "draft_length", "quant", "moe", "workload")  # kinds that a run chooses by such a group
AUTO_GROUPS = ("attention", "quant", "moe")  # kinds for which `auto` may choose
LISTED_GROUPS = ("model",)  # in the defaults list
EXPERIMENT = "experiment"
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
    with _session(config_dirs) as session:
        parsed = session.parse(normalise(overrides))
        for override in parsed:
            if override.is_sweep_override():
                raise _ambiguous(override)
            session.check_choice(override)
        cfg = session.compose(parsed)
        cfg.hydra.job.num = point
        with _our_words():
            plain = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [k for k in cfg if k != "hydra"]), resolve=True)
            run_dir, subdir = (_text(OmegaConf.select(cfg, f"hydra.{k}")) for k in ("run.dir", "sweep.subdir"))
        return Composed(to_settings(plain), run_dir, subdir)


def plan_sweep(overrides: Sequence[str], config_dirs: Sequence[str | Path] = (), *, multirun: bool) -> SweepPlan | None:
    """The points of a sweep, or None when these overrides ask for a single run.

    It is a sweep with `multirun` (the flag -m), or when an experiment says `hydra.mode: MULTIRUN`. The axes are those of
    the command line and of `hydra.sweeper.params`; the command line replaces an axis of the same name.
    """
    with _session(config_dirs) as session:
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
        return SweepPlan(points, swept, _text(OmegaConf.select(cfg, "hydra.sweep.dir")))


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
    with _session(()) as session:
        for text in overrides:
            text = _as_group(text.lstrip("+"))
            override = session.read(text)
            kind, _, option = override.key_or_group.partition(".")
            if kind not in registry.KINDS:
                raise unknown("kind of plugin", kind, registry.KINDS)
            value = _plain_value(override)
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
    with _session(()) as session:
        for text in overrides:
            if not text.lstrip("+").startswith(f"{prefix}."):
                rest.append(text)
                continue
            override = session.read(text.lstrip("+"))
            value = _plain_value(override)
            _put(options, override.key_or_group.removeprefix(f"{prefix}."), value)
    return from_plain(cls, options, prefix), rest


def quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's grammar, whatever characters it holds."""
    body = re.sub(r"(\\*)'", lambda m: m.group(1) * 2 + r"\'", value)
    trailing = len(body) - len(body.rstrip("\\"))
    return f"'{body}{chr(92) * trailing}'"


class _Session:
    """Hydra, set up on lab's conf/ folder and those of the plugin folders."""

    def __init__(self, loader: ConfigLoader, searchpath: list[str]) -> None:
        self._loader = loader
        self._searchpath = searchpath

    def parse(self, texts: Sequence[str]) -> list[Override]:
        """Read overrides and refuse names that do not exist."""
        parsed = [self.read(text) for text in texts]
        for override in parsed:
            check_name(override.key_or_group)
        return parsed

    def read(self, text: str) -> Override:
        try:
            (override,) = OverridesParser.create(config_loader=self._loader).parse_overrides([text])
        except OverrideParseException as error:
            raise _unreadable(text, error) from None
        return override

    def check_choice(self, override: Override) -> None:
        """Refuse a group's choice that does not exist, naming the nearest one."""
        group = override.key_or_group
        if group not in (*PLUGIN_GROUPS, *LISTED_GROUPS, EXPERIMENT) or override.is_delete():
            return
        if isinstance(override.value(), Mapping):
            raise UserError(f"{group} takes a name; give the rest one by one: {group}.NAME=VALUE.")
        name = "null" if override.value() is None else str(override.value())
        names = self._loader.get_group_options(group, config_name="config", overrides=self._search_override([]))
        if name not in names:
            what = f"{group} plugin" if group in PLUGIN_GROUPS else group
            raise unknown(what, name, [*names, "auto"] if group in AUTO_GROUPS else names)

    def choices(self, override: Override) -> list[str]:
        """The overrides that a sweep makes of this one; itself alone when it is no sweep."""
        if not override.is_sweep_override():
            return [override.input_line]
        if not override.is_discrete_sweep():
            raise UserError(f"{override.input_line}: a sweep takes a list, choice(), range() or glob(), not an interval.")
        with _our_words():
            return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]

    def compose(self, overrides: Sequence[Override]) -> Any:
        lines = [o.input_line for o in overrides if o.key_or_group != "hydra.searchpath"]
        with _our_words():
            return hydra.compose("config", overrides=lines + self._search_override(overrides), return_hydra_config=True)

    def _search_override(self, overrides: Sequence[Override]) -> list[str]:
        paths = list(self._searchpath)
        for override in overrides:
            if override.key_or_group == "hydra.searchpath":
                value = override.value()
                paths += [str(v) for v in value] if isinstance(value, list) else [str(value)]
        return [f"hydra.searchpath=[{','.join(quoted(p) for p in paths)}]"] if paths else []


@contextmanager
def _session(config_dirs: Sequence[str | Path]) -> Iterator[_Session]:
    registry.discover()
    _store_plugin_groups()
    paths = [*registry.conf_paths()]
    for folder in config_dirs:
        root = Path(folder).expanduser().resolve()
        if not root.is_dir():
            raise UserError(f"config folder '{folder}' does not exist.")
        paths.append(f"file://{root}")
    outer = GlobalHydra.instance().hydra  # a program that uses Hydra itself may compose lab's settings too
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONF_DIR), job_name="lab", version_base="1.3"):
            yield _Session(GlobalHydra.instance().config_loader(), paths)
    finally:
        GlobalHydra.instance().hydra = outer


def _store_plugin_groups() -> None:
    """Make every plugin a choice of its group, so that it needs no YAML file. A YAML file of the same name goes first."""
    store = ConfigStore.instance()
    for kind in PLUGIN_GROUPS:
        store.repo.pop(kind, None)
        for entry in registry.entries(kind):
            store.store(group=kind, name=entry.name, node={"name": entry.name})


@contextmanager
def _our_words() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise into one message of ours."""
    try:
        yield
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file or "").rpartition("/")
        raise unknown(group.strip("/") or "config file", name.removesuffix(".yaml"), error.options or ()) from None
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        cause = f"\n{error.__cause__}" if error.__cause__ is not None else ""
        raise UserError(f"the settings cannot be composed: {error}{cause}") from None


def check_name(name: str) -> None:
    """Refuse a dotted name that is no setting. Options of plugins are left to the plugin's own declaration."""
    parts = re.split(r"[@]", name)[0].split(".")
    if parts[0].split("/")[0] == "hydra" and len(parts) == 1 or name == EXPERIMENT:
        return
    where, cls = ("hydra.", HydraConf) if parts[0] == "hydra" else ("", Settings)
    for i, part in enumerate(parts[1:] if where else parts, len(where) > 0):
        fields = typing.get_type_hints(cls)
        if part not in fields:
            available = [f"{where}{field}" for field in fields] + ([EXPERIMENT] if cls is Settings else [])
            raise no_setting(f"{where}{part}", available)
        where += part + "."
        cls = fields[part]
        if cls is PluginChoice or cls is Any or typing.get_origin(cls) is dict:
            return
        if not dataclasses.is_dataclass(cls) and i + 1 < len(parts):
            raise UserError(f"no setting '{name}': {where[:-1]} is a single value.")


def _check_plugin(kind: str, choice: PluginChoice) -> None:
    if choice.name == "auto" and kind in AUTO_GROUPS:
        for option in choice.options:
            having = [e.name for e in registry.entries(kind) if option in e.known_option_names]
            known = f" Plugins with this option: {', '.join(having)}." if having else f" No {kind} plugin has it."
            raise UserError(f"{kind}.{option} is set, but no {kind} plugin is named: add +{kind}=NAME.{known}")
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


def _ambiguous(override: Override) -> UserError:
    name, value = override.key_or_group, override.input_line.partition("=")[2]
    return UserError(
        f"ambiguous value: {name}={value} names several values.\n"
        f"To run once for each, add the flag -m. For one text, quote it twice: {name}='\"{value}\"'. "
        f"For a list: {name}='[{value}]'."
    )


def _unreadable(text: str, error: OverrideParseException) -> UserError:
    text = text.lstrip("+")
    name, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return UserError(f"'{text}' is no override: give NAME=VALUE.")
    detail = str(error).split("\n")[0].rstrip(".")
    why = f": {detail}" if text not in detail else ""  # some messages are the override again, under an exception's name
    return UserError(
        f"cannot read '{text}'{why}.\nA value with spaces or special characters is quoted twice: {name}='\"{value}\"'."
    )


def _plain_value(override: Override) -> Any:
    """The value of an override that no configuration stands behind."""
    if override.is_sweep_override():
        raise _ambiguous(override)
    with _our_words():
        return OmegaConf.to_container(OmegaConf.create([override.value()]), resolve=True)[0]


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


def _text(value: Any) -> str:
    return "" if value is None else str(value)
