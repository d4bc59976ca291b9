"""The attention layer, and the one custom op behind which every attention plugin stands.

`lab::attention` is opaque to torch.compile: graphs are split at it, and what it does is decided by the forward context of
the step. It writes into a given output, so that captured graphs keep their addresses.
"""

import torch
from torch import nn

from lab import context

_library = torch.library.Library("lab", "DEF")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer) -> ()")


def run_attention(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, out_TNH: torch.Tensor, layer: int) -> None:
    """Write keys and values, then attend, by the forward context of the step: what the op `lab::attention` does."""
    step = context.current()
    backend = step.backends[layer]
    backend.write(k_TKH, v_TKH, step.kv[layer], step.batch.slots_T)
    backend.attend(q_TNH, step.kv[layer], step.plans[layer], out_TNH)


def _attention_fake(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, out_TNH: torch.Tensor, layer: int) -> None:
    """Shapes only: the output tensor is given, so there is nothing to make."""


_library.impl("attention", run_attention, "CompositeExplicitAutograd")
torch.library.register_fake("lab::attention", _attention_fake, lib=_library)


class AttentionLayer(nn.Module):
    """One layer's attention over the paged cache. It has no weights; `layer` is its index among the attention layers."""

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
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap

    def forward(self, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
        """The attended values, heads side by side: (T, N * H)."""
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        torch.ops.lab.attention(q_TNH, k_TKH, v_TKH, out_TNH, self.layer)
        return out_TNH.flatten(1)
