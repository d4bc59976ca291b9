"""The files of a run folder that are written whole, and its log."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.errors import UserError

log = logging.getLogger("lab")


def write_json(path: Path, data: Any) -> None:
    """Write whole or not at all. Raises UserError when the disk does not take it."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(data, indent=2, default=_plain) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def _plain(value: Any) -> Any:
    """What JSON has no word for, in settings and records: sets as lists, paths as text."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


class _LogFile(logging.FileHandler):
    """log.txt. When the disk takes no more, the run's own files will say so: it does not say it for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name that logging calls
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def run_log(folder: Path) -> Iterator[None]:
    """Send lab's log to log.txt in the run folder and to stderr; what ends the run goes to log.txt on its way out.

    Raises UserError when the file cannot be made.
    """
    try:
        file = _LogFile(folder / "log.txt", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {folder / 'log.txt'}: {error.strerror}.") from None
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(logging.Formatter("%(message)s"))
    level, propagate = log.level, log.propagate
    log.addHandler(file)
    log.addHandler(screen)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    except BaseException as error:
        _note(file, error)
        raise
    finally:
        log.removeHandler(screen)
        log.removeHandler(file)
        log.setLevel(level)
        log.propagate = propagate
        file.close()


def _note(file: logging.Handler, error: BaseException) -> None:
    """The message of a user's mistake, the traceback of a fault: to the file alone, the command line shows it itself."""
    is_fault = not isinstance(error, UserError | KeyboardInterrupt)
    exc_info = (type(error), error, error.__traceback__) if is_fault else None
    message = str(error) or type(error).__name__
    file.emit(logging.LogRecord("lab", logging.ERROR, __file__, 0, message, None, exc_info))
