"""The frozen target of a draft head: its hidden states for whole texts, without a cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import functional

from lab.context import ForwardContext, forward_context
from lab.model.decoder import Decoder
from lab.train.kept import KeptStates

if TYPE_CHECKING:
    from lab.contracts.attention import Attention
    from lab.runner.batch import Batch


class _WholeTexts:
    """In the place of a paged attention backend: causal attention over texts of one length, nothing kept."""

    def __init__(self, scale: float, sliding_window: int | None) -> None:
        self._scale = scale
        self._window = sliding_window
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, k_TKH: torch.Tensor, v_TKH: torch.Tensor, kv: Any, slots_T: Any) -> None:
        self._kv = k_TKH, v_TKH

    def attend(self, q_TNH: torch.Tensor, kv: Any, plan: tuple[int, int], out_TNH: torch.Tensor) -> None:
        heads = [x.unflatten(0, plan).transpose(1, 2) for x in (q_TNH, *self._kv)]
        mask = None
        if self._window is not None and self._window < plan[1]:
            place_L = torch.arange(plan[1], device=q_TNH.device)
            back_LL = place_L[:, None] - place_L
            mask = (back_LL >= 0) & (back_LL < self._window)
        y = functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=True
        )
        out_TNH.copy_(y.transpose(1, 2).flatten(0, 1))


@dataclass(frozen=True, slots=True)
class _Texts:
    """What the layers look up of a batch."""

    slots_T: None = None


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What the target computed for T tokens of some texts, one behind the other."""

    hidden_TD: torch.Tensor  # after the final norm
    aux_TX: torch.Tensor | None  # what entered each of the aux layers, side by side


class FrozenTarget:
    """A model whose head is being made. It is never changed; `aux_layers` are those whose inputs are wanted."""

    def __init__(self, model: Decoder, aux_layers: tuple[int, ...]) -> None:
        self.model = model
        model.aux_layers = aux_layers
        self._kept: KeptStates | None = None
        self._backends = [_WholeTexts(layer.scale, layer.sliding_window) for layer in model.attention_layers]

    def keep_states(self, folder: Path, lengths: Sequence[int]) -> None:
        """Keep what is computed of the texts 0, 1, ... of these lengths on disk, as long as this object lives."""
        weight = self.model.embed.weight
        self._kept = KeptStates(folder, lengths, (1 + len(self.model.aux_layers)) * weight.shape[1], weight.dtype)

    @torch.no_grad()
    def states(self, ids_RL: torch.Tensor, numbers: Sequence[int] | None = None) -> TargetStates:
        """The hidden states of these texts, padding included. Texts that are kept have `numbers`."""
        if self._kept is None or numbers is None:
            found_TX = self._computed(ids_RL)
        else:
            found_TX = self._kept.read(numbers, ids_RL.shape[1], lambda: self._computed(ids_RL).cpu()).to(ids_RL.device)
        size = self.model.embed.weight.shape[1]
        return TargetStates(found_TX[:, :size], found_TX[:, size:] if self.model.aux_layers else None)

    def _computed(self, ids_RL: torch.Tensor) -> torch.Tensor:
        """The final hidden state and the aux layers' side by side: TX."""
        shape = tuple(ids_RL.shape)
        count = len(self._backends)
        context = ForwardContext(
            [cast("Batch", _Texts())] * count,
            cast("list[Attention]", self._backends),
            [shape] * count,
            [torch.empty(0)] * count,
        )
        positions_T = torch.arange(shape[1], device=ids_RL.device).repeat(shape[0])
        with forward_context(context):
            out = self.model(ids_RL.flatten().int(), positions_T)
        return out.transpose(0, 1).flatten(1) if self.model.aux_layers else out

    def head_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of the target's head for these tokens, float32."""
        head = self.model.lm_head
        return head.quant.dequantize(head.weights, head.spec)[ids]

    @torch.no_grad()
    def embed(self, ids_RL: torch.Tensor) -> torch.Tensor:
        """TD."""
        return self.model.embed(ids_RL.flatten().int())
