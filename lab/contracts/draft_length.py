"""The contract of a draft length: how many drafts each row has verified. It changes the speed of a run, never its output."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.contracts.plugin import Plugin

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of a step: a row for each request that sampled in it.

    A draft is offered when it was verified, or when it was only proposed and compared with the token that came (`dry_runs`).
    """

    rows_R: "np.ndarray"  # their persistent rows
    offered_R: "np.ndarray"  # drafts of a chain, depths of a tree: as many as could be accepted
    accepted_R: "np.ndarray"
    num_tokens: int  # that the step computed, padding not counted
    ms: float  # that it took, proposing not counted
    is_decode: bool  # it computed nothing but these rows' next tokens and their drafts
    num_asked: int  # rows that drafts were proposed for, before the step
    draft_ms: float  # that proposing them took


class DraftLength(Plugin):
    """Decides before drafts are proposed how many each row may have, from what became of earlier ones."""

    tree_depth: int = 0  # of the trees that the proposer makes, set before the first call; 0: it makes chains

    def __init__(self, options: Any, num_drafts: int, max_rows: int) -> None:
        """`num_drafts` is the most that the proposer ever proposes for a row; rows are 0 to max_rows - 1."""
        super().__init__(options)
        self.num_drafts = num_drafts
        self.max_rows = max_rows

    def start(self, row: int) -> None:  # noqa: B027 - some look at no request
        """Another request has this row from now on."""

    def observe(self, step: Verified) -> None:  # noqa: B027 - some look at nothing
        """Take in what came of a step."""

    @abstractmethod
    def lengths(self, rows_R: "np.ndarray") -> "np.ndarray":
        """The most drafts for each of these rows in the next step: int64, 0 to num_drafts. Of a tree they are its nodes; the
        likeliest come first.
        """

    def dry_runs(self, rows_R: "np.ndarray") -> "np.ndarray | None":
        """For rows that get none: which of them (bool) have one proposed all the same, to be compared with what comes.

        That costs no more than proposing it, so a length can learn that drafts have become worth verifying. None: none.
        """
        return None
