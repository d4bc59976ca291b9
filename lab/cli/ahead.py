"""What can be wrong with settings beyond their names and values and is seen without the model: the files that they name."""

from collections.abc import Iterable
from pathlib import Path

from lab import registry
from lab.capabilities import Capabilities, Needs, unmet
from lab.cli.machine import devices
from lab.engine.resolution import resolve
from lab.errors import UserError, nearest
from lab.model.source import check_model, check_tokenizer
from lab.settings import CacheSettings, PluginChoice, Settings

WAYS_TO_SCALE = ("auto", "token_head", "checkpoint", "one")


def check_ahead(settings: Settings, seen: set[str] | None = None) -> None:
    """Raise UserError for a GPU that is not here, a model or tokenizer that is none, a workload or a proposer that cannot be
    made (a file of it is not there, or wrong), a sink or a file of scales that does not exist.

    Args:
        seen: what was found good, and is not made again; the points of a sweep share it.
    """
    if settings.device == "cuda" and "cuda" not in devices():  # seen without torch, which takes seconds
        raise UserError("device=cuda: there is no CUDA device here. Use device=cpu, or see `lab doctor`.")
    check_model(settings.model.path)
    check_tokenizer(settings.model.tokenizer)
    _check_scales(settings.cache)
    _check_sinks(settings.tracking.sinks)
    seen = set() if seen is None else seen
    for kind, choice, arguments in (("workload", settings.workload, [settings.seed]), ("spec", settings.spec, [])):
        if choice.name != "none" and f"{kind}.{choice}" not in seen:
            made = resolve(kind, choice, Needs()).make(*arguments)
            if kind == "spec" and made.model_path is not None:
                check_model(made.model_path)
            seen.add(f"{kind}.{choice}")


def check_packages(settings: Settings) -> None:
    """Raise UserError for a plugin, chosen by name, whose packages are not installed."""
    for kind in ("attention", "spec", "quant", "moe"):
        choice: PluginChoice = getattr(settings, kind)
        if choice.name != "auto" and unmet(registry.get(kind, choice.name).static_capabilities or Capabilities(), Needs()):
            resolve(kind, choice, Needs())  # raises, naming those that can


def _check_scales(cache: CacheSettings) -> None:
    if cache.scales not in WAYS_TO_SCALE and not Path(cache.scales).expanduser().is_file():
        guess = nearest(cache.scales, WAYS_TO_SCALE)
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise UserError(
            f"cache.scales={cache.scales}: there is no such file.{hint}\n"
            "Available: token_head, checkpoint, one, or a file of `lab calibrate`."
        )


def _check_sinks(names: Iterable[str]) -> None:
    for name in names:
        resolve("sink", PluginChoice(name), Needs())
