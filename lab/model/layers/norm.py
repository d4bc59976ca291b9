"""Root mean square normalisation."""

import torch
from torch import nn

from lab.model.checkpoint import Checkpoint
from lab.model.layers.fused import Formulas


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in float32 (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        fused: Formulas,
        *,
        has_offset: bool = False,
    ) -> None:
        """`has_offset`: the weight is one more than what the checkpoint holds, in float32, for it would not fit otherwise."""
        super().__init__()
        self._fused = fused
        self._has_offset = has_offset
        dtype = torch.float32 if has_offset else dtype
        self.checkpoint_name = name
        self.eps = eps
        self.register_buffer("weight", torch.empty(size, dtype=dtype, device=device), persistent=False)

    def load(self, checkpoint: Checkpoint) -> None:
        checkpoint.read(f"{self.checkpoint_name}.weight", self.weight)
        if self._has_offset:
            self.weight += 1

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._fused.rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of x + delta, and x + delta, which the residual path goes on with."""
        return self._fused.add_rms_norm(x, delta, self.weight, self.eps)
