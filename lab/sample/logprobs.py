"""Log-probabilities of chosen tokens, of the logits as the model gave them, in float32."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lab.sample.ordering import block_sums, num_larger, parts, top
from lab.types import TokenLogprobs


def token_logprobs(
    logits_XV: Tensor, chosen_ids: Sequence[int], nums: Sequence[int], *, row_by_row: bool = False
) -> list[TokenLogprobs]:
    """The log-probability and rank of one chosen token a row, with the row's most likely tokens.

    The rank is one more than the number of tokens with a strictly larger logit; alternatives are ordered by logit, equals
    by id.

    Args:
        logits_XV: raw logits, float32.
        chosen_ids: the chosen token of each row.
        nums: how many alternatives each row wants; 0 gives the chosen token alone.
        row_by_row: see `parts`.
    """
    found: list[TokenLogprobs] = []
    for rows in parts(np.arange(len(chosen_ids)), logits_XV, row_by_row=row_by_row):
        part = slice(rows[0], rows[-1] + 1)
        found += _part(logits_XV[part], chosen_ids[part], nums[part])
    return found


def _part(logits_XV: Tensor, chosen_ids: Sequence[int], nums: Sequence[int]) -> list[TokenLogprobs]:
    maximum_X1 = logits_XV.amax(-1, keepdim=True)
    log_total_X1 = block_sums((logits_XV - maximum_X1).exp_()).sum(-1, keepdim=True).log()
    chosen_X1 = torch.tensor(chosen_ids, device=logits_XV.device).unsqueeze(1)
    values_X1 = logits_XV.gather(1, chosen_X1)
    ranks = (num_larger(logits_XV, values_X1) + 1).tolist()
    columns_ids, columns_values = [chosen_X1], [values_X1]
    most = min(max(nums), logits_XV.shape[1])
    if most:
        top_values_XK, top_ids_XK = top(logits_XV, most)
        columns_ids.append(top_ids_XK)
        columns_values.append(top_values_XK)
    ids = torch.cat(columns_ids, 1).tolist()
    logprobs = ((torch.cat(columns_values, 1) - maximum_X1) - log_total_X1).float().tolist()
    return [
        TokenLogprobs(ids[row][: 1 + num], logprobs[row][: 1 + num], ranks[row])
        for row, num in enumerate(np.asarray(nums).tolist())
    ]
