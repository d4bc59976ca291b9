"""Checkpoints in the safetensors format, of one file or of shards with an index.

Files are mapped, not read: a tensor goes from the page cache straight to its place, and the pages it came from are let go
at once, so that loading takes no memory beside the weights themselves. The header is checked against the file's size
before anything is read (format: https://github.com/huggingface/safetensors#format).
"""

import json
import logging
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from lab.errors import UserError
from lab.model.checkpoint import Checkpoint, check_fit
from lab.model.config import read_json

log = logging.getLogger("lab")

INDEX_NAME = "model.safetensors.index.json"
_CHUNK_BYTES = 4 << 20  # copied at a time
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte in the file
    end: int


class SafetensorsFile:
    """One mapped file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                self.entries = _read_header(path, file.read(8), file, size)
                # a private mapping: torch wants writable memory, though nothing is written
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}.") from None

    def read(self, name: str, out: torch.Tensor) -> None:
        entry = self.entries[name]
        check_fit(self.path, name, entry.shape, entry.dtype, out)
        if not entry.shape:
            out.copy_(self._view(entry.dtype, 1, entry.start)[0])
            return
        row_elements = prod(entry.shape[1:])
        rows_at_once = max(1, _CHUNK_BYTES // max(1, row_elements * entry.dtype.itemsize))
        for first in range(0, entry.shape[0] if row_elements else 0, rows_at_once):
            rows = out[first : first + rows_at_once]
            start = entry.start + first * row_elements * entry.dtype.itemsize
            rows.copy_(self._view(entry.dtype, rows.numel(), start).view(rows.shape))
            self._let_go(start, rows.numel() * entry.dtype.itemsize)

    def _view(self, dtype: torch.dtype, count: int, start: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)

    def _let_go(self, start: int, num_bytes: int) -> None:
        """Give pages back that are wholly inside; else the mapped file would count as memory of this process."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start + num_bytes > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)

    def close(self) -> None:
        self._map.close()


class SafetensorsCheckpoint(Checkpoint):
    """All the tensors of a folder's safetensors files.

    Of a model that takes images too, `image_parts` are left out, and the text part's tensors have the names that a model of
    text alone gives them.
    """

    def __init__(self, folder: Path, image_parts: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.where = folder
        self._files: dict[str, SafetensorsFile] = {}
        paths = find_files(folder)
        if len(paths) == 1 and paths[0].name == INDEX_NAME:
            self._open_shards(paths[0])
        else:
            self._files = {path.name: SafetensorsFile(path) for path in paths}
            self._file_of = {name: file for file in self._files.values() for name in file.entries}
        if image_parts:
            self._keep_text(image_parts)

    def _keep_text(self, image_parts: tuple[str, ...]) -> None:
        before = len(self._file_of)
        for file in self._files.values():
            named = ((text_name(name, image_parts), entry) for name, entry in file.entries.items())
            file.entries = {name: entry for name, entry in named if name is not None}
        self._file_of = {name: file for file in self._files.values() for name in file.entries}
        parts = ", ".join(image_parts)
        log.info("%d tensors for images (%s) are left out: only the text part runs", before - len(self._file_of), parts)

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise UserError(f"{index} has no 'weight_map' from tensor names to files.")
        self.where = index
        for shard in sorted(set(weight_map.values())):
            path = index.parent / shard
            if Path(shard).name != shard or not path.is_file():
                lost = next(name for name, s in weight_map.items() if s == shard)
                raise UserError(f"{index.parent}: shard '{shard}' is missing; {index.name} puts tensor '{lost}' there.")
            self._files[shard] = SafetensorsFile(path)
        self._file_of = {name: file for file in self._files.values() for name in file.entries}
        for name, shard in weight_map.items():
            if name not in self._files[shard].entries:
                raise UserError(f"{index.parent / shard}: tensor '{name}' is missing, though {index.name} puts it there.")

    def _read(self, name: str, out: torch.Tensor) -> None:
        self._holder(name).read(name, out)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._holder(name).entries[name].shape

    def _holder(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise self.missing(name, self.where if len(self._files) > 1 else next(iter(self._files.values())).path)
        return self._file_of[name]

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def file_of(self, name: str) -> str:
        return str(self._file_of[name].path)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def text_name(name: str, image_parts: tuple[str, ...]) -> str | None:
    """What a model of text alone calls a tensor of one that takes images too, in either of the published spellings:
    `language_model.model.norm` or `model.language_model.norm`. None: it is for images.
    """
    bare = name.removeprefix("model.")
    if bare.startswith(tuple(f"{part}." for part in image_parts)):
        return None
    if not bare.startswith("language_model."):
        return name
    rest = bare.removeprefix("language_model.")
    return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"


def find_files(folder: Path) -> list[Path]:
    """The file to load a folder from: model.safetensors, else the index of shards, else the one *.safetensors there is."""
    for name in ("model.safetensors", INDEX_NAME):
        if (folder / name).is_file():
            return [folder / name]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:4])
        raise UserError(f"{folder} has {len(found)} safetensors files ({names}, ...) but no {INDEX_NAME}.")
    return found


def _read_header(path: Path, length: bytes, file, size: int) -> dict[str, _Entry]:
    header_size = int.from_bytes(length, "little") if len(length) == 8 else -1
    if header_size < 2 or 8 + header_size > size:
        raise UserError(f"{path} is truncated or not a safetensors file: it has {size} bytes and no complete header.")
    try:
        header = json.loads(file.read(header_size))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{path} is corrupt: its header is not valid JSON.") from None
    if not isinstance(header, dict):
        raise UserError(f"{path} is corrupt: its header is not a JSON object.")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, value, 8 + header_size, size) for name, value in header.items()}


def _entry(path: Path, name: str, value: dict, base: int, size: int) -> _Entry:
    try:
        dtype_name, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        valid = all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        raise UserError(f"{path} is corrupt: the header entry of tensor '{name}' is malformed.")
    if dtype_name not in _DTYPES:
        raise UserError(f"{path}: tensor '{name}' has dtype {dtype_name}, which is not supported.")
    dtype = _DTYPES[dtype_name]
    if prod(shape) * dtype.itemsize != end - start:
        raise UserError(f"{path} is corrupt: tensor '{name}' of shape {list(shape)} does not fill its {end - start} bytes.")
    if base + end > size:
        raise UserError(f"{path} is truncated: tensor '{name}' ends at byte {base + end}, the file has {size}.")
    return _Entry(dtype, shape, base + start, base + end)
