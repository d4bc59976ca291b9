"""The contract of a draft proposer. A proposer can change speed, never the output: the core verifies."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lab.capabilities import Capabilities

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class ProposeView:
    """What a proposer sees after a step's verification: the rows that sampled and may take drafts.

    tokens_RC are the host rows of token history (capacity C wide, only the first lengths_R entries are tokens);
    limits_R is the largest number of drafts each row may get (context and length limits).
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
    """Proposes draft tokens for the next step."""

    kind: ClassVar[str]
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()
    num_drafts: int  # the most it ever proposes for a row; lookahead slots are kept for so many

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def propose(self, view: ProposeView) -> Draft:
        """Drafts for every row of the view; an empty list where there is nothing worth proposing."""
