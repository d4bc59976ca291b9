"""Where lab keeps what it makes once: models, compiled code, device measurements."""

import os
from pathlib import Path

from lab.errors import UserError


def cache_dir(*parts: str) -> Path:
    """The folder `parts` below lab's cache (XDG_CACHE_HOME/lab, by default ~/.cache/lab), made if missing.

    Raises UserError when it cannot be made.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lab"
    folder = root.joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the cache folder {folder}: {error.strerror}. Set XDG_CACHE_HOME to a writable folder."
        ) from None
    return folder
