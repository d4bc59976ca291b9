"""`lab report`: compare runs and sweeps that are done, on one page."""

import json
from pathlib import Path

from lab.cli.arguments import Arguments
from lab.cli.folders import new_folder
from lab.errors import UserError
from lab.report.comparison import Report, write_report
from lab.report.rows import read_rows


def report(arguments: Arguments) -> int:
    """Write the page and its table into the folder itself, or for several into one of their own; print the table."""
    if not arguments.overrides:
        raise UserError("lab report: name the folders of runs or sweeps, e.g. `lab report multirun/DATE/TIME`.")
    if len(arguments.out) > 1:
        raise UserError("lab report: --out is given more than once.")
    folders = [Path(word).expanduser() for word in arguments.overrides]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise UserError(f"lab report: there is no folder {missing[0]}.")
    rows = read_rows(folders)
    title = ", ".join(folder.resolve().name for folder in folders)
    try:
        target = _target(arguments, folders)
        page = write_report(target, title, rows)
    except OSError as error:
        raise UserError(f"lab report: cannot write {error.filename}: {error.strerror}.") from None
    if arguments.json:
        print(json.dumps({"report": str(page), "table": str(page.with_suffix(".md"))}))
    else:
        print(f"{Report(title, rows, target).markdown()}\n{page}")
    return 0


def _target(arguments: Arguments, folders: list[Path]) -> Path:
    if arguments.out:
        target = Path(arguments.out[0]).expanduser().absolute()
        target.mkdir(parents=True, exist_ok=True)
        return target
    return folders[0].absolute() if len(folders) == 1 else new_folder("report")
