"""What several proposers ask of their options."""

from pathlib import Path

from lab.api import UserError


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Raises UserError for an option under `least`."""
    if value < least:
        raise UserError(f"spec.{name} must be a whole number from {least}, got {value}.")


def head_folder(head: str) -> Path:
    """The folder that spec.head names. Raises UserError when there is none."""
    folder = Path(head).expanduser()
    if not folder.is_dir():
        raise UserError(f"spec.head={head}: there is no such folder.")
    return folder
