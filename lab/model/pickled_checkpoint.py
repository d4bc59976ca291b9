"""Tensors of a PyTorch file, read without running any code of it: what else such a file may hold is refused by torch."""

from collections.abc import Iterable
from pathlib import Path

import torch

from lab.errors import UserError
from lab.model.checkpoint import Checkpoint, check_fit

REFUSED = torch.serialization.pickle.UnpicklingError  # what torch.load raises for a file that holds more than tensors


class PickledCheckpoint(Checkpoint):
    """A file of torch.save with one mapping from names to tensors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, REFUSED) as error:
            raise UserError(f"{path} cannot be read as plain tensors: {str(error).splitlines()[0]}") from None
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise UserError(f"{path} must hold a mapping from names to tensors.")
        self._tensors: dict[str, torch.Tensor] = found

    def _read(self, name: str, out: torch.Tensor) -> None:
        tensor = self._tensor(name)
        check_fit(self.path, name, tuple(tensor.shape), tensor.dtype, out)
        out.copy_(tensor)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def file_of(self, name: str) -> str:
        return str(self.path)

    def close(self) -> None:
        self._tensors = {}

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise self.missing(name, self.path)
        return self._tensors[name]
