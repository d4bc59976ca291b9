"""The files of a run folder that are written whole, and its log."""

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
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
        with suppress(OSError):  # what is left of it says nothing
            part.unlink()
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


class RunLog:
    """While open, lab's log goes to log.txt in the run folder and to stderr; what ends the run is noted on its way out.

    Opening it raises UserError when the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "log.txt"

    def __enter__(self) -> None:
        try:
            self._file = _LogFile(self._path, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}.") from None
        self._file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._screen = logging.StreamHandler(sys.stderr)
        self._screen.setFormatter(logging.Formatter("%(message)s"))
        self._before = log.level, log.propagate
        log.addHandler(self._file)
        log.addHandler(self._screen)
        log.setLevel(logging.INFO)
        log.propagate = False

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._note(error, trace)
        log.removeHandler(self._screen)
        log.removeHandler(self._file)
        level, log.propagate = self._before
        log.setLevel(level)
        self._file.close()

    def _note(self, error: BaseException, trace: TracebackType | None) -> None:
        """The message of a user's mistake, the traceback of a fault: to the file alone, the command line shows it itself."""
        is_fault = not isinstance(error, UserError | KeyboardInterrupt)
        exc_info = (type(error), error, trace) if is_fault else None
        message = str(error) or type(error).__name__
        self._file.emit(logging.LogRecord("lab", logging.ERROR, __file__, 0, message, None, exc_info))
