"""Rotary positions (Su et al., https://arxiv.org/abs/2104.09864), with the scalings that checkpoints ask for.

The frequencies follow transformers' definitions, so that a checkpoint means the same here. Two of them depend there on how
long the longest sequence of a batch has become; a serving engine must not let one request change another, and keys in the
cache cannot be rotated again, so here they depend on the length the model is served with:

- `dynamic`: within max_position_embeddings transformers leaves the frequencies alone, and lab serves no longer contexts;
- `longrope`: the long factors when the served length exceeds the original one, else the short factors.
"""

import math

import torch
from torch import nn

from lab.model.config import RopeConfig
from lab.model.layers.fused import Formulas


def inverse_frequencies(rope: RopeConfig, max_model_len: int) -> torch.Tensor:
    """Angular frequency of each rotated pair, float32 of size rotary_dim / 2, for contexts of up to `max_model_len`."""
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    if rope.kind == "longrope":
        factors = rope.long_factor if max_model_len > rope.original_max_position else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta**exponent)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between are blended."""
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    is_long = wavelength > rope.original_max_position / low
    is_short = wavelength < rope.original_max_position / high
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, blended))


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over the dimensions between interpolation and extrapolation."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


class Rope(nn.Module):
    """Tables of cos and sin for every position, float32: rows of rotary_dim / 2, since both halves of a head share them."""

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device, fused: Formulas) -> None:
        super().__init__()
        self._take_rows = fused.take_rows
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, max_model_len))
        self.register_buffer("cos", (angles.cos() * rope.attention_factor).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * rope.attention_factor).to(device), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at these positions, shaped (T, 1, rotary_dim / 2) so that they broadcast over heads."""
        return self._take_rows(self.cos, positions_T).unsqueeze(1), self._take_rows(self.sin, positions_T).unsqueeze(1)
