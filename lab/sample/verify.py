"""Which drafts are accepted. This belongs to the core: a proposer can change the speed of a run, never its distribution.

For each draft there is a target token: the token to put out at its position, given that all drafts before it were right.
A draft is accepted when it is the target; the first target that differs replaces its draft and ends the verification, and
when all drafts are accepted the last logit row gives one more token. So what remains is where targets come from.

- Greedy rows: the argmax.
- One-hot proposals (no probabilities given): the target is drawn from the target distribution p with the position's own
  uniform, as if there were no draft. The draft x is then accepted with probability p(x), and the token put out otherwise is
  distributed as p without x, renormalised: exact rejection sampling for a one-hot proposal. Moreover the tokens are the
  very same as without drafts for the same seed, because the same uniform meets the same distribution at each position.
- Proposals drawn from a distribution q: `rejection_targets`.

In each case p is the whole target distribution: edited with the drafts before it in the history, with temperature and
filters applied.
"""

import numpy as np
import torch
from torch import Tensor

from lab.sample.ordering import pick
from lab.sample.transfer import to_device


def accept(targets: list[int], num_drafts: list[int], drafts: list[list[int]]) -> list[list[int]]:
    """The tokens each request puts out: its accepted drafts and one more token.

    Args:
        targets: one for each logit row, request by request, 1 + num_drafts each.
    """
    token_ids = []
    first = 0
    for num, draft_ids in zip(num_drafts, drafts, strict=True):
        count = 0
        while count < num and targets[first + count] == draft_ids[count]:
            count += 1
        token_ids.append(targets[first : first + count + 1])
        first += num + 1
    return token_ids


def rejection_targets(
    target_XV: Tensor, proposal_XV: Tensor, drafts_X: np.ndarray, accept_X: np.ndarray, recover_X: np.ndarray
) -> np.ndarray:
    """Targets for drafts drawn from a distribution, by rejection sampling: int64 of shape X.

    A draft x is kept with probability min(1, p(x) / q(x)); otherwise the target is drawn from max(p - q, 0), renormalised
    (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023). The residual is zero
    at a rejected x, so a rejected draft never comes back as its own replacement.

    Args:
        target_XV: p of each draft's position, float32.
        proposal_XV: q that the draft was drawn from, float32.
        drafts_X: the draft tokens.
        accept_X, recover_X: independent uniforms in [0, 1), float64.
    """
    device = target_XV.device
    drafts_X1 = to_device(drafts_X, device).unsqueeze(1)
    p_X = target_XV.gather(1, drafts_X1).squeeze(1).double()
    q_X = proposal_XV.gather(1, drafts_X1).squeeze(1).double()
    kept_X = to_device(accept_X, device) * q_X < p_X
    residual_XV = (target_XV - proposal_XV).clamp_(min=0.0)
    equal_X1 = residual_XV.amax(-1, keepdim=True) <= 0  # p is q, up to rounding: a rejection is all but impossible
    residual_XV = torch.where(equal_X1, target_XV, residual_XV)
    recovered_X = pick(residual_XV, to_device(recover_X, device))
    return torch.where(kept_X, drafts_X1.squeeze(1), recovered_X).cpu().numpy()
