"""How far a head is from its target: losses and acceptance over one batch."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from lab.train.chain import Chain
from lab.train.data import TextBatch
from lab.train.heads import Eagle1, Eagle3, Medusa, rotations
from lab.train.target import FrozenTarget, TargetStates

ROWS_AT_ONCE = 512  # positions whose logits are there at a time
EAGLE1_TOKEN_WEIGHT = 0.1  # of the tokens' loss beside that of the hidden states, as published


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a head can propose: V target tokens by draft id, the target's rows for them, and where each token is (-1: not)."""

    ids_V: torch.Tensor
    rows_VD: torch.Tensor
    place_of: torch.Tensor
    compiles: bool = False  # the loss over it

    @classmethod
    def of(cls, target: FrozenTarget, ids_V: torch.Tensor, vocab_size: int, *, compiles: bool = False) -> "Vocabulary":
        place_of = torch.full((vocab_size,), -1)
        place_of[ids_V] = torch.arange(len(ids_V))
        device = target.model.embed.weight.device
        rows_VD = target.head_rows(ids_V).to(target.model.embed.weight.dtype)
        return cls(ids_V.to(device), rows_VD.to(device), place_of.to(device), compiles)


def towards(logits_XV: torch.Tensor, probs_XV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cross entropy of softmax(logits) with `probs_XV`, summed, and its slope by the logits."""
    log_probs, wanted = logits_XV.float().log_softmax(-1), probs_XV.float()
    return -(wanted * log_probs).sum(), (log_probs.exp() - wanted).to(logits_XV.dtype)


@functools.cache
def _compiled_towards() -> Any:
    return torch.compile(towards, dynamic=True)


class _TowardsTarget(torch.autograd.Function):
    """`towards` for softmax(x rows^T), averaged over X positions, and the guesses (none when it `learns`: they take as long as
    the rest).

    The gradient is made with the loss, a few positions at a time: the logits are never there as a whole, and the rows are the
    target's and do not learn.
    """

    @staticmethod
    def forward(
        ctx: Any, x_XD: torch.Tensor, vocabulary: Vocabulary, probs_XV: torch.Tensor, learns: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows_VD = vocabulary.rows_VD
        loss_and_slope = _compiled_towards() if vocabulary.compiles else towards
        count = max(len(x_XD), 1)
        grad_XD = torch.empty_like(x_XD)
        total, guesses = x_XD.new_zeros((), dtype=torch.float32), []
        for first in range(0, len(x_XD), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            logits = functional.linear(x_XD[part].to(rows_VD.dtype), rows_VD)
            if not learns:
                guesses.append(logits.argmax(-1))
            loss, slope = loss_and_slope(logits, probs_XV[part])
            total += loss
            if learns:
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
    """The target's side of a batch: T = R * L positions, one text behind the other, padding included."""

    def __init__(self, target: FrozenTarget, batch: TextBatch, vocabulary: Vocabulary) -> None:
        device = vocabulary.ids_V.device
        self.target = target
        self.vocabulary = vocabulary
        self.ids_RL = batch.ids_RL.to(device)
        self.states: TargetStates = target.states(self.ids_RL, batch.numbers)
        self.embeds_TD = target.embed(self.ids_RL)
        next_RL = functional.pad(self.ids_RL[:, 1:], (0, 1))
        self.place_RL = vocabulary.place_of[next_RL]  # of the token that position p is followed by
        self.asked_RL = batch.asked_RL.to(device)
        self.learnt_RL = self.asked_RL & (self.place_RL >= 0)
        parts = self.states.hidden_TD[self.learnt_RL.flatten()].split(ROWS_AT_ONCE)
        self._probs_XV = torch.cat([functional.linear(part, vocabulary.rows_VD).softmax(-1) for part in parts])
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
    """Unroll the head over its own outputs: at step k, entry j has token j + 1 + k and guesses token j + 2 + k.

    Every entry is made of its true hidden state; only those go on from there that some step asks for a guess.
    """
    states, shape = teacher.states, tuple(teacher.ids_RL.shape)
    learns = torch.is_grad_enabled()
    total, right, asked = teacher.embeds_TD.new_zeros((), dtype=torch.float32), [], []
    at_X = torch.stack([shifted(teacher.asked_RL, 1 + step) for step in range(unroll)]).any(0).flatten().nonzero().squeeze(1)
    all_T = torch.arange(shape[0] * shape[1], device=at_X.device)
    x, chain, entries = head.start(states.hidden_TD if isinstance(head, Eagle1) else states.aux_TX), Chain(shape, at_X), all_T
    for step in range(unroll):
        rotation = rotations(teacher.target.model, entries % shape[1] + step)
        embeds = teacher.embeds_TD[(entries + 1 + step).clamp(max=len(all_T) - 1)]
        x, chain = head(x, embeds, *rotation, chain)
        entries = at_X
        learnt_RL, asked_RL = shifted(teacher.learnt_RL, 1 + step), shifted(teacher.asked_RL, 1 + step)
        probs_XV = teacher.probs(learnt_RL, 1 + step)
        guessing = head.for_vocabulary(x[learnt_RL.flatten()[at_X]])
        loss, guesses = _TowardsTarget.apply(guessing, teacher.vocabulary, probs_XV, learns)
        if isinstance(head, Eagle1):
            wanted = states.hidden_TD[(at_X + 1 + step).clamp(max=len(all_T) - 1)]
            loss = EAGLE1_TOKEN_WEIGHT * loss + _apart(x, wanted, asked_RL.flatten()[at_X])
        total = total + decay**step * loss
        asked.append(asked_RL)
        if not learns:
            right.append(_right(guesses, learnt_RL, shifted(teacher.place_RL, 1 + step)))
    return Outcome(total, right, asked)


def _apart(x_XD: torch.Tensor, wanted_XD: torch.Tensor, asked_X: torch.Tensor) -> torch.Tensor:
    """How far hidden states are from those they stand in for, where a guess was asked for."""
    return functional.smooth_l1_loss(x_XD[asked_X].float(), wanted_XD[asked_X].float())


def medusa_outcome(head: Medusa, teacher: Teacher, decay: float) -> Outcome:
    """Head k at hidden state j guesses token j + 2 + k."""
    learns = torch.is_grad_enabled()
    total = teacher.embeds_TD.new_zeros((), dtype=torch.float32)
    right, asked = [], []
    for number in range(len(head.blocks)):
        learnt_RL = shifted(teacher.learnt_RL, 1 + number)
        x_XD = head(teacher.states.hidden_TD[learnt_RL.flatten()], number)
        loss, guesses = _TowardsTarget.apply(x_XD, teacher.vocabulary, teacher.probs(learnt_RL, 1 + number), learns)
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
