"""Where a layer's attention sinks lie in its cache."""

import math

import torch

from lab.api import AttentionSpec


def sink_blocks(spec: AttentionSpec, shape: tuple[int, ...]) -> int:
    """So many blocks of that shape hold a float32 for each query head, where the layer has sinks."""
    return -(-4 * spec.num_heads // (math.prod(shape) * spec.kv_dtype.itemsize)) if spec.has_sinks else 0


def sinks_of(kv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The layer's sinks_N, float32: a view into its cache, of blocks before that of the fixed scales."""
    end = len(kv) - (spec.kv_scales == "head")
    blocks = kv[end - sink_blocks(spec, tuple(kv.shape[1:])) : end]
    return blocks.view(-1).view(torch.uint8)[: 4 * spec.num_heads].view(torch.float32)
