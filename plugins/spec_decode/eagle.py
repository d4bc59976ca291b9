"""EAGLE: a draft head of one decoder layer goes on from the target's own hidden states.

Heads of EAGLE-1, 2 and 3 in their published formats, that draft chains or trees (`_eagle_tree`). The head's entry j, made of
hidden state j and token j + 1, lies in slot j of its layer's cache. After each step the head runs once over the tokens of the
step, prompts included, with the true hidden states; then it drafts by itself, one token or one level of a tree after another.
What it stored on its own account is made anew once the tokens are verified.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lab.api import Capabilities, Draft, Proposer, ProposeView, StepView, Target, UserError, nearest, register

from ._bits import keeping_bits
from ._chain import Choice, next_ids
from ._eagle_tree import DynamicTree, Levels, num_nodes, propose_static, tree_of
from ._siblings import Siblings
from ._tree import StaticTree, check_ranks

HEADS = Path(__file__).parent / "heads"
SHIPPED = {"smollm2": ("smollm2-eagle3", "eagle3")}  # by model.path: the head's folder and format


@register("spec", "eagle")
class Eagle(Proposer):
    """Drafts by a small head on the target's hidden states (EAGLE-1, 2 and 3)."""

    capabilities = Capabilities(devices={"cpu", "cuda"})
    observes = True
    lookahead = 1

    @dataclass(frozen=True)
    class Options:
        head: str | None = None  # folder of the head; null: the one that comes with lab, for smollm2
        format: Literal["eagle3", "eagle1"] = "eagle3"  # of the folder; eagle1: EAGLE-1 and EAGLE-2
        num_drafts: int | None = None  # tokens proposed for a row and step; null: 4 in a chain, 8 in a tree
        draw: bool = True  # for requests that sample: draw drafts from the head's distribution; false: its most likely tokens
        tree: Literal["none", "dynamic", "static"] = "none"  # none: a chain; dynamic: EAGLE-2's tree, by the head's confidence
        depth: int | None = None  # of a tree: tokens of its longest path; the head is run once for each; null: 3
        top_k: int | None = None  # dynamic: paths gone on with at each depth, and tokens tried after each; null: 8
        choices: list[list[int]] | None = None  # static: its paths, as ranks: [0, 2] is the third likeliest after the likeliest

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._tree = tree_of(options)
        if self._tree is None:
            self.num_drafts = 4 if options.num_drafts is None else options.num_drafts
            if self.num_drafts < 1:
                raise UserError(f"spec.num_drafts must be a whole number from 1, got {options.num_drafts}.")
        else:
            self.num_drafts, self.tree_depth = num_nodes(options, self._tree), self._tree.depth
            self.num_scratch = max(self._tree.num_entries, 1)
        self._place_of: dict[int, int] = {}  # of each row of the last step: where its last result is

    @classmethod
    def capabilities_with(cls, options: Options) -> Capabilities:
        return keeping_bits(cls.capabilities, options)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.num_drafts >= target.max_model_len:
            raise UserError(f"spec.num_drafts {self.num_drafts}: contexts have at most {target.max_model_len} tokens.")
        folder, kind = self._find(target)
        self._head = target.load_head(folder, kind)
        if isinstance(self._tree, StaticTree):
            draft_ids = self._head.draft_ids
            check_ranks(self._tree, target.config.vocab_size if draft_ids is None else len(draft_ids))
        self.attention_layers = self._head.attention_layers
        self.aux_layers = self._head.aux_layers

    def observe(self, step: StepView) -> None:
        last_R = step.batch.q_start_R1_cpu[:-1] + step.num_kept_R - 1
        states_TD = self._head.states(step.hidden_TD, step.aux_ATD)
        out_TD = self._run(step.batch, states_TD, torch.from_numpy(next_ids(step)).to(self.target.device))
        self._last_RD = out_TD[torch.from_numpy(last_R).to(out_TD.device)]
        self._place_of = {row: place for place, row in enumerate(step.rows_R.tolist())}

    def propose(self, view: ProposeView) -> Draft:
        if self._tree is not None:
            return self._propose_tree(view)
        num = min(self.num_drafts, int(view.limits_R.max(initial=0)))
        choice = Choice(view, num, self.target.config.vocab_size, self.target.device, self.options.draw, self._head.draft_ids)
        if num == 0:
            return choice.draft()
        places = [self._place_of[row] for row in view.rows_R.tolist()]
        hidden_RD = self._last_RD if len(places) == len(self._last_RD) else self._last_RD[places]
        ids_R = self._next(choice, hidden_RD)
        for batch in self.cache.chain(view.rows_R, view.lengths_R - 1, num - 1):
            with self.cache.running(batch):
                hidden_RD = self._head.run(hidden_RD, ids_R, batch.positions_T)
            ids_R = self._next(choice, hidden_RD)
        return choice.draft()

    def _propose_tree(self, view: ProposeView) -> Draft:
        places = [self._place_of[row] for row in view.rows_R.tolist()]
        levels = Levels(self.cache, view, self._run, self._last_RD[places])
        if isinstance(self._tree, DynamicTree):
            return self._tree.propose(view, levels, self._head.top)
        vocab_size, device = self.target.config.vocab_size, self.target.device
        siblings = Siblings(self._tree, view, vocab_size, device, self.options.draw, self._head.draft_ids)
        return propose_static(self._tree, view, levels, self._head.logits, siblings)

    def _run(self, batch: Any, states_TD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        with self.cache.running(batch):
            return self._head.run(states_TD, ids_T, batch.positions_T)

    def _next(self, choice: Choice, hidden_RD: torch.Tensor) -> torch.Tensor:
        if choice.needs_logits:
            return choice.take(self._head.logits(hidden_RD))
        return choice.take_greedy(self._head.greedy(hidden_RD))

    def _find(self, target: Target) -> tuple[Path, str]:
        """The head's folder and format."""
        if self.options.head is not None:
            folder = Path(self.options.head).expanduser()
            if not folder.is_dir():
                raise UserError(f"spec.head={self.options.head}: there is no such folder.")
            return folder, self.options.format
        if target.name not in SHIPPED:
            guess = nearest(target.name, SHIPPED)
            hint = f" Did you mean model={guess}?" if guess else ""
            raise UserError(
                f"lab brings no draft head for '{target.name}', only for {', '.join(SHIPPED)}.{hint} "
                "Name one with spec.head=FOLDER; `lab train-draft` makes one."
            )
        folder, kind = SHIPPED[target.name]
        return HEADS / folder, kind
