"""Compiled forward passes on disk: keyed by all that was traced, verified before anything of them is loaded.

An entry is a folder named by its key: `manifest.json` (the program, the units, the SHA-256 of every other file, and its own)
and the files. It holds code, so it is loaded only if it and its files belong to this user, nobody else may write to them,
and every byte is what the manifest says. Anything else is taken away and made again. Entries appear by one rename, under a
lock that the system drops with its process: other processes wait for it, and a killed one leaves nothing that is used.
"""

import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lab.model.once import build_once

log = logging.getLogger("lab")

T = TypeVar("T")

FORMAT = 1
MANIFEST = "manifest.json"
ATTEMPTS = 3  # another process may take a bad entry away between our looking and our loading


@dataclass(frozen=True, slots=True)
class Entry:
    """A verified entry. `files` holds the content that was verified, by name."""

    folder: Path
    content: dict[str, Any]
    files: dict[str, bytes]


class Rejected(Exception):
    """An entry that must not be used, and why."""


def key_of(facts: dict[str, Any]) -> str:
    """The name of the entry for these facts (plain data, all that the compiled code depends on)."""
    return hashlib.sha256(_canonical({"format": FORMAT, **facts})).hexdigest()[:32]


def open_or_make(folder: Path, make: Callable[[Path], dict[str, Any]], load: Callable[[Entry], T]) -> tuple[T, bool]:
    """`load` of the entry at `folder`, made by `make(folder) -> content` if there is none that can be trusted.

    Returns:
        What `load` gave, and whether the entry was there already.
    """
    made: list[bool] = []

    def build(temporary: Path) -> None:
        made.append(True)
        write_manifest(temporary, folder.name, make(temporary))

    for _ in range(ATTEMPTS):
        if folder.exists() and not folder.is_dir():
            take_away(folder)
        build_once(folder, build, "compiled code")
        try:
            return load(verified(folder)), not made
        except (Rejected, OSError, ImportError) as error:
            log.warning("compiled code in %s is not used and will be made again: %s", folder, error)
            take_away(folder)
    raise RuntimeError(f"compiled code in {folder} was bad {ATTEMPTS} times in a row, freshly made")


def write_manifest(folder: Path, key: str, content: dict[str, Any]) -> None:
    """Seal the files of `folder`: the manifest is their list."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        path.chmod(0o600)
        files[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    body = {"format": FORMAT, "key": key, "files": files, "content": content}
    body["digest"] = hashlib.sha256(_canonical(body)).hexdigest()
    (folder / MANIFEST).write_bytes(_canonical(body))
    (folder / MANIFEST).chmod(0o600)
    folder.chmod(0o700)


def verified(folder: Path) -> Entry:
    """Read an entry whole. Raises Rejected for what is not exactly as it was written, by this user."""
    _check_owner(folder)
    manifest = folder / MANIFEST
    _check_owner(manifest)
    try:
        body = json.loads(manifest.read_bytes())
    except ValueError as error:
        raise Rejected(f"its manifest cannot be read: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("key") != folder.name:
        raise Rejected("its manifest is of another format or another entry")
    digest = body.pop("digest", None)
    if digest != hashlib.sha256(_canonical(body)).hexdigest():
        raise Rejected("its manifest has been changed")
    files = {}
    for name, wanted in body["files"].items():
        path = folder / name
        _check_owner(path)
        files[name] = path.read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != wanted:
            raise Rejected(f"{name} is not what was written")
    return Entry(folder, body["content"], files)


def _check_owner(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise Rejected(f"{path.name} is missing") from None
    if stat.S_ISLNK(found.st_mode):
        raise Rejected(f"{path.name} is a link")
    if found.st_uid != os.geteuid():
        raise Rejected(f"{path.name} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Rejected(f"others may write to {path.name}")


def take_away(folder: Path) -> None:
    """Remove a bad entry: gone for everyone at once, whatever its files are doing."""
    if not folder.is_dir() or folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    grave = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    folder.rename(grave / "entry")
    shutil.rmtree(grave, ignore_errors=True)


def _canonical(data: dict[str, Any]) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
