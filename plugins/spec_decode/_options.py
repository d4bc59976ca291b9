"""What several proposers ask of their options."""

from pathlib import Path

from lab.api import UserError

WEIGHTS = (".safetensors", ".bin", ".pt")  # of published heads


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Raises UserError for an option under `least`."""
    if value < least:
        raise UserError(f"spec.{name} must be a whole number from {least}, got {value}.")


def head_folder(head: str, *needed: str) -> Path:
    """The folder that spec.head names. Raises UserError when there is none, or it lacks weights or a file that is needed."""
    folder = Path(head).expanduser()
    if not folder.is_dir():
        raise UserError(f"spec.head={head}: there is no such folder.")
    if not any(file.suffix in WEIGHTS for file in folder.iterdir()):
        raise UserError(f"spec.head={head} holds no head: no file of weights ({', '.join(WEIGHTS)}) is there.")
    for name in needed:
        if not (folder / name).is_file():
            raise UserError(f"spec.head={head} holds no head: it has no {name}.")
    return folder
