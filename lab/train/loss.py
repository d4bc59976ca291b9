"""How far a head is from its target: losses and acceptance over one batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lab.train.data import TextBatch
from lab.train.heads import Chain, Eagle1, Eagle3, Medusa, rotations
from lab.train.target import FrozenTarget, TargetStates

ROWS_AT_ONCE = 512  # positions whose logits are there at a time
EAGLE1_TOKEN_WEIGHT = 0.1  # of the tokens' loss beside that of the hidden states, as published


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a head can propose: V target tokens by draft id, the target's rows for them, and where each token is (-1: not)."""

    ids_V: torch.Tensor
    rows_VD: torch.Tensor
    place_of: torch.Tensor

    @classmethod
    def of(cls, target: FrozenTarget, ids_V: torch.Tensor, vocab_size: int) -> "Vocabulary":
        place_of = torch.full((vocab_size,), -1)
        place_of[ids_V] = torch.arange(len(ids_V))
        device = target.model.embed.weight.device
        return cls(
            ids_V.to(device), target.head_rows(ids_V).to(target.model.embed.weight.dtype).to(device), place_of.to(device)
        )


class _TowardsTarget(torch.autograd.Function):
    """The cross entropy of softmax(x rows^T) with the target's probabilities, averaged over X positions, and the guesses (none
    when it `learns`: finding them takes as long as the rest).

    The gradient is made with the loss, a few positions at a time: the logits are never there as a whole, and the rows are the
    target's and do not learn.
    """

    @staticmethod
    def forward(
        ctx: Any, x_XD: torch.Tensor, rows_VD: torch.Tensor, probs_XV: torch.Tensor, learns: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = max(len(x_XD), 1)
        grad_XD = torch.empty_like(x_XD)
        total, guesses = x_XD.new_zeros((), dtype=torch.float32), []
        for first in range(0, len(x_XD), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            logits = functional.linear(x_XD[part].to(rows_VD.dtype), rows_VD).float()
            if not learns:
                guesses.append(logits.argmax(-1))
            log_probs = logits.log_softmax(-1)
            probs = probs_XV[part].float()
            total -= torch.dot(probs.flatten(), log_probs.flatten())
            if learns:
                slope = log_probs.exp_().sub_(probs).to(rows_VD.dtype)
                grad_XD[part] = (slope @ rows_VD).to(x_XD.dtype) / count
        ctx.save_for_backward(grad_XD)
        found = torch.cat(guesses) if guesses else torch.empty(0, dtype=torch.int64, device=x_XD.device)
        ctx.mark_non_differentiable(found)
        return total / count, found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None, None, None]:
        (grad_XD,) = ctx.saved_tensors
        return grad_XD * grad, None, None, None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss of a batch; for each unrolled step where a guess was asked for, and (unless it learns) was right: RL."""

    loss: torch.Tensor
    right: list[torch.Tensor]
    asked: list[torch.Tensor]


class Teacher:
    """The target's side of a batch."""

    def __init__(self, target: FrozenTarget, batch: TextBatch, vocabulary: Vocabulary) -> None:
        device = vocabulary.ids_V.device
        self.target = target
        self.vocabulary = vocabulary
        self.ids_RL = batch.ids_RL.to(device)
        self.states: TargetStates = target.states(self.ids_RL)
        self.embeds_RLD = target.embed(self.ids_RL)
        next_RL = functional.pad(self.ids_RL[:, 1:], (0, 1))
        self.place_RL = vocabulary.place_of[next_RL]  # of the token that position p is followed by
        self.asked_RL = batch.asked_RL.to(device)
        self.learnt_RL = self.asked_RL & (self.place_RL >= 0)
        hidden_XD = self.states.hidden_RLD[self.learnt_RL]
        parts = hidden_XD.split(ROWS_AT_ONCE)
        dtype = vocabulary.rows_VD.dtype
        probs = [functional.linear(part, vocabulary.rows_VD).float().softmax(-1).to(dtype) for part in parts]
        self._probs_XV = torch.cat(probs)
        self._number_RL = (self.learnt_RL.flatten().cumsum(0) - 1).view(self.learnt_RL.shape)

    def probs(self, learnt_RL: torch.Tensor, shift: int) -> torch.Tensor:
        """The target's distributions, over the draft vocabulary, `shift` positions after those where learnt_RL is set."""
        return self._probs_XV[shifted(self._number_RL, shift)[learnt_RL]]


def shifted(x_RL: torch.Tensor, by: int) -> torch.Tensor:
    """Entry j is what was at j + by; zeros (False) where there is nothing."""
    by = min(by, x_RL.shape[1])
    pad = (0, by) if x_RL.dim() == 2 else (0, 0, 0, by)
    return functional.pad(x_RL[:, by:], pad)


def eagle_outcome(head: Eagle1 | Eagle3, teacher: Teacher, unroll: int, decay: float) -> Outcome:
    """Unroll the head over its own outputs: at step k, entry j has token j + 1 + k and guesses token j + 2 + k."""
    states = teacher.states
    length = teacher.ids_RL.shape[1]
    hidden_RLD = head.start(states.hidden_RLD if isinstance(head, Eagle1) else states.aux_RLX)
    learns = torch.is_grad_enabled()
    chain, total = Chain(), hidden_RLD.new_zeros((), dtype=torch.float32)
    right, asked = [], []
    for step in range(unroll):
        cos, sin = rotations(teacher.target.model, length, step)
        hidden_RLD, chain = head(hidden_RLD, shifted(teacher.embeds_RLD, 1 + step), cos, sin, chain)
        learnt_RL = shifted(teacher.learnt_RL, 1 + step)
        x_XD = head.for_vocabulary(hidden_RLD[learnt_RL])
        loss, guesses = _TowardsTarget.apply(x_XD, teacher.vocabulary.rows_VD, teacher.probs(learnt_RL, 1 + step), learns)
        if isinstance(head, Eagle1):
            asked_RL = shifted(teacher.asked_RL, 1 + step)
            wanted = shifted(states.hidden_RLD, 1 + step)[asked_RL].float()
            loss = EAGLE1_TOKEN_WEIGHT * loss + functional.smooth_l1_loss(hidden_RLD[asked_RL].float(), wanted)
        total = total + decay**step * loss
        asked.append(shifted(teacher.asked_RL, 1 + step))
        if not learns:
            right.append(_right(guesses, learnt_RL, shifted(teacher.place_RL, 1 + step)))
    return Outcome(total, right, asked)


def medusa_outcome(head: Medusa, teacher: Teacher, decay: float) -> Outcome:
    """Head k at hidden state j guesses token j + 2 + k."""
    learns = torch.is_grad_enabled()
    total = teacher.states.hidden_RLD.new_zeros((), dtype=torch.float32)
    right, asked = [], []
    for number in range(len(head.blocks)):
        learnt_RL = shifted(teacher.learnt_RL, 1 + number)
        x_XD = head(teacher.states.hidden_RLD[learnt_RL], number)
        loss, guesses = _TowardsTarget.apply(x_XD, teacher.vocabulary.rows_VD, teacher.probs(learnt_RL, 1 + number), learns)
        total = total + decay**number * loss
        asked.append(shifted(teacher.asked_RL, 1 + number))
        if not learns:
            right.append(_right(guesses, learnt_RL, shifted(teacher.place_RL, 1 + number)))
    return Outcome(total, right, asked)


def _right(guesses_X: torch.Tensor, learnt_RL: torch.Tensor, place_RL: torch.Tensor) -> torch.Tensor:
    """Where the guess is the token that came; a token that the head does not know is never guessed."""
    right_RL = torch.zeros_like(learnt_RL)
    right_RL[learnt_RL] = guesses_X == place_RL[learnt_RL]
    return right_RL


def acceptance(outcomes: list[Outcome]) -> list[float]:
    """For each draft position, how often it is right where all before it were: over entries that had them all to make."""
    reached = [0] * (len(outcomes[0].right) + 1)
    for outcome in outcomes:
        standing = outcome.asked[-1]
        reached[0] += int(standing.sum())
        for position, right in enumerate(outcome.right, 1):
            standing = standing & right
            reached[position] += int(standing.sum())
    return [reached[i + 1] / max(reached[i], 1) for i in range(len(reached) - 1)]


def mean_length(rates: list[float]) -> float:
    """Tokens of a verification step at these rates: the accepted drafts and one more."""
    total, product = 1.0, 1.0
    for rate in rates:
        product *= rate
        total += product
    return total
