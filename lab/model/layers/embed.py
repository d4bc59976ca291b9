"""The embedding table."""

import torch
from torch import nn

from lab.model.checkpoint import Checkpoint
from lab.model.layers.fused import Formulas


class Embedding(nn.Module):
    """Token ids to vectors."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        fused: Formulas,
        *,
        scaled: bool = False,
    ) -> None:
        """`scaled`: vectors are multiplied by the root of their size, rounded to their dtype."""
        super().__init__()
        self._scale = torch.tensor(hidden_size**0.5, dtype=dtype).item() if scaled else None
        self._take_rows = fused.take_rows
        self.checkpoint_name = name
        self.register_buffer("weight", torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), persistent=False)

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.read(f"{self.checkpoint_name}.weight", self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        vectors_TD = self._take_rows(self.weight, input_ids_T)
        return vectors_TD if self._scale is None else vectors_TD * self._scale
