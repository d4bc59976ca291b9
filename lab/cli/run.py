"""`lab run`: one run in this process, or a sweep of runs in processes of their own."""

import importlib
import sys

from lab import registry
from lab.cli.arguments import Arguments
from lab.cli.folders import holds_a_run, named_folder, new_folder, short_name
from lab.config import compose_run, plan_sweep, to_plain, to_yaml
from lab.errors import UserError
from lab.overrides import quoted


def run(arguments: Arguments) -> int:
    """Compose, make the folder, write config.yaml, run. Returns the exit code of the run or sweep."""
    registry.discover(arguments.plugins)
    overrides = named(arguments.overrides)
    plan = plan_sweep(overrides, arguments.config_dirs, multirun=arguments.multirun)
    if plan is not None and arguments.print_config:
        points = [compose_run(texts, arguments.config_dirs, point=i) for i, texts in enumerate(plan.points, 1)]
        print("---\n".join(to_yaml(composed.settings) for composed in points), end="")
        return 0
    if plan is not None:
        _warn()
        from lab.cli.sweep import run_sweep

        return run_sweep(plan, arguments)
    composed = compose_run(overrides, arguments.config_dirs)
    if arguments.print_config:
        print(to_yaml(composed.settings), end="")
        return 0
    _warn()
    is_named = any(text.lstrip("+").startswith("hydra.run.dir=") for text in overrides)
    folder = named_folder(composed.run_dir) if is_named else new_folder(composed.run_dir)
    try:
        with (folder / "config.yaml").open("x", encoding="utf-8") as file:
            file.write(to_yaml(composed.settings))
    except FileExistsError:  # another run took the folder since we looked
        raise holds_a_run(folder) from None
    except OSError as error:
        raise UserError(f"cannot write {folder / 'config.yaml'}: {error.strerror}.") from None
    job = importlib.import_module("lab.bench.job")  # brings torch, which an answer to a typo must not wait for
    return job.run_job(composed.settings, folder, config=to_plain(composed.settings), as_json=arguments.json)


def _warn() -> None:
    """Of plugin files that cannot be parsed: none of them was chosen, but their author should know."""
    for line in registry.unparsed():
        print(f"lab: warning: {line}", file=sys.stderr)


def named(overrides: list[str]) -> list[str]:
    """The overrides with a name for the run's folder, where they give none themselves."""
    if any(text.lstrip("+").startswith("hydra.job.name=") for text in overrides):
        return overrides
    return [*overrides, f"hydra.job.name={quoted(short_name(overrides))}"]
