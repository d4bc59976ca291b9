"""Names and folders of runs and sweeps: readable, short, and never shared by two."""

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lab.errors import UserError

MAX_NAME = 80  # characters; file systems allow 255 bytes, people read fewer
QUOTES_AND_SLASHES = "'\"/ "
BEGINNINGS = ("config.yaml", "log.txt")  # what a run writes before anything is known
BEFORE_RESULTS = (*BEGINNINGS, "resolved.json", "env.json")  # and before its first request
RESULTS = ("metrics.json", "requests.jsonl", "steps.jsonl", "sweep.json", "sweep.csv")
UNNAMED = ("hydra.", "tracking.")  # overrides that say where a run goes, not what it is


def short_name(overrides: Sequence[str]) -> str:
    """A folder's name for these overrides: `attention-sdpa_cache.block_size-8`; cut and hashed when it grows too long."""
    pairs = [text.lstrip("+").partition("=") for text in overrides]
    told = "_".join(f"{name}-{value.strip(QUOTES_AND_SLASHES)}" for name, _, value in pairs if not name.startswith(UNNAMED))
    name = re.sub(r"[^\w.+-]+", "-", told, flags=re.ASCII).strip("-.")
    if len(name) > MAX_NAME:
        digest = hashlib.blake2b(told.encode(), digest_size=4).hexdigest()
        name = f"{name[: MAX_NAME - len(digest) - 1]}-{digest}"
    return name or "run"


def absent(path: str | Path) -> list[Path]:
    """Those of a folder and the folders above it that do not exist, the innermost first."""
    folder = Path(path).expanduser().absolute()
    return [one for one in (folder, *folder.parents) if not one.exists()]


@contextmanager
def taken_back_if_refused(folder: Path, made: Sequence[Path], begun: Collection[str] = ()) -> Iterator[None]:
    """While open, a UserError takes away what a run has put into its folder, and the folders `made` for it, innermost first.

    Not once there is more than the beginnings of a run, which is worth keeping: then the message says where that is. What was
    there before stays, but for the files that have `begun` the run already.
    """
    before = {file for file in folder.iterdir() if file.name not in begun}
    try:
        yield
    except UserError as error:
        files = set(folder.iterdir()) - before
        if any(file.name not in BEFORE_RESULTS for file in files):
            raise UserError(f"{error}\nWhat there was by then is in {folder}.") from None
        for file in files:
            file.unlink()
        for one in made:
            with suppress(OSError):  # it holds something else meanwhile
                one.rmdir()
        raise


def new_folder(path: str | Path) -> Path:
    """Make a folder that nobody else has: `path`, or `path_2`, `path_3`, ... when it is taken."""
    wanted = Path(path).absolute()
    folder, count = wanted, 1
    while True:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            count += 1
            folder = wanted.with_name(f"{wanted.name}_{count}")
        except OSError as error:
            raise _cannot_make(folder, error) from None
        else:
            return folder


def named_folder(path: str | Path) -> Path:
    """The folder that the user named, made if missing. Raises UserError when it holds a run or sweep already."""
    folder = made_folder(path)
    if any((folder / file).exists() for file in ("config.yaml", "metrics.json", "sweep.json")):
        raise holds_a_run(folder)
    return folder


def made_folder(path: str | Path) -> Path:
    """Make a folder where it is missing. Raises UserError where that cannot be done."""
    folder = Path(path).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_make(folder, error) from None
    return folder


def holds_a_run(folder: Path) -> UserError:
    """The error for a folder that another run or sweep has, saying what is there."""
    results = [file for file in RESULTS if (folder / file).exists()]
    if results:
        what = f"the results of another run ({', '.join(results)}): name another folder, or remove it."
    else:
        found = " and ".join(file for file in BEGINNINGS if (folder / file).exists())
        what = (
            f"{found} of another run, but no results: it was interrupted at its start, or it has only begun. "
            "Name another folder, or remove this one if nothing is running."
        )
    return UserError(f"{folder} holds {what}")


def point_folder(path: Path) -> Path:
    """Make the folder of a sweep's point. Raises UserError when another point has it: results are never merged."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise points_share(path) from None
    except OSError as error:
        raise _cannot_make(path, error) from None
    return path


def points_share(folder: Path) -> UserError:
    """The error for a sweep whose points cannot have folders of their own."""
    return UserError(
        f"two points of the sweep would share the folder {folder}: hydra.sweep.subdir must tell them apart, "
        "e.g. by ${hydra.job.num}."
    )


def _cannot_make(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot make the folder {folder}: {error.strerror}.")
