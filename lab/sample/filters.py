"""From edited logits to the distribution that tokens are drawn from: temperature, top_k, top_p, min_p.

The rules, in this order:

- temperature divides the logits.
- top_k keeps the k most likely tokens; among equals at the edge the lower ids.
- top_p keeps the smallest set of most likely tokens whose share of what top_k left is at least p, one token at least.
  From TOP_P_OFF on it is off: the excluded share would be smaller than the rounding of float32 probabilities.
- min_p keeps tokens at least min_p times as likely as the most likely one.

Rows with neither top_k nor top_p need no order among tokens and stay a vocabulary wide. The others are cut to a few
candidates first, and to more of them as long as these do not hold the nucleus; only the widest nuclei sort the whole row.
What comes out depends on the row alone, however many candidates it took.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.sample.ordering import block_sums, parts, pick, pick_short, top
from lab.sample.transfer import to_device

TOP_P_OFF = 1.0 - 2.0**-20
CANDIDATES = (128, 2048)  # the first holds nearly every nucleus of a language model


@dataclass(frozen=True, slots=True)
class Filters:
    """The parameters of each row, on the host: float64 and int64 of shape W. top_k <= 0 keeps all."""

    temperature_W: np.ndarray
    top_k_W: np.ndarray
    top_p_W: np.ndarray
    min_p_W: np.ndarray

    def __getitem__(self, index: np.ndarray | slice) -> "Filters":
        return Filters(self.temperature_W[index], self.top_k_W[index], self.top_p_W[index], self.min_p_W[index])


@dataclass(frozen=True, slots=True)
class Kept:
    """What the filters leave of some rows: weights proportional to probabilities, zero for what was dropped.

    ids_GK is None when column v of the weights is token v; else the columns are in order of likelihood.
    """

    rows_G: np.ndarray
    weights_GK: Tensor  # float32 for whole rows, float64 for candidates
    ids_GK: Tensor | None


def sample(x_WV: Tensor, filters: Filters, uniform_W: np.ndarray, *, row_by_row: bool = False) -> np.ndarray:
    """Draw one token id for each row: int64 of shape W.

    Args:
        x_WV: float32 logits with everything but these filters done, in each row at least one that is not -inf; left as
            they are.
        uniform_W: float64 in [0, 1), one for each row; the same number always gives the same token.
        row_by_row: see `parts`.
    """
    tokens_W = np.empty(len(x_WV), np.int64)
    for kept in kept_tokens(x_WV, filters, row_by_row=row_by_row):
        uniform_G = to_device(uniform_W[kept.rows_G], x_WV.device)
        if kept.ids_GK is None:
            tokens_G = pick(kept.weights_GK, uniform_G)
        else:
            index_G = pick_short(kept.weights_GK, uniform_G * kept.weights_GK.cumsum(-1)[:, -1])
            tokens_G = kept.ids_GK.gather(1, index_G.unsqueeze(1)).squeeze(1)
        tokens_W[kept.rows_G] = tokens_G.cpu().numpy()
    return tokens_W


def probabilities(x_WV: Tensor, filters: Filters) -> Tensor:
    """The whole target distribution of each row: float32 of the shape of x_WV, zero for what the filters drop."""
    probs_WV = torch.zeros_like(x_WV)
    for kept in kept_tokens(x_WV, filters):
        rows_G = to_device(kept.rows_G, x_WV.device)
        share_GK = (kept.weights_GK / kept.weights_GK.sum(-1, keepdim=True, dtype=torch.float64)).float()
        if kept.ids_GK is None:
            probs_WV[rows_G] = share_GK
        else:
            probs_WV[rows_G.unsqueeze(1), kept.ids_GK] = share_GK
    return probs_WV


def kept_tokens(x_WV: Tensor, filters: Filters, *, row_by_row: bool = False) -> Iterator[Kept]:
    """Apply the filters; the rows come in groups, each row in exactly one."""
    narrow_W = (filters.top_k_W > 0) | (filters.top_p_W < TOP_P_OFF)
    yield from _whole_rows(x_WV, filters, np.flatnonzero(~narrow_W), row_by_row)
    vocab_size = x_WV.shape[1]
    top_k_W = np.minimum(filters.top_k_W, vocab_size)
    for limit in (*(num for num in CANDIDATES if num < vocab_size), vocab_size):
        for rows_G in parts(np.flatnonzero(narrow_W & (top_k_W <= limit)), x_WV, row_by_row=row_by_row):
            top_k_G = top_k_W[rows_G]
            num = int(top_k_G.max() if top_k_G.min() > 0 else limit)
            weights_GK, ids_GK, enough_G = _candidates(_take(x_WV, rows_G), filters[rows_G], num)
            narrow_W[rows_G[enough_G]] = False
            done = np.flatnonzero(enough_G)
            if len(done):
                yield Kept(rows_G[done], _take(weights_GK, done), _take(ids_GK, done))


def weights_of(x_WV: Tensor, temperature_W: np.ndarray, maximum_W1: Tensor) -> Tensor:
    """exp((x - maximum) / temperature): float32, 1 for the most likely token, so that nothing overflows."""
    scaled_WV = x_WV - maximum_W1
    if (temperature_W != 1.0).any():
        scaled_WV.mul_(to_device((1.0 / temperature_W).astype(np.float32), x_WV.device).unsqueeze(1))
    return scaled_WV.exp_()


def _whole_rows(x_WV: Tensor, filters: Filters, rows: np.ndarray, row_by_row: bool) -> Iterator[Kept]:
    for rows_G in parts(rows, x_WV, row_by_row=row_by_row):
        x_GV = _take(x_WV, rows_G)
        weights_GV = weights_of(x_GV, filters.temperature_W[rows_G], x_GV.amax(-1, keepdim=True))
        min_p_G = filters.min_p_W[rows_G]
        if min_p_G.any():
            weights_GV.masked_fill_(weights_GV < to_device(min_p_G.astype(np.float32), x_WV.device).unsqueeze(1), 0.0)
        yield Kept(rows_G, weights_GV, None)


def _candidates(x_GV: Tensor, filters: Filters, num: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Filter the `num` most likely tokens of each row.

    Sums run in float64 over tokens in order of likelihood, so they do not depend on `num`.

    Returns:
        weights and ids of shape G x num, and for which rows `num` tokens were enough.
    """
    values_GK, ids_GK = top(x_GV, num)
    maximum_G1 = values_GK[:, :1]
    weights_GK = weights_of(values_GK, filters.temperature_W, maximum_G1).double()
    top_k_G1 = _column(np.where(filters.top_k_W > 0, filters.top_k_W, x_GV.shape[1]), x_GV)
    weights_GK.masked_fill_(torch.arange(num, device=x_GV.device) >= top_k_G1, 0.0)
    running_GK = weights_GK.cumsum(-1)
    total_G1 = running_GK[:, -1:].clone()
    whole = np.flatnonzero(filters.top_k_W <= 0)
    if len(whole):
        index = to_device(whole, x_GV.device)
        weights_XV = weights_of(_take(x_GV, whole), filters.temperature_W[whole], maximum_G1[index])
        total_G1[index] = block_sums(weights_XV).sum(-1, keepdim=True)
    top_p_G = np.where(filters.top_p_W < TOP_P_OFF, filters.top_p_W, 2.0)  # no share is 2: nothing is dropped
    edge_G1 = _column(top_p_G, x_GV) * total_G1
    enough_G = (running_GK[:, -1:] >= edge_G1).squeeze(1).cpu().numpy() | (filters.top_k_W > 0) | (num == x_GV.shape[1])
    weights_GK.masked_fill_(running_GK - weights_GK >= edge_G1, 0.0)
    weights_GK.masked_fill_(weights_GK < _column(filters.min_p_W, x_GV), 0.0)
    return weights_GK, ids_GK, enough_G


def _column(values_G: np.ndarray, like: Tensor) -> Tensor:
    return to_device(values_G, like.device).unsqueeze(1)


def _take(x_WV: Tensor, rows: np.ndarray) -> Tensor:
    """The given rows, without a copy when they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        return x_WV[first : last + 1]
    return x_WV[to_device(rows, x_WV.device)]
