"""`lab run`: one run in this process, or a sweep of runs in processes of their own."""

import sys
from pathlib import Path
from typing import IO

from lab import registry
from lab.cli.ahead import check_ahead, check_packages
from lab.cli.arguments import Arguments
from lab.cli.folders import absent, holds_a_run, named_folder, new_folder, short_name, taken_back_if_refused
from lab.config import compose_run, plan_sweep, to_plain, to_yaml
from lab.errors import UserError
from lab.interrupt import import_interruptibly
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
    _refuse_folder_of_a_sweep(overrides)
    composed = compose_run(overrides, arguments.config_dirs)
    if arguments.print_config:
        print(to_yaml(composed.settings), end="")
        return 0
    _warn()
    check_packages(composed.settings)
    check_ahead(composed.settings)
    made = absent(composed.run_dir)
    if any(text.lstrip("+").startswith("hydra.run.dir=") for text in overrides):
        folder = named_folder(composed.run_dir)
    else:
        folder = new_folder(composed.run_dir)
        made = [folder, *(one for one in made if one != folder)]
    config = _claim(folder)
    with taken_back_if_refused(folder, made, begun=["config.yaml"]):
        _fill(config, to_yaml(composed.settings))
        job = import_interruptibly("lab.bench.job")  # brings torch, which an answer to a typo must not wait for
        return job.run_job(composed.settings, folder, config=to_plain(composed.settings), as_json=arguments.json)


def _refuse_folder_of_a_sweep(overrides: list[str]) -> None:
    """A point of a sweep is told its sweep's folder, and that it is a single run (hydra.mode); else the name is a mistake."""
    names = [text.lstrip("+").partition("=")[0] for text in overrides]
    if "hydra.sweep.dir" in names and "hydra.mode" not in names:
        raise UserError(
            "hydra.sweep.dir names the folder of a sweep: add -m, or name that of this run by hydra.run.dir=FOLDER."
        )


def _claim(folder: Path) -> IO[str]:
    """The run's config.yaml, open and empty, which makes the folder this run's."""
    try:
        return (folder / "config.yaml").open("x", encoding="utf-8")
    except FileExistsError:  # another run took the folder since we looked
        raise holds_a_run(folder) from None
    except OSError as error:
        raise UserError(f"cannot write {folder / 'config.yaml'}: {error.strerror}.") from None


def _fill(file: IO[str], text: str) -> None:
    try:
        with file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {file.name}: {error.strerror}.") from None


def _warn() -> None:
    """Of plugin files that cannot be parsed: none of them was chosen, but their author should know."""
    for line in registry.unparsed():
        print(f"lab: warning: {line}", file=sys.stderr)


def named(overrides: list[str]) -> list[str]:
    """The overrides with a name for the run's folder, where they give none themselves."""
    if any(text.lstrip("+").startswith("hydra.job.name=") for text in overrides):
        return overrides
    return [*overrides, f"hydra.job.name={quoted(short_name(overrides))}"]
