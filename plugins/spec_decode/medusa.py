"""Medusa: heads that each guess one of the next tokens, all from the target's last hidden state: a chain, or a tree."""

from dataclasses import dataclass
from typing import Literal

from lab.api import Capabilities, Draft, Proposer, ProposeView, StepView, Target, UserError, register

from ._bits import keeping_bits
from ._chain import Choice, LastStates
from ._options import check_whole, head_folder
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
        if options.head is not None:
            head_folder(options.head)  # before the model is loaded
        self._tree = static_tree(options)
        if self._tree is None:
            self.num_drafts = 3 if options.num_drafts is None else options.num_drafts
            check_whole("num_drafts", self.num_drafts)
        else:
            self.num_drafts, self.tree_depth = len(self._tree.nodes), self._tree.depth
        self._last = LastStates()

    @classmethod
    def capabilities_with(cls, options: Options) -> Capabilities:
        return keeping_bits(cls.capabilities, options)

    def check_target(self, name: str) -> None:
        if self.options.head is None:
            raise UserError("spec.head must be given: the folder of the Medusa heads.")

    def bind(self, target: Target) -> None:
        super().bind(target)
        folder = head_folder(self.options.head)
        self._heads = target.load_head(folder, "medusa1")
        if self._tree is not None and self._tree.depth > self._heads.num_heads:
            raise UserError(f"a tree of depth {self._tree.depth} was asked for: {folder} has {self._heads.num_heads} heads.")
        if self._tree is not None:
            draft_ids = self._heads.draft_ids
            check_ranks(self._tree, target.config.vocab_size if draft_ids is None else len(draft_ids))
        elif self.num_drafts > self._heads.num_heads:
            raise UserError(f"spec.num_drafts {self.num_drafts}: {folder} has {self._heads.num_heads} heads.")

    def observe(self, step: StepView) -> None:
        self._last.keep_kept(step, step.hidden_TD)

    def propose(self, view: ProposeView) -> Draft:
        if self._tree is not None:
            return self._propose_tree(view, self._tree)
        num = min(self.num_drafts, int(view.limits_R.max(initial=0)))
        choice = Choice(view, num, self.target.config.vocab_size, self.target.device, self.options.draw, self._heads.draft_ids)
        if num:
            hidden_RD = self._last.of(view.rows_R)
            for head in range(num):
                choice.choose(self._heads, hidden_RD, head)
        return choice.draft()

    def _propose_tree(self, view: ProposeView, tree: StaticTree) -> Draft:
        """What a head says of a depth is the same after every path."""
        vocab_size, device = self.target.config.vocab_size, self.target.device
        siblings = Siblings(tree, view, vocab_size, device, self.options.draw, self._heads.draft_ids)
        hidden_RD = self._last.of(view.rows_R)
        for head in range(min(tree.depth, int(view.depths_R.max(initial=0)), int(view.limits_R.max(initial=0)))):
            logits_RV = self._heads.logits(hidden_RD, head)
            for parent in tree.at(head) if head else [-1]:
                siblings.choose(tree.children(parent), logits_RV)
        return siblings.draft()
