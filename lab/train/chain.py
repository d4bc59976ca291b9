"""Attention of a draft head in training: to the true entries up to the own one, and to the own chain of unrolled ones.

True entries are those made of the target's hidden states. A head that goes on from its own output sees, beside them, only what
it made itself on the way: of each further step one entry. Both parts share one softmax. On the CPU no weights are kept: the
flash kernel's sum of exponentials lets the parts be joined, and given the joined result and sum, the kernel's own backward
pass is right for its part (Dao et al., https://arxiv.org/abs/2205.14135, section B.2).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys and values so far: `k` and `v` of the true entries, T = R * L of them, then of each unrolled step.

    Only entries `at_X` go on from their own output, and are asked what they give; with None all are.
    """

    shape: tuple[int, int]  # R texts of L tokens, padding included
    at_X: torch.Tensor | None = None
    k: tuple[torch.Tensor, ...] = ()  # TKH, then XKH each
    v: tuple[torch.Tensor, ...] = ()

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, "Chain"]:
        """What the entries, one step further, get from all before them and themselves: XNH; and the longer chain."""
        longer = Chain(self.shape, self.at_X, (*self.k, k), (*self.v, v))
        if not self.k:
            grids = (_grid(x, self.shape) for x in (q, k, v))
            y = functional.scaled_dot_product_attention(*grids, is_causal=True, enable_gqa=True)
            return self.asked(y.transpose(1, 2).flatten(0, 1)), longer
        if q.device.type == "cpu":
            return _OverChain.apply(q, self.shape, self.at_X, *longer.k, *longer.v), longer
        return over_chain(q, self.shape, self.at_X, longer.k, longer.v), longer

    def asked(self, x: torch.Tensor) -> torch.Tensor:
        """What of a step's entries go on: in the first step there are all T."""
        return x if self.k or self.at_X is None else x.index_select(0, self.at_X)


def over_chain(
    q_XNH: torch.Tensor,
    shape: tuple[int, int],
    at_X: torch.Tensor | None,
    k: tuple[torch.Tensor, ...],
    v: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """The formula, all weights at once."""
    rows_X, places_X = _where(q_XNH, shape, at_X)
    shared = q_XNH.shape[1] // k[0].shape[1]
    k, v = ([x.repeat_interleave(shared, 1) for x in of_steps] for of_steps in (k, v))
    keys, values = k[0].unflatten(0, shape)[rows_X], v[0].unflatten(0, shape)[rows_X]  # XLNH
    scale = q_XNH.shape[-1] ** -0.5
    later_XL = torch.arange(shape[1], device=q_XNH.device) > places_X[:, None]
    scores = [torch.einsum("xnh,xlnh->xnl", q_XNH, keys).masked_fill(later_XL[:, None], -torch.inf)]
    scores += [(q_XNH * own).sum(-1, keepdim=True) for own in k[1:]]
    weights = (torch.cat(scores, -1).float() * scale).softmax(-1).to(q_XNH.dtype)
    y_XNH = torch.einsum("xnl,xlnh->xnh", weights[..., : shape[1]], values)
    return y_XNH + sum(weights[..., shape[1] + step, None] * own for step, own in enumerate(v[1:]))


class _OverChain(torch.autograd.Function):
    """`over_chain` by the CPU's flash kernel."""

    @staticmethod
    def forward(
        ctx: Any, q_XNH: torch.Tensor, shape: tuple[int, int], at_X: torch.Tensor | None, *entries: torch.Tensor
    ) -> torch.Tensor:
        k, v = entries[: len(entries) // 2], entries[len(entries) // 2 :]
        k_grid, v_grid = _grid(k[0], shape), _grid(v[0], shape)
        q_grid = _grid(_spread(q_XNH, shape, at_X), shape)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y_RNLH, sums_RNL = flash(q_grid, k_grid, v_grid, 0.0, True)
        y_XNH, sums_XN = _picked(y_RNLH, at_X), _picked(sums_RNL, at_X)
        scores = [_score(q_XNH, own) for own in k[1:]]
        total_XN = torch.stack([sums_XN, *scores]).logsumexp(0)
        y_XNH = y_XNH * (sums_XN - total_XN).exp().to(y_XNH.dtype).unsqueeze(-1)
        for score, own in zip(scores, v[1:], strict=True):
            _of_heads(y_XNH, own).addcmul_(
                _of_heads((score - total_XN).exp().to(own.dtype).unsqueeze(-1), own), own.unsqueeze(2)
            )
        ctx.shape = shape
        ctx.save_for_backward(q_XNH, at_X, y_XNH, total_XN, *entries)
        return y_XNH

    @staticmethod
    def backward(ctx: Any, dy_XNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_XNH, at_X, y_XNH, total_XN, *entries = ctx.saved_tensors
        shape, scale = ctx.shape, q_XNH.shape[-1] ** -0.5
        k, v = entries[: len(entries) // 2], entries[len(entries) // 2 :]
        grids = [_grid(_spread(x, shape, at_X), shape) for x in (dy_XNH, q_XNH, y_XNH)]
        total_RNL = _grid(_spread(total_XN, shape, at_X), shape)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq_grid, dk_grid, dv_grid = flash(
            grids[0], grids[1], _grid(k[0], shape), _grid(v[0], shape), grids[2], total_RNL, 0.0, True
        )
        dq_XNH = _picked(dq_grid, at_X)
        dk, dv = [dk_grid.transpose(1, 2).flatten(0, 1)], [dv_grid.transpose(1, 2).flatten(0, 1)]
        drift_XN1 = (dy_XNH * y_XNH).sum(-1, keepdim=True).float()
        for own_k, own_v in zip(k[1:], v[1:], strict=True):
            weight_XN1 = (_score(q_XNH, own_k) - total_XN).exp().unsqueeze(-1)
            dv.append(_of_heads(weight_XN1.to(dy_XNH.dtype) * dy_XNH, own_v).sum(2))
            along_XN1 = (_of_heads(dy_XNH, own_v) * own_v.unsqueeze(2)).sum(-1).flatten(1).unsqueeze(-1).float()
            slope_XN1 = (weight_XN1 * (along_XN1 - drift_XN1) * scale).to(q_XNH.dtype)
            dk.append(_of_heads(slope_XN1 * q_XNH, own_k).sum(2))
            dq_XNH = dq_XNH + (_of_heads(slope_XN1, own_k) * own_k.unsqueeze(2)).flatten(1, 2)
        return dq_XNH, None, None, *dk, *dv


def _score(q_XNH: torch.Tensor, k_XKH: torch.Tensor) -> torch.Tensor:
    """XN, scaled, float32."""
    return (_of_heads(q_XNH, k_XKH) * k_XKH.unsqueeze(2)).sum(-1).flatten(1).float() * q_XNH.shape[-1] ** -0.5


def _of_heads(x_XNH: torch.Tensor, k_XKH: torch.Tensor) -> torch.Tensor:
    """Query heads by the key head that they share: (X, K, N / K, H)."""
    return x_XNH.unflatten(1, (k_XKH.shape[1], -1))


def _grid(x_TNH: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """RNLH, or RNL of TN."""
    return x_TNH.unflatten(0, shape).transpose(1, 2)


def _spread(x_X: torch.Tensor, shape: tuple[int, int], at_X: torch.Tensor | None) -> torch.Tensor:
    """Entries in their places among all T, zeros elsewhere."""
    if at_X is None:
        return x_X
    return x_X.new_zeros(shape[0] * shape[1], *x_X.shape[1:]).index_copy_(0, at_X, x_X)


def _picked(x_RNL: torch.Tensor, at_X: torch.Tensor | None) -> torch.Tensor:
    """Entries of a grid, as XN..."""
    x_T = x_RNL.transpose(1, 2).flatten(0, 1)
    return x_T if at_X is None else x_T.index_select(0, at_X)


def _where(q_XNH: torch.Tensor, shape: tuple[int, int], at_X: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each entry its text and its place there."""
    places_X = torch.arange(len(q_XNH), device=q_XNH.device) if at_X is None else at_X
    return places_X // shape[1], places_X % shape[1]
