"""What becomes of a step's trees of drafts once they are verified: the accepted path takes the place of a chain.

A path is the accepted nodes of a row's tree, in the order of the text. Rows here have not moved on yet.
"""

import numpy as np
import torch

from lab.contracts.attention import Attention
from lab.kv.store import KVStore
from lab.runner.batch import Share
from lab.runner.rows import Rows

Paths = dict[int, list[int]]  # by row, of the rows that have a tree


class PathMover:
    """Moves the keys and values of accepted paths to the slots that their tokens have in the text."""

    def __init__(self, rows: Rows, backends: list[Attention], group_of: tuple[int, ...], block_size: int) -> None:
        self._rows = rows
        self._layers = list(zip(backends, group_of, strict=True))
        self._block_size = block_size

    def move(self, shares: list[Share], paths: Paths, store: KVStore) -> None:
        """In every layer; nothing where a path is the tree's first nodes, which lie right already."""
        rows, from_places, to_places = [], [], []
        for share in shares:
            first = share.start + share.num_tokens - share.num_drafts
            for depth, node in enumerate(paths.get(share.row, ())):
                if node != depth:
                    rows.append(share.row)
                    from_places.append(first + node)
                    to_places.append(first + depth)
        if not rows:
            return
        device = store.layers[0].device
        slots = [
            tuple(torch.from_numpy(self._slots(table, rows, places)).to(device) for places in (from_places, to_places))
            for table in self._rows.tables
        ]
        for (backend, group), kv in zip(self._layers, store.layers, strict=True):
            backend.move(kv, *slots[group])

    def _slots(self, table_RM: np.ndarray, rows: list[int], places: list[int]) -> np.ndarray:
        number_X, offset_X = np.divmod(np.array(places), self._block_size)
        return table_RM[rows, number_X].astype(np.int64) * self._block_size + offset_X


def kept_tokens(shares: list[Share], paths: Paths, num_kept: list[int]) -> tuple[list[Share], np.ndarray]:
    """A step with trees as it would have been without what was rejected.

    Args:
        num_kept: tokens of each share that stand.

    Returns:
        The shares, and which of the step's tokens are theirs.
    """
    kept, index, begin = [], [], 0
    for share, count in zip(shares, num_kept, strict=True):
        num_known = share.num_tokens - share.num_drafts
        path = paths.get(share.row, range(count - num_known))
        index += range(begin, begin + num_known)
        index += [begin + num_known + node for node in path]
        kept.append(Share(share.row, share.start, count, 0, share.samples))
        begin += share.num_tokens
    return kept, np.array(index)
