"""What a loader needs from a checkpoint: tensors by name, copied straight to where they will stay."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from lab.errors import UserError, nearest

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Checkpoint(ABC):
    """A set of named tensors on disk. `used` are the names that were read."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def read(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into `out`, converted between float dtypes where they differ.

        Raises:
            UserError: there is no such tensor, its shape or dtype does not fit, or its file is damaged.
        """
        self.used.add(name)
        self._read(name, out)

    @abstractmethod
    def _read(self, name: str, out: torch.Tensor) -> None: ...

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Every tensor in the checkpoint, by the names transformers gives them."""

    @abstractmethod
    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of `names`. Raises UserError when there is no such tensor."""

    @abstractmethod
    def file_of(self, name: str) -> str:
        """The file that holds a tensor of `names`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the files. Nothing is read after it."""

    def missing(self, name: str, where: object) -> UserError:
        guess = nearest(name, self.names())
        hint = f" The nearest one it has is '{guess}'." if guess else ""
        return UserError(f"{where}: tensor '{name}' is missing.{hint}")


def check_fit(where: object, name: str, shape: tuple[int, ...], dtype: torch.dtype, out: torch.Tensor) -> None:
    """Raise UserError unless a tensor of `shape` and `dtype` can be copied into `out`."""
    if tuple(shape) != tuple(out.shape):
        raise UserError(f"{where}: tensor '{name}' has shape {list(shape)}; the model needs {list(out.shape)}.")
    if dtype != out.dtype and not (dtype in FLOATS and out.dtype in FLOATS):
        needs = "a float dtype" if out.dtype in FLOATS else str(out.dtype).removeprefix("torch.")
        raise UserError(f"{where}: tensor '{name}' has dtype {str(dtype).removeprefix('torch.')}; the model needs {needs}.")
