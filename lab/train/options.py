"""What `lab train-draft` can be told: the settings `train.NAME`. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from lab.errors import UserError


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Sizes of the head, what it learns from, and for how long."""

    kind: Literal["eagle3", "eagle1", "medusa1"] = "eagle3"  # eagle1 is for EAGLE-2 as well
    data: str | None = None  # JSON lines of texts ({"text"}) or answers; null: the model's own answers to the workload
    start: str | None = None  # a head's folder to begin with; null: the target's last layer
    steps: int = 1000  # optimiser steps
    batch_tokens: int = 4096  # tokens of a step, padding included
    max_len: int = 1024  # longest text, in tokens; longer ones are cut
    lr: float = 5e-4  # learning rate, at its highest
    unroll: int = 4  # steps over its own outputs that an EAGLE head is trained for; heads of Medusa
    decay: float = 0.8  # factor of the loss's weight from one of these steps to the next
    draft_vocab: int | None = None  # tokens that the head can propose, the most frequent ones; null: all
    intermediate_size: int | None = None  # width of the head's feed-forward; null: the target's
    aux_layers: tuple[int, int, int] | None = None  # layers whose inputs EAGLE-3 fuses; null: 2, the middle, the last but two
    validation: int = 64  # texts that are kept apart, a tenth of them at most
    keep_states: bool = False  # the target's hidden states, on disk from one epoch to the next (4.5 KiB a token for smollm2)
    every: int = 100  # steps between checkpoints, with the acceptance on those texts

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "max_len", "unroll", "draft_vocab", "intermediate_size", "every", "validation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"train.{name} must be at least 1; got {value}.")
        if not self.lr > 0 or not 0 < self.decay <= 1:
            raise UserError(f"train.lr must be over 0 and train.decay from over 0 to 1; got {self.lr:g} and {self.decay:g}.")
        if self.max_len > self.batch_tokens:
            raise UserError(f"train.max_len {self.max_len} is more than train.batch_tokens {self.batch_tokens}.")
