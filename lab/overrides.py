"""Overrides in Hydra's syntax: read, their names checked, composed over conf/. Torch-free.

Whatever Hydra and OmegaConf raise on the way becomes one message of ours. `lab.config` makes settings of what is composed here.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from lab.typed import no_setting

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
PLUGIN_GROUPS = ("attention", "spec", "draft_length", "quant", "moe", "workload")  # kinds that a run chooses by such a group
AUTO_GROUPS = ("attention", "quant", "moe")  # kinds for which `auto` may choose
LISTED_GROUPS = ("model",)  # in the defaults list
EXPERIMENT = "experiment"


class Session:
    """Hydra, set up on lab's conf/ folder and those of the plugin folders."""

    def __init__(self, loader: ConfigLoader, searchpath: list[str]) -> None:
        self._loader = loader
        self._searchpath = searchpath

    def parse(self, texts: Sequence[str]) -> list[Override]:
        """Read overrides and refuse names that do not exist."""
        parsed = [self.read(text) for text in texts]
        for override in parsed:
            check_name(override.key_or_group)
            if override.is_delete():
                check_removal(override.key_or_group)
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
        if isinstance(override.value(), list):
            raise UserError(f"{group} takes one name; `-m {group}=NAME,NAME` makes a run of each.")
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
        with our_words():
            return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]

    def compose(self, overrides: Sequence[Override]) -> Any:
        lines = [o.input_line for o in overrides if o.key_or_group != "hydra.searchpath"]
        try:
            with our_words():
                return hydra.compose("config", overrides=lines + self._search_override(overrides), return_hydra_config=True)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            # Hydra takes its own part of the configuration for granted, and falls over what an override makes of it
            own = [o.input_line for o in overrides if _is_hydras(o.key_or_group)]
            if not own:
                raise
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"Hydra cannot be set up with {' '.join(own)}: {what}") from None

    def _search_override(self, overrides: Sequence[Override]) -> list[str]:
        paths = list(self._searchpath)
        for override in overrides:
            if override.key_or_group == "hydra.searchpath":
                value = override.value()
                paths += [str(v) for v in value] if isinstance(value, list) else [str(value)]
        return [f"hydra.searchpath=[{','.join(quoted(p) for p in paths)}]"] if paths else []


@contextmanager
def open_session(config_dirs: Sequence[str | Path]) -> Iterator[Session]:
    """Hydra on lab's conf/, those of the plugin folders and `config_dirs`; a program that uses Hydra itself keeps its state."""
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
            yield Session(GlobalHydra.instance().config_loader(), paths)
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
def our_words() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise into one message of ours."""
    try:
        yield
    except MissingConfigException as error:
        group, _, name = str(error.missing_cfg_file or "").rpartition("/")
        raise unknown(group.strip("/") or "config file", name.removesuffix(".yaml"), error.options or ()) from None
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if unset := re.match(r"Could not delete .*?'(.+?)'", str(error)):
            raise UserError(f"~{unset[1]}: nothing sets it, so there is nothing to take away. Leave ~{unset[1]} out.") from None
        cause = f"\n{error.__cause__}" if error.__cause__ is not None else ""
        raise UserError(f"the settings cannot be composed: {error}{cause}") from None


def _is_hydras(name: str) -> bool:
    """Whether a name is of Hydra's own part of the configuration."""
    return re.split(r"[.@/]", name)[0] == "hydra"


def check_name(name: str) -> None:
    """Refuse a dotted name that is no setting. Options of plugins are left to the plugin's own declaration."""
    parts = name.partition("@")[0].split(".")
    if _is_hydras(name) and len(parts) == 1 or name == EXPERIMENT:
        return
    if parts[:3] == ["hydra", "sweeper", "params"]:
        raise UserError(
            f"{name}: an axis of a sweep is given by its own name, with the flag -m: NAME=VALUE,VALUE. "
            "hydra.sweeper.params is for files, such as those of experiments."
        )
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


def check_removal(name: str) -> None:
    """Refuse ~NAME for a setting that a run cannot be without. What the user puts beside those can be taken away again: a
    plugin, its options, and the entries of sampling, goodput and the like.
    """
    parts = name.partition("@")[0].split(".")
    if _is_hydras(name) or name == EXPERIMENT:
        return
    value: Any = Settings()
    for part in parts:
        if isinstance(value, PluginChoice) and part != "name" or isinstance(value, dict):
            return
        value = getattr(value, part)
    if isinstance(value, PluginChoice | dict):
        return
    default = "" if dataclasses.is_dataclass(value) else f", or give its default: {name}={_as_typed(value)}"
    raise UserError(f"~{name}: a run cannot be without this setting. Leave ~{name} out{default}.")


def _as_typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def ambiguous(override: Override) -> UserError:
    """The error for several values where one is wanted."""
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


def plain_value(override: Override) -> Any:
    """The value of an override that no configuration stands behind."""
    if override.is_sweep_override():
        raise ambiguous(override)
    with our_words():
        return OmegaConf.to_container(OmegaConf.create([override.value()]), resolve=True)[0]


def quoted(value: str) -> str:
    """`value` as a quoted string of Hydra's grammar, whatever characters it holds."""
    body = re.sub(r"(\\*)'", lambda m: m.group(1) * 2 + r"\'", value)
    trailing = len(body) - len(body.rstrip("\\"))
    return f"'{body}{chr(92) * trailing}'"
