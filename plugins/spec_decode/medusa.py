"""Medusa: heads that each guess one of the next tokens, all from the target's last hidden state. Drafts are a chain."""

from dataclasses import dataclass
from pathlib import Path

import torch

from lab.api import Capabilities, Draft, Proposer, ProposeView, StepView, Target, UserError, register

from ._bits import keeping_bits
from ._chain import Choice


@register("spec", "medusa")
class Medusa(Proposer):
    """Drafts by Medusa heads, in either published form; `lab train-draft train.kind=medusa1` makes some."""

    capabilities = Capabilities(devices={"cpu", "cuda"})
    observes = True

    @dataclass(frozen=True)
    class Options:
        head: str | None = None  # folder of the heads; must be given
        num_drafts: int = 3  # tokens proposed for a row and step, at most one for each head
        draw: bool = (
            True  # for requests that sample: draw drafts from the heads' distributions; false: their most likely tokens
        )

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.num_drafts < 1:
            raise UserError(f"spec.num_drafts must be a whole number from 1, got {options.num_drafts}.")
        self.num_drafts = options.num_drafts
        self._place_of: dict[int, int] = {}  # of each row of the last step: where its last hidden state is

    @classmethod
    def capabilities_with(cls, options: Options) -> Capabilities:
        return keeping_bits(cls.capabilities, options)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.options.head is None:
            raise UserError("spec.head must be given: the folder of the Medusa heads.")
        folder = Path(self.options.head).expanduser()
        if not folder.is_dir():
            raise UserError(f"spec.head={self.options.head}: there is no such folder.")
        self._heads = target.load_head(folder, "medusa1")
        if self.num_drafts > self._heads.num_heads:
            raise UserError(f"spec.num_drafts {self.num_drafts}: {folder} has {self._heads.num_heads} heads.")

    def observe(self, step: StepView) -> None:
        last_R = torch.from_numpy(step.batch.q_start_R1_cpu[:-1] + step.num_kept_R - 1)
        self._last_RD = step.hidden_TD[last_R.to(step.hidden_TD.device)]
        self._place_of = {row: place for place, row in enumerate(step.rows_R.tolist())}

    def propose(self, view: ProposeView) -> Draft:
        num = min(self.num_drafts, int(view.limits_R.max(initial=0)))
        choice = Choice(view, num, self.target.config.vocab_size, self.target.device, self.options.draw, self._heads.draft_ids)
        if num:
            hidden_RD = self._last_RD[[self._place_of[row] for row in view.rows_R.tolist()]]
            for head in range(num):
                if choice.needs_logits:
                    choice.take(self._heads.logits(hidden_RD, head))
                else:
                    choice.take_greedy(self._heads.greedy(hidden_RD, head))
        return choice.draft()
