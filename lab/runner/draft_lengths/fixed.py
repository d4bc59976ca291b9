"""As many drafts as the proposer makes, whatever becomes of them."""

import numpy as np

from lab.api import Capabilities, DraftLength, register


@register("draft_length", "fixed")
class Fixed(DraftLength):
    """Always as many as the proposer makes: what studies of a proposer want."""

    capabilities = Capabilities()

    def lengths(self, rows_R: np.ndarray) -> np.ndarray:
        return np.full(len(rows_R), self.num_drafts, np.int64)
