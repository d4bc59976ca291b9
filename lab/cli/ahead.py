"""What can be wrong with settings beyond their names and values, seen without torch and the model: the files that they name."""

from collections.abc import Iterable
from pathlib import Path

from lab.capabilities import Needs
from lab.engine.resolution import resolve
from lab.errors import UserError
from lab.model.source import check_model
from lab.settings import CacheSettings, PluginChoice, Settings

WAYS_TO_SCALE = ("auto", "token_head", "checkpoint", "one")


def check_ahead(settings: Settings, seen: set[str] | None = None) -> None:
    """Raise UserError for a model that is none, a workload that cannot be made (its file is not there, or wrong), a sink or a
    file of scales that does not exist.

    Args:
        seen: workloads that were found good, which are not made again; the points of a sweep share it.
    """
    check_model(settings.model.path)
    _check_scales(settings.cache)
    _check_sinks(settings.tracking.sinks)
    seen = set() if seen is None else seen
    if repr(settings.workload) not in seen:
        resolve("workload", settings.workload, Needs()).make(settings.seed)
        seen.add(repr(settings.workload))


def _check_scales(cache: CacheSettings) -> None:
    if cache.scales not in WAYS_TO_SCALE and not Path(cache.scales).expanduser().is_file():
        raise UserError(
            f"cache.scales={cache.scales}: there is no such file.\n"
            "Available: token_head, checkpoint, one, or a file of `lab calibrate`."
        )


def _check_sinks(names: Iterable[str]) -> None:
    for name in names:
        resolve("sink", PluginChoice(name), Needs())
