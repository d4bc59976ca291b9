"""Folders that are made once and never seen half made, however many processes want them and whenever one is killed."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lab.errors import UserError

log = logging.getLogger("lab")


def build_once(target: Path, build: Callable[[Path], None], what: str) -> Path:
    """`target`, made by `build(folder)` unless it is there already.

    `build` fills a temporary folder beside the target, which is flushed to disk and renamed: the target exists complete or
    not at all. A lock file, which the system drops with its process, makes others wait and then find the result. What a
    killed process left behind is swept by the next one that holds the lock.

    Raises:
        UserError: the disk is full, or the folder cannot be written; `what` names the thing in the message.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", what):
            _sweep(target)
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise UserError(f"cannot make {what} in {target.parent}: {error.strerror or error}.") from error
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
    try:
        folder.chmod(0o755)
        build(folder)
        for path in [*folder.rglob("*"), folder]:
            _flush(path)
        folder.rename(target)
        _flush(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already when all went well


def _sweep(target: Path) -> None:
    """Remove what killed builds left; the lock says that no build is in progress."""
    for stale in target.parent.glob(f".{target.name}.tmp-*"):
        log.info("removing %s, left by a run that was killed", stale)
        shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, which is gone afterwards.

    It is removed while it is held. Whoever waited for it then holds a file without a name, which keeps nobody out, and
    tries again with the one that has the name now.
    """
    while True:
        with path.open("w") as file:
            _lock(file, what)
            if not _is_named(file, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(file: IO[str], what: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("waiting for another process that makes %s", what)
        fcntl.flock(file, fcntl.LOCK_EX)


def _is_named(file: IO[str], path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
