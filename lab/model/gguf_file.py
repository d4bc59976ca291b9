"""GGUF files: metadata and tensors (format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Torch-free.

The header is parsed here, in one pass over the mapped file, because a vocabulary has hundreds of thousands of entries and
because a damaged file must be told apart from a foreign one. What a quantized block means is left to the `gguf` package.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from lab.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4
_CHUNK_ELEMENTS = 1 << 21  # dequantized at a time: the float32 copy and its temporaries stay small

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})
TYPES = FLOAT_TYPES | {"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place in the file. `shape` is in the usual order, rows first (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int  # byte in the file
    num_bytes: int


class GgufFile:
    """A mapped GGUF file.

    Raises:
        UserError: it is not GGUF, or of another version or byte order, truncated or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = path.stat().st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}.") from None
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        if self._map[:4] != MAGIC:
            raise UserError(f"{path} is not a GGUF file.")
        try:
            self._parse()
        except struct.error:
            raise UserError(f"{path} is truncated: its header goes on beyond its {self._size} bytes.") from None
        except UnicodeDecodeError:
            raise UserError(f"{path} is corrupt: a name in its header is not UTF-8.") from None

    def dequantized(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """The tensor in float32, in chunks of whole rows, each with the index of its first row."""
        tensor = self.tensors[name]
        if tensor.type.name not in TYPES:
            raise UserError(
                f"{self.path}: tensor '{name}' is of type {tensor.type.name}; supported are {', '.join(sorted(TYPES))}."
            )
        row_elements = tensor.shape[-1]
        num_rows = prod(tensor.shape[:-1])
        row_bytes = tensor.num_bytes // num_rows
        rows_at_once = max(1, _CHUNK_ELEMENTS // row_elements)
        for first in range(0, num_rows, rows_at_once):
            count = min(rows_at_once, num_rows - first)
            start = tensor.start + first * row_bytes
            raw = np.frombuffer(self._map, dtype=np.uint8, count=count * row_bytes, offset=start)
            yield first, self._float32(raw.reshape(count, row_bytes), tensor.type)
            self._let_go(start, count * row_bytes)

    def close(self) -> None:
        self._map.close()

    @staticmethod
    def _float32(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        if kind.name == "F32":
            return raw.view(np.float32)
        if kind.name == "F16":
            return raw.view(np.float16).astype(np.float32)
        return dequantize(raw, kind)

    def _let_go(self, start: int, num_bytes: int) -> None:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if start + num_bytes > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)

    def _parse(self) -> None:
        self._at = len(MAGIC)
        version = self._scalar("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "big-endian" if swapped in VERSIONS else f"version {version}"
            raise UserError(f"{self.path} is a {what} GGUF file; little-endian versions 2 and 3 are supported.")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_values):
            name = self._string()
            self.metadata[name] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]

        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"its alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if name in self.tensors:
                raise self._corrupt(f"tensor '{name}' is listed twice")
            if not shape or prod(shape) == 0 or shape[-1] % block:
                raise self._corrupt(f"tensor '{name}' of type {kind.name} has shape {list(shape)}")
            num_bytes = prod(shape) // block * block_bytes
            end = base + offset + num_bytes
            if end > self._size:
                raise UserError(f"{self.path} is truncated: tensor '{name}' ends at byte {end}, the file has {self._size}.")
            self.tensors[name] = GgufTensor(name, shape, kind, base + offset, num_bytes)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > _MAX_DIMS:
            raise self._corrupt(f"tensor '{name}' has {num_dims} dimensions")
        shape = tuple(reversed([self._scalar("Q") for _ in range(num_dims)]))
        number = self._scalar("I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UserError(f"{self.path}: tensor '{name}' is of the unknown type number {number}.") from None
        return name, shape, kind, self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._map, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        size = self._scalar("Q")
        if self._at + size > self._size:
            raise struct.error
        start, self._at = self._at, self._at + size
        return self._map[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element, count = self._scalar("I"), self._scalar("Q")
            if element in _SCALARS:
                values = struct.unpack_from(f"<{self._fitting(count)}{_SCALARS[element]}", self._map, self._at)
                self._at += struct.calcsize(f"<{count}{_SCALARS[element]}")
                return list(values)
            return [self._value(element) for _ in range(self._fitting(count))]
        if kind not in _SCALARS:
            raise self._corrupt(f"a value at byte {self._at} has the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _fitting(self, count: int) -> int:
        """A number of array elements, none of which takes less than a byte: more than the file has is a damaged count."""
        if count > self._size - self._at:
            raise struct.error
        return count

    def _corrupt(self, problem: str) -> UserError:
        return UserError(f"{self.path} is corrupt: {problem}.")
