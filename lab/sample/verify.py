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

Drafts that are a tree have a target after each node, on the supposition that its path was right, and `follow` goes from the
root to the child that is the target as long as there is one. Greedy and one-hot targets are as above: for each path they are
those of a chain, so siblings together are accepted with the sum of their probabilities. Siblings drawn from distributions are
tried one after another, `tree_targets`.

In each case p is the whole target distribution: edited with the drafts before it in the history, with temperature and
filters applied.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.sample.ordering import pick
from lab.sample.randomness import Purpose
from lab.sample.transfer import to_device
from lab.sample.tree import ROOT, Tree


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


def follow(targets: list[int], draft_ids: list[int], tree: Tree) -> tuple[list[int], list[int]]:
    """What a request with a tree of drafts puts out, and the accepted nodes.

    Args:
        targets: of its logit rows: after the last known token, then after each node.
    """
    node, path = ROOT, []
    while True:
        target = targets[node + 1]
        node = next((child for child in tree.children(node) if draft_ids[child] == target), ROOT)
        if node == ROOT:
            return [*(draft_ids[node] for node in path), target], path
        path.append(node)


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
    recovered_X = pick(_residual(target_XV, proposal_XV), to_device(recover_X, device))
    return torch.where(kept_X, drafts_X1.squeeze(1), recovered_X).cpu().numpy()


@dataclass(frozen=True, slots=True)
class DrawnTree:
    """A request's tree of drafts that were drawn."""

    tree: Tree
    draft_ids: list[int]
    first: int  # its first row of the target distributions: after the last known token; row 1 + i is after node i
    proposal: int  # its place in the proposals


def tree_targets(
    target_LV: Tensor,
    proposal_XSV: Tensor,
    requests: list[DrawnTree],
    uniforms: Callable[[np.ndarray, np.ndarray, np.ndarray, Purpose], np.ndarray],
) -> dict[int, int]:
    """Targets for trees of drafts drawn from distributions, by rejection: {row of target_LV: token}, where one was decided.

    From the root on, siblings are tried in turn: x, drawn from q, is kept with probability min(1, p(x) / q(x)); if it is not, p
    gives way to max(p - q, 0), renormalised, and the next one is tried. What remains of p after the last gives the target. A
    kept sibling goes on with its own children (Miao et al., "SpecInfer", https://arxiv.org/abs/2305.09781, whose siblings are
    drawn independently; of siblings that differ, each q is what the earlier ones left of it).

    Args:
        proposal_XSV: q of each node.
        uniforms: (places in `requests`, depths, turns, purpose) -> float64 in [0, 1), independent of each other.
    """
    device, found = target_LV.device, {}
    node_X = np.full(len(requests), ROOT)
    turn_X, depth_X = np.zeros(len(requests), np.int64), np.zeros(len(requests), np.int64)
    firsts_X, places_X = np.array([r.first for r in requests]), np.array([r.proposal for r in requests])
    p_XV = target_LV[to_device(firsts_X, device)]
    left = np.flatnonzero([len(r.draft_ids) > 0 for r in requests])
    while len(left):
        child_Y = np.array([requests[i].tree.children(node_X[i])[turn_X[i]] for i in left])
        token_Y1 = to_device(np.array([requests[i].draft_ids[c] for i, c in zip(left, child_Y, strict=True)]), device)[:, None]
        index = to_device(left, device)
        p_YV = p_XV[index]
        q_YV = proposal_XSV[to_device(places_X[left], device), to_device(child_Y, device)].float()
        accept_Y1 = to_device(uniforms(left, depth_X[left], turn_X[left], Purpose.ACCEPT), device)[:, None]
        kept_Y1 = accept_Y1 * q_YV.gather(1, token_Y1).double() < p_YV.gather(1, token_Y1).double()
        rest_YV = _residual(p_YV, q_YV)
        p_XV[index] = rest_YV / rest_YV.sum(-1, keepdim=True)
        going_on = []
        for i, child, is_kept in zip(left.tolist(), child_Y.tolist(), kept_Y1.squeeze(1).tolist(), strict=True):
            request, row = requests[i], requests[i].first + int(node_X[i]) + 1
            if is_kept:
                found[row] = request.draft_ids[child]
                node_X[i], turn_X[i], depth_X[i] = child, 0, depth_X[i] + 1
                p_XV[i] = target_LV[request.first + 1 + child]
                if request.tree.children(child):
                    going_on.append(i)
            elif turn_X[i] + 1 < len(request.tree.children(int(node_X[i]))):
                turn_X[i] += 1
                going_on.append(i)
            else:
                recover = uniforms(np.array([i]), depth_X[i : i + 1], np.zeros(1, np.int64), Purpose.RECOVER)
                found[row] = int(pick(p_XV[i : i + 1], to_device(recover, device)))
        left = np.array(going_on, np.int64)
    return found


def _residual(target_XV: Tensor, proposal_XV: Tensor) -> Tensor:
    """What of p is above q; p itself where it is q, up to rounding: a rejection is all but impossible there."""
    residual_XV = (target_XV - proposal_XV).clamp_(min=0.0)
    equal_X1 = residual_XV.amax(-1, keepdim=True) <= 0
    return torch.where(equal_X1, target_XV, residual_XV)
