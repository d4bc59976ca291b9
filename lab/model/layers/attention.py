"""The attention layer, and the one custom op behind which every attention plugin stands.

`lab::attention` is opaque to torch.compile: graphs are split at it, and what it does is decided by the forward context of
the step. It writes into a given output, so that captured graphs keep their addresses.
"""

import torch
from torch import nn

from lab import context
from lab.errors import UserError
from lab.model.checkpoint import Checkpoint

_library = torch.library.Library("lab", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")


def run_attention(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, out_TNH: torch.Tensor, layer: int) -> None:
    """Write keys and values, then attend, by the forward context of the step: what the op `lab::attention` does."""
    step = context.current()
    backend = step.backends[layer]
    backend.write(k_TKH, v_TKH, step.kv[layer], step.batches[layer].slots_T)
    backend.attend(q_TNH, step.kv[layer], step.plans[layer], out_TNH)


def _attention_fake(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, out_TNH: torch.Tensor, layer: int) -> None:
    """Shapes only: the output tensor is given, so there is nothing to make."""


_library.impl("attention", run_attention, "CompositeExplicitAutograd")
torch.library.register_fake("lab::attention", _attention_fake, lib=_library)


# Where published checkpoints keep the scales of a layer's keys and values, at the name of its attention.
SCALE_NAMES = ("{}_scale", "attn.{}_scale", "{0}_proj.{0}_scale", "{}_proj.output_scale")


class AttentionLayer(nn.Module):
    """One layer's attention over the paged cache. It has no weights; `layer` is its index among the attention layers.

    `kv_scales_2K` are the scales of a quantized cache that the checkpoint has for the layer, if it has any; `sinks_N` the
    attention sinks, one logit for each query head, of an architecture that has them.
    """

    def __init__(
        self,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        name: str = "",
    ) -> None:
        """`name`: of the attention in the checkpoint."""
        super().__init__()
        self.name = name
        self.kv_scales_2K: torch.Tensor | None = None
        self.sinks_N: torch.Tensor | None = None
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap

    def load(self, checkpoint: Checkpoint) -> None:
        """Read the scales of keys and values, where the checkpoint has them. Raises UserError for one without the other."""
        names = set(checkpoint.names())
        for pattern in SCALE_NAMES:
            pair = [f"{self.name}.{pattern.format(half)}" for half in "kv"]
            if not names.isdisjoint(pair):
                self.kv_scales_2K = torch.stack([self._scales(checkpoint, name) for name in pair])

    def _scales(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        """One scale for each KV head; that of the whole tensor for all of them."""
        shape = checkpoint.shape_of(name)
        scales = torch.empty(shape)
        checkpoint.read(name, scales)
        if scales.numel() not in (1, self.num_kv_heads) or not (scales.isfinite() & (scales > 0)).all():
            raise UserError(
                f"{checkpoint.file_of(name)}: tensor '{name}' of shape {list(shape)} must be one positive scale, or one for "
                f"each of {self.num_kv_heads} KV heads."
            )
        return scales.flatten().expand(self.num_kv_heads)

    def forward(self, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        """The attended values, heads side by side: (T, N * H)."""
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        torch.ops.lab.attention(q_TNH, k_TKH, v_TKH, out_TNH, self.layer)
        return out_TNH.flatten(1)
