"""Random weights for any config: what a benchmark needs when the real ones are not at hand."""

import hashlib
from collections.abc import Iterable

import torch

from lab.model.checkpoint import Checkpoint


class DummyCheckpoint(Checkpoint):
    """Has every tensor it is asked for. The same name and seed give the same values, whatever else is read."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed

    def _read(self, name: str, out: torch.Tensor) -> None:
        """Values that keep activations near unit size: N(0, 1 / inputs) for matrices, norms of one, no bias."""
        if name.endswith(".bias"):
            out.zero_()
        elif out.dim() == 1:
            out.fill_(1)
        else:
            digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
            generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest, "little"))
            if out.is_floating_point():
                out.normal_(std=out.shape[-1] ** -0.5, generator=generator)
            else:
                out.random_(generator=generator)

    def names(self) -> Iterable[str]:
        return self.used

    def shape_of(self, name: str) -> tuple[int, ...]:
        raise self.missing(name, "random weights")  # which take the shapes that they are asked for

    def file_of(self, name: str) -> str:
        return "dummy"

    def close(self) -> None:
        """There are no files."""
