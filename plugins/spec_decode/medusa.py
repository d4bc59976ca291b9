"""Medusa: heads that each guess one of the next tokens, all from the target's last hidden state: a chain, or a tree."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lab.api import Capabilities, Draft, Proposer, ProposeView, StepView, Target, UserError, register

from ._bits import keeping_bits
from ._chain import Choice
from ._siblings import Siblings
from ._tree import StaticTree, check_ranks, static_tree


@register("spec", "medusa")
class Medusa(Proposer):
    """Drafts by Medusa heads, in either published form; `lab train-draft train.kind=medusa1` makes some."""

    capabilities = Capabilities(devices={"cpu", "cuda"})
    observes = True

    @dataclass(frozen=True)
    class Options:
        head: str | None = None  # folder of the heads; must be given
        num_drafts: int | None = None  # tokens proposed for a row and step; null: 3 in a chain, 8 in a tree
        draw: bool = (
            True  # for requests that sample: draw drafts from the heads' distributions; false: their most likely tokens
        )
        tree: Literal["none", "static"] = "none"  # none: a chain, one token of each head
        depth: int | None = None  # of a tree: heads that it uses; of spec.choices it is their longest path; null: 3
        choices: list[list[int]] | None = None  # of a tree: its paths; [0, 2] is the third likeliest after the likeliest

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._tree = static_tree(options)
        if self._tree is None:
            self.num_drafts = 3 if options.num_drafts is None else options.num_drafts
            if self.num_drafts < 1:
                raise UserError(f"spec.num_drafts must be a whole number from 1, got {options.num_drafts}.")
        else:
            self.num_drafts, self.tree_depth = len(self._tree.nodes), self._tree.depth
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
        if self._tree is not None and self._tree.depth > self._heads.num_heads:
            raise UserError(f"a tree of depth {self._tree.depth} was asked for: {folder} has {self._heads.num_heads} heads.")
        if self._tree is not None:
            draft_ids = self._heads.draft_ids
            check_ranks(self._tree, target.config.vocab_size if draft_ids is None else len(draft_ids))
        elif self.num_drafts > self._heads.num_heads:
            raise UserError(f"spec.num_drafts {self.num_drafts}: {folder} has {self._heads.num_heads} heads.")

    def observe(self, step: StepView) -> None:
        last_R = torch.from_numpy(step.batch.q_start_R1_cpu[:-1] + step.num_kept_R - 1)
        self._last_RD = step.hidden_TD[last_R.to(step.hidden_TD.device)]
        self._place_of = {row: place for place, row in enumerate(step.rows_R.tolist())}

    def propose(self, view: ProposeView) -> Draft:
        if self._tree is not None:
            return self._propose_tree(view, self._tree)
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

    def _propose_tree(self, view: ProposeView, tree: StaticTree) -> Draft:
        """What a head says of a depth is the same after every path."""
        vocab_size, device = self.target.config.vocab_size, self.target.device
        siblings = Siblings(tree, view, vocab_size, device, self.options.draw, self._heads.draft_ids)
        hidden_RD = self._last_RD[[self._place_of[row] for row in view.rows_R.tolist()]]
        for head in range(min(tree.depth, int(view.depths_R.max(initial=0)), int(view.limits_R.max(initial=0)))):
            logits_RV = self._heads.logits(hidden_RD, head)
            for parent in tree.at(head) if head else [-1]:
                siblings.choose(tree.children(parent), logits_RV)
        return siblings.draft()
