"""A runner without a model that notices every mistake of the scheduler and the block manager.

A slot of its KV pool holds a digest of all tokens up to its position, and the group of layers that wrote it. A position
"attends" by looking through each group's block table at every slot that the group needs: one stale, foreign or missing block,
and it fails on the spot. The next token is a pure function of the history, so the right output of a request is known without
running it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.kv.groups import Full, Need
from lab.types import Chunk, NewRow, RowResult, Step, StepResult, TokenLogprobs

VOCAB = 97


def next_token(token_ids: Sequence[int]) -> int:
    """The token after a history."""
    return (hash(tuple(token_ids[-5:])) * 31 + len(token_ids) * 7) % VOCAB


def solo_output(
    prompt_ids: Sequence[int],
    max_len: int,
    eos_ids: frozenset[int] = frozenset(),
    stop_token_ids: Sequence[int] = (),
    min_tokens: int = 0,
) -> list[int]:
    """The tokens a request must get, by the plainest loop."""
    token_ids = list(prompt_ids)
    while len(token_ids) < max_len:
        token_ids.append(next_token(token_ids))
        enough = len(token_ids) - len(prompt_ids) >= min_tokens
        if enough and (token_ids[-1] in eos_ids or token_ids[-1] in stop_token_ids):
            break
    return token_ids[len(prompt_ids) :]


def prefix_digests(token_ids: Sequence[int]) -> list[int]:
    """For each position a digest of the tokens up to and including it."""
    digests, digest = [], 0
    for position, token in enumerate(token_ids):
        digest = hash((digest, position, token))
        digests.append(digest)
    return digests


@dataclass
class Row:
    token_ids: list[int]
    block_ids: list[int]
    num_prompt: int
    num_computed: int
    wants_prompt_logprobs: bool
    drafts: list[int] = field(default_factory=list)


class FakeRunner:
    """Executes steps in order. With `num_drafts` it proposes up to so many, right or wrong at random."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int,
        num_drafts: int = 0,
        is_async: bool = False,
        seed: int = 0,
        needs: Sequence[Need] = (Full(),),
    ) -> None:
        self.block_size = block_size
        self.needs = needs
        self.max_model_len = max_model_len
        self.num_drafts = num_drafts
        self.is_async = is_async
        self.rows: dict[str, Row] = {}
        self.pool: list[tuple[int, int] | None] = [None] * (num_blocks * block_size)
        self.random = random.Random(seed)
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_computed: dict[str, int] = {}  # positions computed, by request
        self.num_steps = 0

    def execute(self, step: Step) -> StepResult:
        """All keys and values are written before any position attends, as in a model."""
        self.num_steps += 1
        for request_id in step.freed:
            del self.rows[request_id]
        for new in step.new_rows:
            self._add_row(new)
        assert len({c.request_id for c in step.chunks}) == len(step.chunks), "two chunks of one row"
        assert step.num_tokens == sum(c.num_tokens for c in step.chunks)
        work = [self._write(chunk) for chunk in step.chunks]
        return StepResult(step.index, [self._attend(*w) for w in work], ms=0.0)

    def _add_row(self, new: NewRow) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} has a row already"
        self.rows[new.request_id] = Row(
            list(new.token_ids),
            list(new.block_ids),
            new.num_prompt,
            new.num_computed,
            new.params.prompt_logprobs is not None,
        )

    def _slot(self, row: Row, group: int, position: int) -> int:
        assert position < self.max_model_len, f"position {position} is past the context"
        block_id = row.block_ids[position // self.block_size * len(self.needs) + group]
        assert block_id >= 0, f"no block of group {group} holds position {position}"
        return block_id * self.block_size + position % self.block_size

    def _write(self, chunk: Chunk) -> tuple[Chunk, Row, int, list[int], list[int]]:
        row = self.rows[chunk.request_id]
        row.block_ids += chunk.new_block_ids
        start = row.num_computed
        assert start == chunk.start or (self.is_async and start < chunk.start), "the start is not what the scheduler planned"
        if self.is_async:
            assert not chunk.draft_ids
            drafts = row.drafts[: chunk.num_drafts] if chunk.samples else []
        else:
            drafts = list(chunk.draft_ids)
            assert len(drafts) == chunk.num_drafts
        num_tokens = chunk.num_tokens - chunk.num_drafts
        assert num_tokens >= 1
        input_ids = row.token_ids[start : start + num_tokens] + drafts
        assert len(input_ids) == num_tokens + len(drafts), "positions beyond the tokens that exist"
        assert chunk.samples == (start + num_tokens == len(row.token_ids)), "samples before all tokens are computed"
        digests = prefix_digests(row.token_ids[:start] + input_ids)
        for group in range(len(self.needs)):
            for position in range(start, len(digests)):
                self.pool[self._slot(row, group, position)] = group, digests[position]
        self.num_computed[chunk.request_id] = self.num_computed.get(chunk.request_id, 0) + len(input_ids)
        return chunk, row, start, input_ids, drafts

    def _attend(self, chunk: Chunk, row: Row, start: int, input_ids: list[int], drafts: list[int]) -> RowResult:
        expected = prefix_digests(row.token_ids[:start] + input_ids)
        for group, need in enumerate(self.needs):
            for position in range(need.first_needed(start), len(expected)):
                found, right = self.pool[self._slot(row, group, position)], (group, expected[position])
                assert found == right, f"{chunk.request_id}: group {group} has wrong contents at {position}"
        row.num_computed = start + len(input_ids) - len(drafts)
        prompt_logprobs = None
        if row.wants_prompt_logprobs and start + 1 < row.num_prompt:
            last = min(start + len(input_ids), row.num_prompt - 1)
            prompt_logprobs = [TokenLogprobs([row.token_ids[p]], [-float(p)], 1) for p in range(start + 1, last + 1)]
        if not chunk.samples:
            return RowResult(chunk.request_id, [], prompt_logprobs=prompt_logprobs)
        new_ids = self._verify(row, drafts)
        row.token_ids += new_ids
        row.num_computed += len(new_ids) - 1
        row.drafts = self._propose(row)
        return RowResult(
            chunk.request_id,
            new_ids,
            num_drafts=len(drafts),
            logprobs=[TokenLogprobs([t], [-1.0], 1) for t in new_ids],
            prompt_logprobs=prompt_logprobs,
            draft_ids=list(row.drafts),
        )

    def _verify(self, row: Row, drafts: list[int]) -> list[int]:
        new_ids = []
        for draft in drafts:
            new_ids.append(next_token(row.token_ids + new_ids))
            if draft != new_ids[-1]:
                self.num_rejected += 1
                return new_ids
            self.num_accepted += 1
        return [*new_ids, next_token(row.token_ids + new_ids)]

    def _propose(self, row: Row) -> list[int]:
        drafts: list[int] = []
        for _ in range(self.random.randint(0, self.num_drafts)):
            right = next_token(row.token_ids + drafts)
            drafts.append(right if self.random.random() < 0.7 else (right + 1) % VOCAB)
        return drafts
