"""From logits to tokens for all rows of a step: edits, verification of drafts, sampling, log-probabilities.

Each request's tokens depend on its own logits, parameters, history and seed alone: not on its row, on the requests beside
it, on how its tokens were spread over steps, or on preemptions. Random numbers are counted by output position
(lab/sample/randomness.py), the history is the sampler's own and is written as tokens come out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lab.sample.filters import Filters, probabilities, sample
from lab.sample.logprobs import token_logprobs
from lab.sample.ordering import first_argmax
from lab.sample.penalties import EditBatch, RowEdits
from lab.sample.randomness import Purpose, uniforms
from lab.sample.transfer import to_device
from lab.sample.tree import Tree
from lab.sample.verify import DrawnTree, accept, follow, rejection_targets, tree_targets
from lab.sampling_params import SamplingParams
from lab.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What came out, in the order of the rows asked for. `logprobs` is None when no row wants any."""

    token_ids: list[list[int]]  # accepted drafts and one more token
    logprobs: list[list[TokenLogprobs] | None] | None  # one per token, for the rows that want them
    paths: list[list[int]] | None = None  # which drafts were accepted, where any are a tree; None: the first ones


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which request and position each logit row stands for."""

    rows_L: np.ndarray  # the request's row
    offsets_L: np.ndarray  # drafts before it
    positions_L: np.ndarray  # index among the request's outputs
    starts: np.ndarray  # first logit row of each request

    def places(self, some: np.ndarray) -> np.ndarray:
        """Of each logit row its place among `some` of them, -1 where it is not there."""
        place_L = np.full(len(self.rows_L), -1)
        place_L[some] = np.arange(len(some))
        return place_L


class Sampler:
    """Keeps what each row needs for sampling, and chooses the tokens of a step."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, *, row_by_row: bool = False) -> None:
        """`row_by_row`: each row's logits are reduced by themselves, so that no bit depends on how many rows there are."""
        self._vocab_size = vocab_size
        self._device = device
        self._row_by_row = row_by_row
        self._seeds_R = np.zeros(max_rows, np.uint64)
        self._num_output_R = np.zeros(max_rows, np.int64)
        self._greedy_R = np.zeros(max_rows, bool)
        self._edited_R = np.zeros(max_rows, bool)
        self._num_logprobs_R = np.full(max_rows, -1, np.int64)
        self._filters = Filters(np.ones(max_rows), np.zeros(max_rows, np.int64), np.ones(max_rows), np.zeros(max_rows))
        self._edits: dict[int, RowEdits] = {}

    def add(
        self, row: int, params: SamplingParams, seed: int, eos_ids: frozenset[int], token_ids: list[int], num_prompt: int
    ) -> None:
        """A request begins in this row, or resumes there with the outputs token_ids[num_prompt:]."""
        self._seeds_R[row] = seed
        self._num_output_R[row] = len(token_ids) - num_prompt
        self._greedy_R[row] = params.greedy
        self._num_logprobs_R[row] = -1 if params.logprobs is None else params.logprobs
        filters = self._filters
        filters.temperature_W[row] = 1.0 if params.greedy else params.temperature
        filters.top_k_W[row], filters.top_p_W[row], filters.min_p_W[row] = params.top_k, params.top_p, params.min_p
        self._edited_R[row] = RowEdits.wanted(params)
        if self._edited_R[row]:
            self._edits[row] = RowEdits(params, eos_ids, token_ids, num_prompt, self._vocab_size)
        else:
            self._edits.pop(row, None)

    def remove(self, row: int) -> None:
        """The request of this row is gone; nothing happens when there is none."""
        self._edits.pop(row, None)

    def run(
        self,
        logits_LV: Tensor,
        rows: list[int],
        num_drafts: list[int],
        drafts: list[list[int]],
        draft_probs: Tensor | None = None,
        trees: Sequence[Tree | None] | None = None,
    ) -> SampleOutput:
        """Verify drafts and choose the next token of each row, and take the tokens into the rows' histories.

        Args:
            logits_LV: float32, request by request in the order of `rows`, 1 + num_drafts[i] logit rows each: the one after
                the last known token first, then one after each draft. They are left as they are.
            drafts: the draft tokens of each request.
            draft_probs: of shape len(rows) x at least max(num_drafts) x V, the distributions that the drafts were drawn
                from; None when each draft is a one-hot proposal.
            trees: of the requests whose drafts are a tree, None for a chain; None when all are chains.
        """
        layout = self._layout(rows, num_drafts, trees)
        assert logits_LV.shape == (len(layout.rows_L), self._vocab_size), f"logits of shape {tuple(logits_LV.shape)}"
        rows_R = np.asarray(rows, np.int64)
        if (self._greedy_R[rows_R] & ~self._edited_R[rows_R]).all():
            targets = first_argmax(logits_LV).tolist()
        else:
            targets = self._targets(logits_LV, layout, drafts, draft_probs, trees).tolist()
        token_ids, paths = _accepted(targets, num_drafts, drafts, trees)
        self._count(rows_R, token_ids)
        for index in np.flatnonzero(self._edited_R[rows_R]):
            self._edits[rows[index]].append(token_ids[index])
        return SampleOutput(token_ids, self._logprobs(logits_LV, rows_R, layout.starts, token_ids, paths), paths)

    def needs_logits(self, rows: list[int]) -> bool:
        """Whether these rows want more of their logits than which one is the largest."""
        rows_R = np.asarray(rows, np.int64)
        return bool((~self._greedy_R[rows_R] | self._edited_R[rows_R] | (self._num_logprobs_R[rows_R] >= 0)).any())

    def run_greedy(
        self,
        ids_L: Tensor,
        rows: list[int],
        num_drafts: list[int],
        drafts: list[list[int]],
        trees: Sequence[Tree | None] | None = None,
    ) -> SampleOutput:
        """As `run`, for rows that need no logits: ids_L are those of the largest logits, the lowest among equals."""
        assert not self.needs_logits(rows), "a row is to be sampled, edited or reported with log-probabilities"
        assert len(ids_L) == len(rows) + sum(num_drafts), f"{len(ids_L)} ids for {len(rows)} rows"
        token_ids, paths = _accepted(ids_L.tolist(), num_drafts, drafts, trees)
        self._count(np.asarray(rows, np.int64), token_ids)
        return SampleOutput(token_ids, None, paths)

    def prompt_logprobs(self, logits_XV: Tensor, next_ids: list[int], num: int) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that follow these prompt positions, each with `num` alternatives."""
        return token_logprobs(logits_XV, next_ids, [num] * len(next_ids), row_by_row=self._row_by_row)

    def temperatures(self, rows_R: np.ndarray) -> np.ndarray | None:
        """Those of these rows, 0 where they are greedy; None when all are."""
        greedy_R = self._greedy_R[rows_R]
        return None if greedy_R.all() else np.where(greedy_R, 0.0, self._filters.temperature_W[rows_R])

    def draft_uniforms(self, rows_R: np.ndarray, num_drafts: int) -> np.ndarray:
        """What the drafts of the rows' next so many positions are drawn by: RS."""
        positions_RS = self._num_output_R[rows_R, None] + np.arange(num_drafts)
        seeds_RS = np.broadcast_to(self._seeds_R[rows_R, None], positions_RS.shape)
        return uniforms(seeds_RS, positions_RS, Purpose.DRAFT)

    def tree_uniforms(self, rows_R: np.ndarray, depth: int, num_drafts: int) -> np.ndarray:
        """What the drafts of trees are drawn by, so many at each depth: RDS. Those of one output position are the same in each
        step that drafts it, which is right: until the token there is decided none of them has been looked at.
        """
        shape = len(rows_R), depth, num_drafts
        positions_RDS = np.broadcast_to(self._num_output_R[rows_R, None, None] + np.arange(depth)[:, None], shape)
        seeds_RDS = np.broadcast_to(self._seeds_R[rows_R, None, None], shape)
        return uniforms(seeds_RDS, positions_RDS, Purpose.DRAFT, np.broadcast_to(np.arange(num_drafts), shape))

    def _count(self, rows_R: np.ndarray, token_ids: list[list[int]]) -> None:
        self._num_output_R[rows_R] += np.fromiter(map(len, token_ids), np.int64, len(token_ids))

    def _layout(self, rows: list[int], num_drafts: list[int], trees: Sequence[Tree | None] | None) -> _Layout:
        sizes = np.asarray(num_drafts, np.int64) + 1
        starts = np.cumsum(sizes) - sizes
        rows_L = np.repeat(np.asarray(rows, np.int64), sizes)
        offsets_L = np.arange(len(rows_L)) - np.repeat(starts, sizes)
        for start, tree in zip(starts.tolist(), trees or (), strict=bool(trees)):
            if tree is not None:
                offsets_L[start + 1 : start + 1 + len(tree.depths)] = tree.depths
        return _Layout(rows_L, offsets_L, self._num_output_R[rows_L] + offsets_L, starts)

    def _targets(
        self,
        logits_LV: Tensor,
        layout: _Layout,
        drafts: list[list[int]],
        draft_probs: Tensor | None,
        trees: Sequence[Tree | None] | None,
    ) -> np.ndarray:
        """The token of each logit row, on the supposition that the drafts before it are right."""
        greedy_L, edited_L = self._greedy_R[layout.rows_L], self._edited_R[layout.rows_L]
        targets_L = np.empty(len(greedy_L), np.int64)
        if (greedy_L & ~edited_L).any():
            targets_L[:] = first_argmax(logits_LV).cpu().numpy()
        work = np.flatnonzero(~greedy_L | edited_L)
        x_WV = logits_LV if len(work) == len(greedy_L) else logits_LV[self._index(work)]
        if edited_L.any():
            x_WV = x_WV.clone() if x_WV is logits_LV else x_WV
            self._edit(x_WV, layout, drafts, work, trees or [None] * len(drafts))
        greedy_W = greedy_L[work]
        if greedy_W.any():
            targets_L[work] = first_argmax(x_WV).cpu().numpy()
        drawn = work[~greedy_W]
        if len(drawn):
            x_WV = x_WV[self._index(np.flatnonzero(~greedy_W))] if greedy_W.any() else x_WV
            filters = self._filters[layout.rows_L[drawn]]
            uniform_W = self._uniforms(layout, drawn, Purpose.SAMPLE)
            targets_L[drawn] = sample(x_WV, filters, uniform_W, row_by_row=self._row_by_row)
            if draft_probs is not None:
                self._reject(targets_L, x_WV, filters, drawn, layout, drafts, draft_probs, trees or [None] * len(drafts))
        return targets_L

    def _edit(
        self, x_WV: Tensor, layout: _Layout, drafts: list[list[int]], work: np.ndarray, trees: Sequence[Tree | None]
    ) -> None:
        """Apply the edits of all requests to their logit rows among `work`, in place."""
        place_L = layout.places(work)
        batch = EditBatch(self._vocab_size)
        for start, draft_ids, tree in zip(layout.starts.tolist(), drafts, trees, strict=True):
            row = int(layout.rows_L[start])
            if self._edited_R[row]:
                self._edits[row].add_to(batch, int(place_L[start]), int(self._num_output_R[row]), draft_ids, tree)
        batch.apply(x_WV)

    def _reject(
        self,
        targets_L: np.ndarray,
        x_WV: Tensor,
        filters: Filters,
        drawn: np.ndarray,
        layout: _Layout,
        drafts: list[list[int]],
        draft_probs: Tensor,
        trees: Sequence[Tree | None],
    ) -> None:
        """Put rejection-sampled targets in the place of those of draft rows."""
        if any(tree is not None for tree in trees):
            self._reject_trees(targets_L, x_WV, filters, drawn, layout, drafts, draft_probs, trees)
            drafts = [ids if tree is None else [-1] * len(ids) for ids, tree in zip(drafts, trees, strict=True)]
        drafts_L = np.array([token for draft_ids in drafts for token in (*draft_ids, -1)], np.int64)
        verified = np.flatnonzero(drafts_L[drawn] >= 0)
        if not len(verified):
            return
        rows_X = drawn[verified]
        requests_X = np.searchsorted(layout.starts, rows_X, side="right") - 1
        targets_L[rows_X] = rejection_targets(
            probabilities(x_WV[self._index(verified)], filters[verified]),
            draft_probs[self._index(requests_X), self._index(layout.offsets_L[rows_X])].float(),
            drafts_L[rows_X],
            self._uniforms(layout, rows_X, Purpose.ACCEPT),
            self._uniforms(layout, rows_X, Purpose.RECOVER),
        )

    def _reject_trees(
        self,
        targets_L: np.ndarray,
        x_WV: Tensor,
        filters: Filters,
        drawn: np.ndarray,
        layout: _Layout,
        drafts: list[list[int]],
        draft_probs: Tensor,
        trees: Sequence[Tree | None],
    ) -> None:
        """As `_reject`, for the requests whose drafts are trees."""
        place_L = layout.places(drawn)
        found, rows_L, requests = [], [], []
        for index, (start, tree, draft_ids) in enumerate(zip(layout.starts.tolist(), trees, drafts, strict=True)):
            if tree is not None and place_L[start] >= 0:
                found.append(DrawnTree(tree, draft_ids, len(rows_L), index))
                rows_L += range(start, start + 1 + len(draft_ids))
                requests.append(start)
        if not found:
            return
        starts_X, places = np.array(requests), place_L[rows_L]

        def draw(index: np.ndarray, depths: np.ndarray, turns: np.ndarray, purpose: Purpose) -> np.ndarray:
            starts = starts_X[index]
            return uniforms(self._seeds_R[layout.rows_L[starts]], layout.positions_L[starts] + depths, purpose, turns)

        target_LV = probabilities(x_WV[self._index(places)], filters[places])
        for place, token in tree_targets(target_LV, draft_probs, found, draw).items():
            targets_L[rows_L[place]] = token

    def _logprobs(
        self,
        logits_LV: Tensor,
        rows_R: np.ndarray,
        starts: np.ndarray,
        token_ids: list[list[int]],
        paths: list[list[int]] | None,
    ) -> list[list[TokenLogprobs] | None] | None:
        wanted = np.flatnonzero(self._num_logprobs_R[rows_R] >= 0).tolist()
        if not wanted:
            return None
        chosen = [token for request in wanted for token in token_ids[request]]
        lengths = [len(token_ids[request]) for request in wanted]
        places = [range(length) for length in lengths]
        if paths is not None:
            places = [(0, *(node + 1 for node in paths[request])) for request in wanted]
        index = np.concatenate([starts[request] + np.array(its) for request, its in zip(wanted, places, strict=True)])
        nums = np.repeat(self._num_logprobs_R[rows_R[wanted]], lengths).tolist()
        logits_XV = logits_LV if len(index) == len(logits_LV) else logits_LV[self._index(index)]
        entries = iter(token_logprobs(logits_XV, chosen, nums, row_by_row=self._row_by_row))
        found: list[list[TokenLogprobs] | None] = [None] * len(rows_R)
        for request, length in zip(wanted, lengths, strict=True):
            found[request] = [next(entries) for _ in range(length)]
        return found

    def _uniforms(self, layout: _Layout, logit_rows: np.ndarray, purpose: Purpose) -> np.ndarray:
        return uniforms(self._seeds_R[layout.rows_L[logit_rows]], layout.positions_L[logit_rows], purpose)

    def _index(self, index: np.ndarray) -> Tensor:
        return to_device(index, self._device)


def _accepted(
    targets: list[int], num_drafts: list[int], drafts: list[list[int]], trees: Sequence[Tree | None] | None
) -> tuple[list[list[int]], list[list[int]] | None]:
    """The tokens that each request puts out, and where there are trees which of its drafts they are."""
    if not trees or all(tree is None for tree in trees):
        return accept(targets, num_drafts, drafts), None
    token_ids, paths, first = [], [], 0
    for num, draft_ids, tree in zip(num_drafts, drafts, trees, strict=True):
        own = targets[first : first + num + 1]
        if tree is None:
            (ids,) = accept(own, [num], [draft_ids])
            path = list(range(len(ids) - 1))
        else:
            ids, path = follow(own, draft_ids, tree)
        token_ids.append(ids)
        paths.append(path)
        first += num + 1
    return token_ids, paths
