"""What the commands take, name by name, for their help: read where it is declared, so that the two cannot differ."""

import re
from collections.abc import Iterable

from lab.cli.plugins import fields_of
from lab.overrides import CONF_DIR, PLUGIN_GROUPS
from lab.plugin_source import field_docs
from lab.train.options import TrainOptions

LINE = re.compile(r"(?P<indent> *)(?:- )?(?P<name>\w+):(?: (?P<default>[^#\s][^#]*?))?(?: # (?P<doc>.*))?")
LEFT_OUT = ("hydra.job.name", "hydra.output_subdir")  # which the command line sets itself
WIDTH = 40


def settings() -> str:
    """Every setting of conf/config.yaml with its default and its comment."""
    return "Settings, with their defaults:\n" + _aligned(_settings())


def train_options() -> str:
    """Every option of a training with its default, what it takes and its comment."""
    rows = fields_of(TrainOptions, field_docs(TrainOptions), "train.")
    return "Options, with their defaults:\n" + _aligned(
        (name, default, f"{wanted}: {doc}" if doc else wanted) for name, wanted, default, doc in rows
    )


def _settings() -> Iterable[tuple[str, str, str]]:
    above: list[str] = []
    kind = ""  # what the comment beside a group of plugins says
    for text in (CONF_DIR / "config.yaml").read_text(encoding="utf-8").splitlines():
        line = LINE.fullmatch(text)
        if line is None:
            continue
        depth = len(line["indent"]) // 2
        above[depth:] = [line["name"]]
        name, doc = ".".join(above).removeprefix("defaults."), line["doc"] or ""
        if name in PLUGIN_GROUPS:
            kind = doc
        elif line["default"] is not None and name not in LEFT_OUT:
            group = name.removesuffix(".name")
            yield (group, line["default"], f"{kind}; {doc}") if group in PLUGIN_GROUPS else (name, line["default"], doc)


def _aligned(rows: Iterable[tuple[str, str, str]]) -> str:
    return "\n".join(f"  {f'{name}={default}':<{WIDTH}}  # {doc}".rstrip(" #") for name, default, doc in rows)
