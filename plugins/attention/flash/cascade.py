"""Cascade attention: keys that several rows begin with are attended to once for all of these rows' queries.

Rows share keys where their block tables begin with the same blocks, as prefix caching makes them. Such keys lie before all of
the rows' queries, so nothing of them is masked. Each query's result is then merged from its parts, of the shared keys and of
the row's own, by their logsumexp (as in https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

from collections.abc import Callable

import numpy as np

from lab.api import UserError, dataclass

AUTO, NEVER = -1, 0  # as in cpu/plan.h


def least_shared(cascade: int | str) -> int:
    """From how many tokens on rows share them, or AUTO (where it pays) or NEVER, for the option of that name."""
    if cascade in ("auto", "never"):
        return AUTO if cascade == "auto" else NEVER
    if isinstance(cascade, str) or cascade < 1:
        raise UserError(f"attention.cascade={cascade}: it takes auto, never, or a number of tokens from 1 on.")
    return cascade


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys key_first .. key_last - 1, which lie in the same blocks for all of these rows."""

    rows: np.ndarray
    key_first: int
    key_last: int


class PrefixSearch:
    """Finds the prefixes of a step: a tree, for some of the rows that share a prefix share more keys behind it.

    Rows are sorted by their first block, and only where that is the same are the others looked at. The kernels for the CPU have
    the same in cpu/prefixes.h.

    Args:
        blocks_RM: block tables.
        limits_R: the blocks that each row may share.
        pays: whether these rows are to share so many keys.
    """

    def __init__(
        self, blocks_RM: np.ndarray, limits_R: np.ndarray, block_size: int, pays: Callable[[np.ndarray, int], bool]
    ) -> None:
        self._blocks_RM, self._limits_R, self._block_size, self._pays = blocks_RM, limits_R, block_size, pays
        self.found: list[Prefix] = []  # each behind those that its rows share before it
        self._divide(np.arange(len(limits_R)), 0, 0)

    def _divide(self, rows: np.ndarray, depth: int, key_first: int) -> None:
        """Follow those rows that share the block at `depth` as well; keys from key_first on are in no prefix yet."""
        rows = rows[self._limits_R[rows] > depth]
        if len(rows) < 2:
            return
        block_of_rows = self._blocks_RM[rows, depth]
        order = np.argsort(block_of_rows, kind="stable")
        ends = np.flatnonzero(np.diff(block_of_rows[order])) + 1
        if len(ends) + 1 == len(rows):  # all differ
            return
        for same in np.split(rows[order], ends):
            if len(same) > 1:
                self._follow(same, depth + 1, key_first)

    def _follow(self, rows: np.ndarray, depth: int, key_first: int) -> None:
        """Rows that share the blocks before `depth`: as many more as all share, and what only some share behind it."""
        blocks_XM = self._blocks_RM[rows, depth : self._limits_R[rows].min()]
        differ = np.flatnonzero((blocks_XM != blocks_XM[0]).any(0))
        depth += int(differ[0]) if len(differ) else blocks_XM.shape[1]
        key_last = depth * self._block_size
        if key_last > key_first and self._pays(rows, key_last - key_first):
            self.found.append(Prefix(rows, key_first, key_last))
            key_first = key_last
        self._divide(rows, depth, key_first)
