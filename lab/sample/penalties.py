"""Edits of logits that depend on a request: bias, penalties, banned and allowed tokens.

`RowEdits` holds what one request asks for and the history it is judged by; it exists only for requests that ask for
anything. In a step, each of a request's logit rows (row 0 follows the last known token, row 1 + i draft i and those on its way)
adds its edits to one `EditBatch` as plain indices, and the batch is applied to all rows with a handful of gathers and scatters:
the cost goes with the number of tokens edited, not with the vocabulary.

Bans come last here although they are documented as the first transform: minus infinity absorbs bias and penalties, so the
two orders agree, and no bias can then lift a ban. A ban is BANNED, not minus infinity: where bans leave none of the
allowed tokens, one of these is still chosen (the lowest id when greedy), and nothing becomes NaN.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lab.sample.transfer import to_device
from lab.sample.tree import ROOT, Tree
from lab.sampling_params import SamplingParams

BANNED = -1e30  # finite, and far below what bias and penalties can do
LARGEST_AMOUNT = 1e28  # bias and penalties are held within +-this, so that no sum of them overflows or meets infinity
FACTORS = (1e-6, 1e6)  # repetition penalties are held within these, for the same reason


class History:
    """The distinct tokens of a request: how often each was put out, and whether it was ever seen."""

    def __init__(self, seen_ids: list[int], output_ids: list[int]) -> None:
        distinct = np.unique(np.asarray(seen_ids + output_ids, np.int64))
        self._slot_of = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._num = len(distinct)
        self._ids = np.resize(distinct, max(64, 2 * self._num))
        self._counts = np.zeros(len(self._ids), np.float64)
        self._seen = np.zeros(len(self._ids), bool)
        self._seen[[self._slot_of[token] for token in set(seen_ids)]] = True
        self.append(output_ids)

    def append(self, token_ids: list[int]) -> None:
        """Count tokens as put out."""
        for token in token_ids:
            slot = self._slot(token)
            self._counts[slot] += 1
            self._seen[slot] = True

    def after(self, draft_ids: list[int], parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The history as each logit row sees it: row 0 without drafts, row 1 + i with draft i and those on its way counted as
        put out.

        Returns:
            token ids of shape X; counts (float64) and seen (bool) of shape (1 + number of drafts) x X.
        """
        slots = [self._slot(token) for token in draft_ids]
        counts = np.repeat(self._counts[None, : self._num], 1 + len(slots), 0)
        seen = np.repeat(self._seen[None, : self._num], 1 + len(slots), 0)
        for row, (slot, parent) in enumerate(zip(slots, parents, strict=True), 1):
            counts[row], seen[row] = counts[parent + 1], seen[parent + 1]
            counts[row, slot] += 1
            seen[row, slot] = True
        return self._ids[: self._num], counts, seen

    def _slot(self, token: int) -> int:
        slot = self._slot_of.get(token)
        if slot is None:
            slot = self._slot_of[token] = self._num
            if slot == len(self._ids):
                self._ids, self._counts, self._seen = (
                    np.concatenate([old, np.zeros_like(old)]) for old in (self._ids, self._counts, self._seen)
                )
            self._ids[slot] = token
            self._num += 1
        return slot


class EditBatch:
    """The edits of one step, gathered from its requests as positions in the flattened logits."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._bias: list[tuple[np.ndarray, np.ndarray]] = []
        self._penalties: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._banned: list[np.ndarray] = []
        self._allowed: list[np.ndarray] = []
        self._allowed_rows: list[np.ndarray] = []

    def bias(self, rows_X: np.ndarray, ids_Y: np.ndarray, values_Y: np.ndarray) -> None:
        self._bias.append((self._flat(rows_X, ids_Y), np.tile(values_Y, len(rows_X))))

    def penalise(self, rows_X: np.ndarray, ids_Y: np.ndarray, factors_XY: np.ndarray, amounts_XY: np.ndarray) -> None:
        """Divide positive logits by the factors and multiply negative ones, then subtract the amounts."""
        self._penalties.append((self._flat(rows_X, ids_Y), factors_XY.ravel(), amounts_XY.ravel()))

    def ban(self, rows_X: np.ndarray, ids_Y: np.ndarray) -> None:
        self._banned.append(self._flat(rows_X, ids_Y))

    def allow_only(self, rows_X: np.ndarray, ids_Y: np.ndarray) -> None:
        self._allowed.append(self._flat(rows_X, ids_Y))
        self._allowed_rows.append(rows_X)

    def apply(self, x_WV: Tensor) -> None:
        """Edit the logits in place. They are contiguous float32."""
        flat = x_WV.view(-1)
        if self._bias:
            index, values = (_joined(part, flat.device) for part in zip(*self._bias, strict=True))
            flat[index] = flat[index] + values.float()
        if self._penalties:
            index, factors, amounts = (_joined(part, flat.device) for part in zip(*self._penalties, strict=True))
            x = flat[index]
            flat[index] = torch.where(x > 0, x / factors.float(), x * factors.float()) - amounts.float()
        if self._banned:
            index = _joined(self._banned, flat.device)
            flat[index] = flat[index].clamp_(max=BANNED)
        if self._allowed:
            index = _joined(self._allowed, flat.device)
            allowed = flat[index]
            x_WV[_joined(self._allowed_rows, flat.device)] = -torch.inf
            flat[index] = allowed

    def _flat(self, rows_X: np.ndarray, ids_Y: np.ndarray) -> np.ndarray:
        return (rows_X[:, None] * self._vocab_size + ids_Y).ravel()


class RowEdits:
    """What one request's parameters ask to be done to its logits, and the history they are judged by."""

    def __init__(
        self, params: SamplingParams, eos_ids: frozenset[int], token_ids: list[int], num_prompt: int, vocab_size: int
    ) -> None:
        self._params = params
        end_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_ids)
        self._end_ids = _ids_within(end_ids, vocab_size)
        words = [word for word in params.bad_words_ids if word[-1] < vocab_size]
        self._banned_ids = _ids_within({word[0] for word in words if len(word) == 1}, vocab_size)
        self._banned_words = [list(word) for word in words if len(word) > 1]
        self._tail_length = max((len(word) - 1 for word in self._banned_words), default=0)
        self._tail = token_ids[len(token_ids) - self._tail_length :] if self._tail_length else []
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = _bounded(np.fromiter(bias.values(), np.float64, len(bias)))
        self._allowed_ids = None if params.allowed_token_ids is None else _ids_within(set(params.allowed_token_ids), vocab_size)
        self._factor = float(np.clip(params.repetition_penalty, *FACTORS))
        self._history = None
        if _penalised(params):
            prompt_ids = token_ids[:num_prompt] if params.repetition_penalty != 1.0 else []
            self._history = History(prompt_ids, token_ids[num_prompt:])

    @staticmethod
    def wanted(params: SamplingParams) -> bool:
        """Whether these parameters ask for any edit."""
        return bool(
            params.logit_bias
            or params.bad_words_ids
            or params.allowed_token_ids is not None
            or params.min_tokens
            or _penalised(params)
        )

    def append(self, token_ids: list[int]) -> None:
        """Take in tokens that were put out."""
        if self._history is not None:
            self._history.append(token_ids)
        if self._tail_length:
            self._tail = (self._tail + token_ids)[-self._tail_length :]

    def add_to(self, batch: EditBatch, first_row: int, num_output: int, draft_ids: list[int], tree: Tree | None = None) -> None:
        """Add the edits of the rows first_row .. first_row + len(draft_ids), which follow `num_output` outputs and drafts: a
        chain of these, or a tree.
        """
        rows_X = np.arange(first_row, first_row + 1 + len(draft_ids))
        parents = range(ROOT, len(draft_ids) - 1) if tree is None else tree.parents
        if len(self._bias_ids):
            batch.bias(rows_X, self._bias_ids, self._bias)
        if self._history is not None:
            ids_Y, counts_XY, seen_XY = self._history.after(draft_ids, parents)
            amounts_XY = self._params.frequency_penalty * counts_XY + self._params.presence_penalty * (counts_XY > 0)
            batch.penalise(rows_X, ids_Y, np.where(seen_XY, self._factor, 1.0), _bounded(amounts_XY))
        if len(self._end_ids) and num_output < self._params.min_tokens:
            depths_X = np.arange(len(rows_X)) if tree is None else np.array((0, *tree.depths))
            batch.ban(rows_X[num_output + depths_X < self._params.min_tokens], self._end_ids)
        if len(self._banned_ids):
            batch.ban(rows_X, self._banned_ids)
        if self._banned_words:
            self._ban_words(batch, rows_X, draft_ids, parents)
        if self._allowed_ids is not None:
            batch.allow_only(rows_X, self._allowed_ids)

    def _ban_words(self, batch: EditBatch, rows_X: np.ndarray, draft_ids: list[int], parents: Sequence[int]) -> None:
        """Ban the last token of each word whose other tokens are the end of prompt, output and drafts."""
        histories = [self._tail]
        for token, parent in zip(draft_ids, parents, strict=True):
            histories.append([*histories[parent + 1], token])
        for index, history in enumerate(histories):
            ends = {word[-1] for word in self._banned_words if history[1 - len(word) :] == word[:-1]}
            if ends:
                batch.ban(rows_X[index : index + 1], np.fromiter(ends, np.int64, len(ends)))


def _penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


def _ids_within(ids: set[int] | frozenset[int], vocab_size: int) -> np.ndarray:
    """As an array, without ids that the model has no logit for (a tokenizer may know more tokens than the model)."""
    return np.array(sorted(token for token in ids if token < vocab_size), np.int64)


def _bounded(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -LARGEST_AMOUNT, LARGEST_AMOUNT)


def _joined(arrays, device: torch.device) -> Tensor:
    return to_device(np.concatenate(arrays), device)
