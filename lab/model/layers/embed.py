"""The embedding table."""

import torch
from torch import nn

from lab.model.checkpoint import Checkpoint
from lab.model.layers.fused import Formulas


class Embedding(nn.Module):
    """Token ids to vectors."""

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, fused: Formulas
    ) -> None:
        super().__init__()
        self._take_rows = fused.take_rows
        self.checkpoint_name = name
        self.register_buffer("weight", torch.empty(vocab_size, hidden_size, dtype=dtype, device=device), persistent=False)

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.read(f"{self.checkpoint_name}.weight", self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def forward(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        return self._take_rows(self.weight, input_ids_T)
