"""Persistent rows: what the runner remembers of each running request between steps."""

import numpy as np

from lab.sample.tree import Tree
from lab.types import Chunk, NewRow


class Rows:
    """Token history, block tables and progress, one row for each running request. A row keeps its place while it lives.

    tokens_RC holds prompt and output; drafts for the next step stand right after them, so that one gather serves both. Those
    of a tree stand there node by node; `tree` says what it looks like.
    tables holds a block table blocks_RM for each KV group; where a group keeps nothing its entry is of any block.
    The host arrays are the truth; `Batch` tensors are copies made for one step.
    """

    def __init__(self, max_rows: int, max_len: int, block_size: int, num_groups: int = 1) -> None:
        self.tokens_RC = np.zeros((max_rows, max_len), np.int32)
        self.tables = [np.zeros((max_rows, -(-max_len // block_size)), np.int32) for _ in range(num_groups)]
        self.lengths_R = np.zeros(max_rows, np.int64)  # known tokens, drafts not counted
        self.num_computed_R = np.zeros(max_rows, np.int64)
        self.num_prompt_R = np.zeros(max_rows, np.int64)
        self.num_drafts_R = np.zeros(max_rows, np.int64)
        self._trees: dict[int, Tree] = {}  # of the rows whose drafts are one
        self._num_blocks = [0] * max_rows
        self._free = list(range(max_rows - 1, -1, -1))
        self._row_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._row_of)

    def __getitem__(self, request_id: str) -> int:
        return self._row_of[request_id]

    @property
    def blocks_RM(self) -> np.ndarray:
        """The block table of the first group, which with one group is all there is."""
        return self.tables[0]

    def add(self, new: NewRow) -> int:
        """Give a request a row and fill it."""
        row = self._free.pop()
        self._row_of[new.request_id] = row
        self.tokens_RC[row, : len(new.token_ids)] = new.token_ids
        self.lengths_R[row] = len(new.token_ids)
        self.num_computed_R[row] = new.num_computed
        self.num_prompt_R[row] = new.num_prompt
        self.num_drafts_R[row] = 0
        self._trees.pop(row, None)
        self._num_blocks[row] = 0
        self._append_blocks(row, [max(block_id, 0) for block_id in new.block_ids])
        return row

    def free(self, request_id: str) -> int | None:
        """Take a request's row back; None if it never had one."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def clear(self) -> list[int]:
        """Take every row back. Returns those that were in use."""
        rows = list(self._row_of.values())
        self._free += rows
        self._row_of.clear()
        return rows

    def apply(self, chunk: Chunk) -> int:
        """Take in what the scheduler sends with a chunk: new blocks, and under synchronous scheduling how many of the row's
        drafts stand, the first ones.
        """
        row = self._row_of[chunk.request_id]
        if chunk.new_block_ids:
            self._append_blocks(row, chunk.new_block_ids)
        if chunk.draft_ids:
            self.set_drafts(row, chunk.draft_ids, self._trees.get(row))
        return row

    def num_blocks(self, row: int) -> int:
        """How many blocks the row has."""
        return self._num_blocks[row]

    def set_drafts(self, row: int, draft_ids: list[int], tree: Tree | None = None) -> None:
        """Drafts for the row's next step: a chain, or the first nodes of a tree."""
        length = int(self.lengths_R[row])
        self.tokens_RC[row, length : length + len(draft_ids)] = draft_ids
        self.num_drafts_R[row] = len(draft_ids)
        if tree is not None:
            self._trees[row] = tree
        elif self._trees:
            self._trees.pop(row, None)

    def drafts(self, row: int, count: int) -> list[int]:
        """The first `count` drafts of a row."""
        length = int(self.lengths_R[row])
        return self.tokens_RC[row, length : length + count].tolist()

    def tree(self, row: int, count: int) -> Tree | None:
        """The tree that the first `count` drafts of a row are; None of a chain."""
        tree = self._trees.get(row) if self._trees else None
        return None if tree is None or not count else tree.first(count)

    def append(self, row: int, token_ids: list[int]) -> None:
        """Add sampled tokens; the drafts they came from are used up."""
        length = int(self.lengths_R[row])
        self.tokens_RC[row, length : length + len(token_ids)] = token_ids
        self.lengths_R[row] = length + len(token_ids)
        self.num_drafts_R[row] = 0
        if self._trees:
            self._trees.pop(row, None)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        """`block_ids`: those of all groups side by side."""
        have, width = self._num_blocks[row], len(self.tables)
        end = have + len(block_ids) // width
        for group, blocks_RM in enumerate(self.tables):
            blocks_RM[row, have:end] = block_ids[group::width]
        self._num_blocks[row] = end
