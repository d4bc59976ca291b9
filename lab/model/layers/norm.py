"""Root mean square normalisation."""

import torch
from torch import nn

from lab.model.checkpoint import Checkpoint


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""

    def __init__(self, name: str, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.checkpoint_name = name
        self.eps = eps
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=device), persistent=False)

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.read(f"{self.checkpoint_name}.weight", self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)
