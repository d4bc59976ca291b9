"""Asks the proposer for drafts, holds it to its contract, and keeps what verification will need of them."""

import time

import numpy as np
import torch

from lab.contracts.draft_length import DraftLength, Verified
from lab.contracts.spec import Draft, Proposer, ProposeView, StepView
from lab.errors import PluginFault
from lab.kv.store import KVStore
from lab.runner.batch import Batch, Share
from lab.runner.draft_cache import RowsDraftCache, scratch_positions
from lab.runner.rows import Rows
from lab.sample.sampler import Sampler
from lab.sample.tree import Tree
from lab.types import NewRow

NO_LIMIT = np.iinfo(np.int64).max


class Drafting:
    """Drafts of the live rows: their tokens go into the rows, the distributions they were drawn from are kept here.

    Without a `length` every row may have as many as the proposer makes. `sampler` knows the rows' temperatures and seeds;
    without it every row counts as greedy.
    """

    def __init__(
        self,
        proposer: Proposer,
        rows: Rows,
        vocab_size: int,
        length: DraftLength | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self._proposer = proposer
        self._rows = rows
        self._vocab_size = vocab_size
        self._length = length
        self._sampler = sampler
        self._most_R = np.full(len(rows.lengths_R), NO_LIMIT)  # what each row's request allows
        self._probs: dict[int, torch.Tensor] = {}  # row -> SV, for the drafts that were not one-hot
        self._dry: dict[int, list[int]] = {}  # row -> drafts that nobody verifies, to be compared with the next token
        self._num_asked = 0
        self._draft_ms = 0.0
        self._shown_ms = 0.0  # of `draft_ms`, what the proposer took to see the step

    @property
    def num_drafts(self) -> int:
        return self._proposer.num_drafts

    def start(self, row: int, new: NewRow) -> None:
        """A request begins in this row, or resumes there."""
        if not self.num_drafts:
            return
        self._most_R[row] = NO_LIMIT if new.params.max_drafts is None else new.params.max_drafts
        self._proposer.start(row, new)
        if self._length is not None:
            self._length.start(row)

    def forget(self, row: int) -> None:
        """The row's request is gone."""
        self._probs.pop(row, None)
        self._dry.pop(row, None)
        if self.num_drafts:
            self._proposer.end(row, self._rows.tokens_RC[row, : self._rows.lengths_R[row]])

    def observe(self, shares: list[Share], token_ids: list[list[int]], ms: float) -> None:
        """Tell the draft length what a step did, before the next drafts are proposed.

        Args:
            shares: all of the step's.
            token_ids: what each share that samples got, in their order.
            ms: what the step has taken.
        """
        sampling = [share for share in shares if share.samples]
        if self._length is None or not self.num_drafts or not sampling:
            return
        offered, accepted = [], []
        for share, new_ids in zip(sampling, token_ids, strict=True):
            dry = self._dry.pop(share.row, None)
            is_dry = dry is not None and not share.num_drafts
            offered.append(1 if is_dry else share.draft_depth)
            accepted.append(int(new_ids[0] in dry) if is_dry else len(new_ids) - 1)
        self._length.observe(
            Verified(
                rows_R=np.array([share.row for share in sampling]),
                offered_R=np.array(offered),
                accepted_R=np.array(accepted),
                num_tokens=sum(share.num_tokens for share in shares),
                ms=ms,
                is_decode=all(share.samples and share.num_tokens == 1 + share.num_drafts for share in shares),
                num_asked=self._num_asked,
                draft_ms=self._draft_ms,
            )
        )

    @property
    def observes(self) -> bool:
        """Whether the proposer wants to see every step."""
        return self._proposer.observes

    def attach(self, store: KVStore, block_size: int, max_model_len: int, device: torch.device) -> None:
        """Give the proposer the part of the pool that its own layers have."""
        if store.draft_layers:
            cache = RowsDraftCache(
                self._rows,
                store.draft_backends,
                store.draft_layers,
                block_size=block_size,
                num_blocks=store.num_blocks,
                num_scratch=scratch_positions(self._proposer),
                max_model_len=max_model_len,
                device=device,
            )
            self._proposer.attach(cache)

    def show(self, shares: list[Share], batch: Batch, hidden_TD: torch.Tensor, aux_ATD: torch.Tensor | None) -> None:
        """Show the proposer a step, once the rows have moved on."""
        begin = time.perf_counter()
        rows_R = np.array([share.row for share in shares])
        start_R = np.array([share.start for share in shares])
        kept_R = self._rows.num_computed_R[rows_R] - start_R
        self._proposer.observe(StepView(batch, hidden_TD, aux_ATD, self._rows.tokens_RC, rows_R, start_R, kept_R))
        self._shown_ms = (time.perf_counter() - begin) * 1e3

    def propose(self, row_ids: list[int], end_R: np.ndarray) -> dict[int, list[int]]:
        """Drafts for these rows' next step, by row; `end_R` is the length at which each row ends.

        Raises:
            PluginFault: the proposer broke its contract.
        """
        if not self.num_drafts or not row_ids:
            return {}
        rows_R = np.array(row_ids)
        lengths_R = self._rows.lengths_R[rows_R]
        limits_R, depths_R = self._room(end_R - lengths_R - 1, rows_R)
        dry_R = self._limit(rows_R, limits_R, depths_R)
        view = ProposeView(self._rows.tokens_RC, rows_R, lengths_R, limits_R, **self._chances(rows_R), depths_R=depths_R)
        begin = time.perf_counter()
        draft = self._proposer.propose(view)
        self._draft_ms = self._shown_ms + (time.perf_counter() - begin) * 1e3
        self._num_asked = int(np.count_nonzero(limits_R[~dry_R]))  # a dry one is shorter, and not what drafts take
        self._check(draft, limits_R.tolist())
        trees = self._trees(draft, depths_R)
        proposed = {}
        for index, (row, token_ids) in enumerate(zip(row_ids, draft.token_ids, strict=True)):
            if dry_R[index]:
                proposed[row] = []
                if token_ids:
                    self._dry[row] = token_ids
                continue
            proposed[row] = token_ids
            self._rows.set_drafts(row, token_ids, trees[index])
            if draft.probs_RSV is not None:
                self._probs[row] = draft.probs_RSV[index]
            else:
                self._probs.pop(row, None)
        return proposed

    def _room(self, room_R: np.ndarray, rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """How many drafts each row may have where its text can grow by so many tokens beside the one that follows drafts, and
        how deep a tree of them.
        """
        most_R = np.minimum(self._most_R[rows_R], self.num_drafts)
        depth = self._proposer.tree_depth
        room_R = np.maximum(room_R, 0)
        if not depth:
            return np.minimum(room_R, most_R), None
        depths_R = np.minimum(room_R, depth)
        return most_R * (depths_R > 0), depths_R

    def _chances(self, rows_R: np.ndarray) -> dict[str, np.ndarray | None]:
        """What rows that sample draw their drafts by; nothing where none does."""
        temperatures_R = None if self._sampler is None else self._sampler.temperatures(rows_R)
        if temperatures_R is None:
            return {}
        if depth := self._proposer.tree_depth:
            found = {"uniforms_RDS": self._sampler.tree_uniforms(rows_R, depth, self.num_drafts)}
        else:
            found = {"uniforms_RS": self._sampler.draft_uniforms(rows_R, self.num_drafts)}
        return {"temperatures_R": temperatures_R, **found}

    def _limit(self, rows_R: np.ndarray, limits_R: np.ndarray, depths_R: np.ndarray | None) -> np.ndarray:
        """Lower the limits to what the draft length allows. Returns which rows are tried dry: with one draft, or the first
        level of a tree.
        """
        dry_R = np.zeros(len(rows_R), bool)
        if self._length is None:
            return dry_R
        room_R = limits_R.copy()
        np.minimum(limits_R, self._length.lengths(rows_R), out=limits_R)
        wanted_R = self._length.dry_runs(rows_R)
        if wanted_R is not None:
            dry_R = wanted_R & (room_R > 0) & (limits_R == 0)
            first_level = 1 if depths_R is None else -(-self.num_drafts // self._proposer.tree_depth)
            limits_R[dry_R] = np.minimum(room_R, first_level)[dry_R]
            if depths_R is not None:
                depths_R[dry_R] = 1
        return dry_R

    def probs(self, shares: list[Share]) -> torch.Tensor | None:
        """The distributions of the drafts that these shares verify, RSV padded with zeros; None when all are one-hot."""
        longest = max(share.num_drafts for share in shares)
        if not longest or not self._probs:
            return None
        example = next(iter(self._probs.values()))
        probs_RSV = example.new_zeros(len(shares), longest, self._vocab_size)
        for index, share in enumerate(shares):
            num = share.num_drafts
            if num and share.row in self._probs:
                probs_RSV[index, :num] = self._probs[share.row][:num]
            elif num:  # one-hot, proposed in another step than those beside it
                probs_RSV[index, range(num), self._rows.drafts(share.row, num)] = 1.0
        return probs_RSV

    def _trees(self, draft: Draft, depths_R: np.ndarray | None) -> list[Tree | None]:
        """The trees that the rows' drafts are, None where they are a chain."""
        if draft.parents is None:
            return [None] * len(draft.token_ids)
        name = f"spec plugin '{self._proposer.name}'"
        if depths_R is None:
            raise PluginFault(f"{name} proposed a tree, and its tree_depth is 0.")
        if len(draft.parents) != len(draft.token_ids):
            raise PluginFault(f"{name} gave parents for {len(draft.parents)} rows of {len(draft.token_ids)}.")
        trees: list[Tree | None] = []
        for row, (parents, token_ids) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
            if len(parents) != len(token_ids):
                raise PluginFault(
                    f"{name} gave {len(parents)} parents for the {len(token_ids)} drafts of row {row} of its view."
                )
            try:
                tree = Tree.of(parents)
            except ValueError as error:
                raise PluginFault(f"{name}, row {row} of its view: {error}.") from None
            if tree.depth > depths_R[row]:
                raise PluginFault(
                    f"{name} proposed a tree of depth {tree.depth} for row {row}, which may be {depths_R[row]} deep."
                )
            trees.append(tree if token_ids and not tree.is_chain else None)
        return trees

    def _check(self, draft: Draft, limits: list[int]) -> None:
        name = f"spec plugin '{self._proposer.name}'"
        if len(draft.token_ids) != len(limits):
            raise PluginFault(f"{name} proposed for {len(draft.token_ids)} rows of {len(limits)}.")
        for row, (token_ids, limit) in enumerate(zip(draft.token_ids, limits, strict=True)):
            if len(token_ids) > limit:
                raise PluginFault(f"{name} proposed {len(token_ids)} drafts for row {row} of its view, whose limit is {limit}.")
            for token in token_ids:
                if not 0 <= token < self._vocab_size:
                    known = f"the vocabulary has 0 to {self._vocab_size - 1}"
                    raise PluginFault(f"{name} proposed token id {token} for row {row} of its view; {known}.")
        if draft.probs_RSV is not None:
            longest = max(map(len, draft.token_ids), default=0)
            shape = tuple(draft.probs_RSV.shape)
            if len(shape) != 3 or shape[0] != len(limits) or shape[1] < longest or shape[2] != self._vocab_size:
                raise PluginFault(
                    f"{name} gave probabilities of the shape {shape} for {len(limits)} rows, up to {longest} drafts and "
                    f"{self._vocab_size} tokens."
                )
