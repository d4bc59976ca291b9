"""EAGLE: a draft head of one decoder layer goes on from the target's own hidden states.

Heads of EAGLE-1, 2 and 3 in their published formats, that draft chains or trees (`_eagle_tree`). The head's entry j, made of
hidden state j and token j + 1, lies in slot j of its layer's cache. After each step the head runs once over the tokens of the
step, prompts included, with the true hidden states; then it drafts by itself, one token or one level of a tree after another.
What it stored on its own account is made anew once the tokens are verified.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lab.api import Capabilities, Draft, DraftCache, Proposer, ProposeView, StepView, Target, UserError, nearest, register

from ._bits import keeping_bits
from ._chain import Choice, LastStates, next_ids
from ._eagle_tree import DynamicTree, Levels, num_nodes, propose_static, tree_of
from ._options import check_whole, head_folder
from ._siblings import Siblings
from ._tree import StaticTree, check_ranks
from ._waiting import Waiting

log = logging.getLogger("lab")

DEFAULT_CHAIN = 4
HEADS = Path(__file__).parent / "heads"
CONFIG = "config.json"  # which a head of either format has
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
        num_drafts: int | None = (
            None  # tokens proposed for a row and step; null: 4 in a chain, 12 in a dynamic tree, 8 in a static one
        )
        draw: bool = True  # for requests that sample: draw drafts from the head's distribution; false: its most likely tokens
        # none: a chain; dynamic: EAGLE-2's tree, by the head's confidence; auto: that where attention verifies trees and
        # num_drafts is null, else a chain
        tree: Literal["auto", "none", "dynamic", "static"] = "auto"
        depth: int | None = None  # of a tree: tokens of its longest path; the head is run once for each; null: 2, static 3
        top_k: int | None = None  # dynamic: paths gone on with at each depth, and tokens tried after each; null: 8
        choices: list[list[int]] | None = None  # static: its paths, as ranks: [0, 2] is the third likeliest after the likeliest

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if options.head is not None:
            head_folder(options.head, CONFIG)  # before the model is loaded
        self.tree_optional = options.tree == "auto"
        self._take_shape(tree_of(options))
        self._last = LastStates()  # of the head's results
        self._waiting = Waiting()
        self._is_idle = False  # nobody asked for drafts after the step before

    @classmethod
    def capabilities_with(cls, options: Options) -> Capabilities:
        return keeping_bits(cls.capabilities, options)

    def _take_shape(self, tree: DynamicTree | StaticTree | None) -> None:
        """Draft this tree, or a chain."""
        self._tree = tree
        if tree is not None:
            self.num_drafts, self.tree_depth = num_nodes(self.options, tree), tree.depth
            self.num_scratch = max(tree.num_entries, 1)
            return
        asked = self.options.num_drafts
        self.num_drafts, self.tree_depth, self.num_scratch = DEFAULT_CHAIN if asked is None else asked, 0, None
        check_whole("num_drafts", self.num_drafts)

    def check_target(self, name: str) -> None:
        self._find(name)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if self.tree_optional and self._tree is not None and (obstacle := target.tree_obstacle(self.tree_depth)):
            log.info("spec.tree=auto: drafts are chains, not trees: %s", obstacle)
            self._take_shape(None)
        if self.num_drafts >= target.max_model_len:
            raise UserError(f"spec.num_drafts {self.num_drafts}: contexts have at most {target.max_model_len} tokens.")
        folder, kind = self._find(target.name)
        self._head = target.load_head(folder, kind)
        if isinstance(self._tree, StaticTree):
            draft_ids = self._head.draft_ids
            check_ranks(self._tree, target.config.vocab_size if draft_ids is None else len(draft_ids))
        self.attention_layers = self._head.attention_layers
        self.aux_layers = self._head.aux_layers

    def attach(self, cache: DraftCache) -> None:
        super().attach(cache)
        self._waiting = Waiting()

    def end(self, row: int, tokens: np.ndarray) -> None:
        if row in self._waiting:  # what the row's blocks should hold may serve others as a prefix
            self._catch_up()

    def observe(self, step: StepView) -> None:
        """Run the head over the step; while no drafts are wanted, over several steps at once."""
        if self._waiting and not (self._is_idle and self._waiting.has_room(step)):
            self._catch_up()
        if self._is_idle and self._waiting.has_room(step):
            self._waiting.add(step)
            return
        states_TD = self._head.states(step.hidden_TD, step.aux_ATD)
        ids_T = torch.from_numpy(next_ids(step)).to(self.target.device)
        self._last.keep_kept(step, self._run(step.batch, states_TD, ids_T))

    @torch.inference_mode()
    def _catch_up(self) -> None:
        rows_R, start_R, ids, hidden_TD, aux_ATD = self._waiting.take()
        batch = self.cache.batch(rows_R, start_R, ids)
        out_TD = self._run(batch, self._head.states(hidden_TD, aux_ATD), batch.input_ids_T)
        self._last.keep(rows_R, out_TD, batch.q_start_R1_cpu[1:] - 1)

    def propose(self, view: ProposeView) -> Draft:
        self._is_idle = not view.limits_R.any()
        if self._is_idle:
            return Draft([[] for _ in view.rows_R])
        if self._waiting:
            self._catch_up()
        if self._tree is not None:
            return self._propose_tree(view)
        num = min(self.num_drafts, int(view.limits_R.max(initial=0)))
        choice = Choice(view, num, self.target.config.vocab_size, self.target.device, self.options.draw, self._head.draft_ids)
        hidden_RD = self._last.of(view.rows_R)
        ids_R = choice.choose(self._head, hidden_RD)
        for batch in self.cache.chain(view.rows_R, view.lengths_R - 1, num - 1):
            with self.cache.running(batch):
                hidden_RD = self._head.run(hidden_RD, ids_R, batch.positions_T)
            ids_R = choice.choose(self._head, hidden_RD)
        return choice.draft()

    def _propose_tree(self, view: ProposeView) -> Draft:
        levels = Levels(self.cache, view, self._run, self._last.of(view.rows_R))
        if isinstance(self._tree, DynamicTree):
            return self._tree.propose(view, levels, self._head.top)
        vocab_size, device = self.target.config.vocab_size, self.target.device
        siblings = Siblings(self._tree, view, vocab_size, device, self.options.draw, self._head.draft_ids)
        return propose_static(self._tree, view, levels, self._head.logits, siblings)

    def _run(self, batch: Any, states_TD: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        with self.cache.running(batch):
            return self._head.run(states_TD, ids_T, batch.positions_T)

    def _find(self, target: str) -> tuple[Path, str]:
        """The folder and format of the head for the target of this name."""
        if self.options.head is not None:
            return head_folder(self.options.head, CONFIG), self.options.format
        if target not in SHIPPED:
            guess = nearest(target, SHIPPED)
            hint = f" Did you mean model={guess}?" if guess else ""
            raise UserError(
                f"lab brings no draft head for '{target}', only for {', '.join(SHIPPED)}.{hint} "
                "Name one with spec.head=FOLDER; `lab train-draft` makes one."
            )
        folder, kind = SHIPPED[target]
        return HEADS / folder, kind
