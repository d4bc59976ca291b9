"""The contract of a draft proposer. A proposer can change speed, never the output: the core verifies."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lab.capabilities import Capabilities

if TYPE_CHECKING:
    import numpy as np
    import torch

    from lab.types import NewRow


@dataclass(frozen=True, slots=True)
class ProposeView:
    """What a proposer sees after a step's verification: the rows that sampled and may take drafts.

    tokens_RC are the host rows of token history (capacity C wide, only the first lengths_R entries are tokens);
    limits_R is the largest number of drafts each row may get: by context and length limits, by the run's draft length and the
    request's own. A row's limit may be 0 in one step and more in the next.
    """

    tokens_RC: "np.ndarray"  # int32, a view of the persistent rows: index it with rows_R
    rows_R: "np.ndarray"
    lengths_R: "np.ndarray"
    limits_R: "np.ndarray"


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed continuations, one list a row (of at most the row's limit). probs_RSV None: each draft is one-hot."""

    token_ids: list[list[int]]
    probs_RSV: "torch.Tensor | None" = None


class Proposer(ABC):
    """Proposes draft tokens for the next step.

    `start` and `end` say whose text a row holds. One that looks at nothing but the view needs neither.
    """

    kind: ClassVar[str]
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()
    num_drafts: int  # the most it ever proposes for a row; lookahead slots are kept for so many

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, options: Any) -> None:
        self.options = options

    def start(self, row: int, request: "NewRow") -> None:  # noqa: B027 - most have nothing to note
        """A request begins in this row, or resumes there after a preemption with the output that it has."""

    def end(self, row: int, tokens: "np.ndarray") -> None:  # noqa: B027 - most have nothing to forget
        """The row's request is gone: it ended, or was preempted. `tokens` are its prompt and output, a view of the row."""

    @abstractmethod
    def propose(self, view: ProposeView) -> Draft:
        """Drafts for every row of the view; an empty list where there is nothing worth proposing."""
