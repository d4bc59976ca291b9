"""The contract of a draft proposer. A proposer can change speed, never the output: the core verifies.

A proposer that works on the text alone has `propose` and nothing else. One with a model of its own is bound to its target,
names its attention layers, whose keys and values then lie in the target's pool under the same block tables, and sees every
step that the target ran. In the order of the calls:

    bind(target)             once, before the pool is sized: load weights, refuse a target that they do not fit
    attention_layers, aux_layers, lookahead     read once, after bind
    attach(cache)            the pool is there (and again when a trial pool gives way to the real one)
    observe(step)            after each step, before propose, if the class has `observes`
    propose(view)            the drafts of the rows that sampled in that step
"""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

from lab.contracts.plugin import Plugin

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

    from lab.model.config import ModelConfig
    from lab.model.layers.attention import AttentionLayer
    from lab.runner.batch import Batch
    from lab.types import NewRow


class Target(Protocol):
    """The model that drafts are for, as a proposer sees it, and what its own layers are loaded with.

    `max_rows` and `max_model_len` are the sizes that state kept for each row must have.
    """

    name: str  # as model.path has it
    config: "ModelConfig"
    dtype: "torch.dtype"
    device: "torch.device"
    max_rows: int
    max_model_len: int

    def embed(self, ids_T: "torch.Tensor") -> "torch.Tensor":
        """The target's embeddings of these tokens: TD."""

    def logits(self, hidden_LD: "torch.Tensor") -> "torch.Tensor":
        """logits_LV in float32, by the target's head, of hidden states after its final norm."""

    def greedy(self, hidden_LD: "torch.Tensor") -> "torch.Tensor":
        """ids_L of the largest of `logits`."""

    def tree_obstacle(self, depth: int) -> str | None:
        """Why this run cannot verify trees of drafts so deep, for who can do without; None when it can."""

    def load_head(self, folder: Path, kind: str) -> "nn.Module":
        """A draft head in a published format, in the target's dtype on its device: see lab.model.heads.

        Raises UserError when it is none, or is made for another target, with the sizes that differ.
        """

    def load_mtp(self, folder: Path | None) -> "nn.Module":
        """The multi-token-prediction module in `folder`, None: in the target's own checkpoint; see lab.model.mtp_head.

        Raises UserError when there is none, or it is made for another target.
        """

    def load_model(self, path: str) -> "nn.Module":
        """Another model by model.path's rules, in the target's dtype on its device, with its own attention layers.

        Raises UserError when its vocabulary is not the target's, or it takes fewer positions.
        """


class DraftCache(Protocol):
    """Keys and values of a proposer's own layers, in blocks that the target's block tables name.

    Slot p of a row belongs to its position p, as in the target's layers. Positions for which the row has no block yet lie in
    scratch blocks of the row, which are good for one `propose`: enough for the proposer's `num_scratch` positions.
    """

    def running(self, batch: "Batch") -> AbstractContextManager[None]:
        """Where the layers may be called for this batch: a step's own, or one of `batch`, `chain` and `level`."""

    def batch(self, rows_R: "np.ndarray", start_R: "np.ndarray", ids: "Sequence[np.ndarray]") -> "Batch":
        """A batch of these tokens for each row, the first at position start_R."""

    def chain(self, rows_R: "np.ndarray", start_R: "np.ndarray", num: int) -> "list[Batch]":
        """`num` batches of one token a row, at positions start_R, start_R + 1, ...; their input_ids_T are not set."""

    def level(self, rows_R: "np.ndarray", start_R: "np.ndarray", depth: int, first: int, ancestors_RF: "np.ndarray") -> "Batch":
        """A batch of F tokens a row, nodes `first` .. first + F - 1 of a tree whose node i lies in slot start_R + i; its
        input_ids_T are not set.

        They all stand at position start_R + depth - 1, and see what lies before start_R and the nodes in ancestors_RF (bits,
        int64: bit i is node i, their own included).
        """


@dataclass(frozen=True, slots=True)
class StepView:
    """A step that the target ran, and how much of it stands. Rows are those of the batch, sampling or not.

    Of row r the positions start_R .. start_R + num_kept_R - 1 are of known tokens; what the batch has after them were
    drafts that were rejected. The token after the last kept position is known too: sampled, or the prompt's next. Of a step
    with trees of drafts only what stands is shown, in the order of the text.
    """

    batch: "Batch"
    hidden_TD: "torch.Tensor"  # after the final norm, as the target's head gets it
    aux_ATD: "torch.Tensor | None"  # what entered each of the proposer's aux_layers; None when it has none
    tokens_RC: "np.ndarray"  # int32, a view of the persistent rows: index it with rows_R
    rows_R: "np.ndarray"
    start_R: "np.ndarray"
    num_kept_R: "np.ndarray"


@dataclass(frozen=True, slots=True)
class ProposeView:
    """What a proposer sees after a step's verification: the rows that sampled and may take drafts.

    tokens_RC are the host rows of token history (capacity C wide, only the first lengths_R entries are tokens);
    limits_R is the largest number of drafts each row may get: by context and length limits, by the run's draft length and the
    request's own. A row's limit may be 0 in one step and more in the next.

    A proposer that draws its drafts draws them by the request's own uniforms: then they do not depend on the rows beside it.
    Those of a tree take uniforms_RDS, at each depth one for each draft there, in an order that the tree's shape alone decides.
    """

    tokens_RC: "np.ndarray"  # int32, a view of the persistent rows: index it with rows_R
    rows_R: "np.ndarray"
    lengths_R: "np.ndarray"
    limits_R: "np.ndarray"
    temperatures_R: "np.ndarray | None" = None  # float64; 0 is greedy. None: all are
    uniforms_RS: "np.ndarray | None" = None  # float64 in [0, 1), one for each draft; None with temperatures_R
    depths_R: "np.ndarray | None" = None  # how deep each row's tree may be; None for a proposer of chains
    uniforms_RDS: "np.ndarray | None" = None  # as uniforms_RS, in whose place it stands for a proposer of trees


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations, one list a row (of at most the row's limit). probs_RSV None: each draft is one-hot.

    With `parents` a row's drafts are a tree: for each the place of the draft that it follows in its row's list, which must be
    an earlier one, or -1 for the row's last token. Of a row's list the first so many may be verified alone, so the likeliest
    should come first. Siblings are tried in their order. If drafts were drawn, probs_RSV has for each the distribution that it
    was drawn from, given its earlier siblings: all from one, or each from what its earlier siblings left of it.
    """

    token_ids: list[list[int]]
    probs_RSV: "torch.Tensor | None" = None
    parents: list[list[int]] | None = None


class Proposer(Plugin):
    """Proposes draft tokens for the next step.

    `start` and `end` say whose text a row holds. One that looks at nothing but the view needs neither.
    """

    observes: ClassVar[bool] = False  # whether it wants `observe`
    num_drafts: int  # the most it ever proposes for a row; like tree_depth known from its options, before bind
    tree_depth: int = 0  # of the deepest tree that it proposes; 0: its drafts are chains
    tree_optional: bool = False  # bind drafts chains in their place where the run cannot verify trees (Target.tree_obstacle)
    num_scratch: int | None = None  # positions that its own layers need in one `propose`; None: num_drafts; after bind
    attention_layers: "Sequence[AttentionLayer]" = ()  # its own, numbered from 0; after bind
    aux_layers: Sequence[int] = ()  # of the target: what enters these is passed to `observe`; after bind
    model_path: str | None = None  # of a model that it will have Target.load_model load; before bind, for the core to look at
    lookahead: int = 0  # what its layers keep for a position may depend on so many tokens after it; the prefix cache must know

    def start(self, row: int, request: "NewRow") -> None:  # noqa: B027 - most have nothing to note
        """A request begins in this row, or resumes there after a preemption with the output that it has."""

    def end(self, row: int, tokens: "np.ndarray") -> None:  # noqa: B027 - most have nothing to forget
        """The row's request is gone: it ended, or was preempted. `tokens` are its prompt and output, a view of the row."""

    def check_target(self, name: str) -> None:  # noqa: B027 - most need nothing beside the target
        """Raise UserError where what is needed for the target of this name, as model.path has it, is not there.

        Called before the target's weights are read; `bind` would say the same much later.
        """

    def bind(self, target: Target) -> None:
        """Take the target, and load what is needed for it. Raises UserError when they do not fit."""
        self.target = target

    def attach(self, cache: DraftCache) -> None:
        """Take the cache of the proposer's own attention layers."""
        self.cache = cache

    def observe(self, step: StepView) -> None:
        """See what the target computed in a step; only of a class that `observes`."""
        raise AssertionError(f"spec plugin '{self.name}' says that it observes, and has no observe")

    @abstractmethod
    def propose(self, view: ProposeView) -> Draft:
        """Drafts for every row of the view; an empty list where there is nothing worth proposing."""
