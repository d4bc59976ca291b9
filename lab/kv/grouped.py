"""The block manager for models whose layers do not all keep all tokens: a block table for each group of layers. Torch-free.

A request's `block_ids` hold the tables of all G groups side by side: the block of group g that holds the tokens from
i * block_size on is entry i * G + g. So growing a row means to append entries, as with one group. NO_BLOCK stands where a
group keeps nothing: those tokens lie behind its window.

- When a row grows, the blocks that neither its next token nor any later one can read are given back first. They keep their
  contents and can be hit until they are reused, like those of a request that has ended.
- A cached prefix is a hit if every group finds what the token after it reads: a full group all of its blocks, a sliding one
  those that reach into the window. Only these are taken. The longest such prefix is a fixed point: each kind shortens what the
  others have left until none does.
- A block is looked up by its digest and its group: the same tokens have other keys and values in other layers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lab.kv.blocks import BlockManager
from lab.kv.groups import Full, Need
from lab.types import Request

NO_BLOCK = -1


class GroupedBlockManager(BlockManager):
    """As `BlockManager`, with several groups or one that keeps a window.

    Args:
        needs: what each group keeps.
        reach: the most positions from the first that a row's next step may begin at to the last that it may compute, so
            that it is known how much a row holds beside its window.
    """

    def __init__(self, num_blocks: int, block_size: int, needs: Sequence[Need], *, reach: int, **options: Any) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.needs = tuple(needs)
        self._reach = reach
        groups_of = {need: [g for g, other in enumerate(needs) if other == need] for need in needs}
        self._kinds = sorted(groups_of.items(), key=lambda kind: not isinstance(kind[0], Full))
        self._suffixes = [group.to_bytes(2, "little") for group in range(len(needs))]

    def blocks_for(self, num_tokens: int) -> int:
        return sum(len(groups) * self._most_of(need, num_tokens) for need, groups in self._kinds)

    def wanted(self, num_tokens: int, block_ids: list[int]) -> int:
        return max(0, self.blocks_for(num_tokens) - len(block_ids) + block_ids.count(NO_BLOCK))

    def tokens_in(self, block_ids: list[int]) -> int:
        return len(block_ids) // len(self.needs) * self.block_size

    def num_free_without(self, block_ids: list[int]) -> int:
        return super().num_free_without([i for i in block_ids if i != NO_BLOCK])

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """As BlockManager.extend, but that what lies behind the windows is given back first, whether it can grow or not."""
        self._give_back_passed(request)
        return self._append(request, -(-num_tokens // self.block_size) * len(self.needs) - len(request.block_ids))

    def free(self, request: Request) -> None:
        request.block_ids = self._held(request)
        super().free(request)
        request.kept_from = []

    def check_integrity(self, requests: Iterable[Request] | None = None) -> None:
        """As BlockManager.check_integrity, and: tables are whole, and no group keeps more than it may."""
        requests = None if requests is None else list(requests)
        super().check_integrity(requests)
        width = len(self.needs)
        for request in requests or []:
            table, who = request.block_ids, f"request {request.id}"
            assert len(table) % width == 0 and len(request.kept_from) == len(self._kinds), f"{who}: a table is not whole"
            num_tokens = self.tokens_in(table)
            for (need, groups), first in zip(self._kinds, request.kept_from, strict=True):
                for group in groups:
                    column = table[group::width]
                    assert all(i == NO_BLOCK for i in column[:first]), f"{who}: group {group} has a block behind its window"
                    assert NO_BLOCK not in column[first:], f"{who}: group {group} lacks a block"
                    assert len(column) - first <= self._most_of(need, num_tokens), f"{who}: group {group} keeps too much"
                    suffixes = {self._blocks[i].digest[-2:] for i in column[first:] if self._blocks[i].digest is not None}
                    assert suffixes <= {self._suffixes[group]}, f"{who}: group {group} has a block of another group"

    def _most_of(self, need: Need, num_tokens: int) -> int:
        """The most blocks of a row of up to so many tokens that one group keeps at a time."""
        size, kept = self.block_size, need.most_tokens(num_tokens, self._reach)
        return min(-(-num_tokens // size), (kept + size - 2) // size + 1)  # wherever in a block they begin

    def _first_kept(self, need: Need, position: int) -> int:
        """Number of the first block that a token at `position` reads."""
        return need.first_needed(position) // self.block_size

    def _give_back_passed(self, request: Request) -> None:
        """Put back the blocks that no token reads any more. Drafts in flight may be rejected, known tokens stay."""
        next_position = min(request.num_computed, len(request.token_ids) - 1)
        table, kept_from, width = request.block_ids, request.kept_from, len(self.needs)
        for kind, (need, groups) in enumerate(self._kinds):
            first = self._first_kept(need, next_position)
            if first > kept_from[kind]:
                entries = [i * width + group for i in range(kept_from[kind], first) for group in groups]
                self.put_back([table[entry] for entry in entries])
                for entry in entries:
                    table[entry] = NO_BLOCK
                kept_from[kind] = first

    def _find(self, digests: list[bytes]) -> list[int]:
        length, before = len(digests), -1
        while length != before:
            before = length
            for need, groups in self._kinds:
                length = self._longest(need, [self._suffixes[group] for group in groups], digests[:length])
        width = len(self.needs)
        table = [NO_BLOCK] * (length * width)
        for need, groups in self._kinds:
            for i in range(self._first_kept(need, length * self.block_size), length):
                for group in groups:
                    table[i * width + group] = self._cached[digests[i] + self._suffixes[group]].id
        return table

    def _longest(self, need: Need, suffixes: list[bytes], digests: list[bytes]) -> int:
        """Blocks of the longest prefix after which groups of one kind find all that they need."""
        cached = self._cached
        if isinstance(need, Full):
            return next(
                (i for i, d in enumerate(digests) if not all(d + suffix in cached for suffix in suffixes)), len(digests)
            )
        i = length = len(digests)
        while i > self._first_kept(need, length * self.block_size):
            i -= 1
            if not all(digests[i] + suffix in cached for suffix in suffixes):
                length = i
        return length

    def _begin(self, request: Request, hit_ids: list[int]) -> None:
        self.share([i for i in hit_ids if i != NO_BLOCK])
        request.block_ids = list(hit_ids)
        num_hit = self.tokens_in(hit_ids)
        request.kept_from = [self._first_kept(need, num_hit) for need, _ in self._kinds]

    def _enter(self, request: Request, digests: list[bytes], num_full: int) -> None:
        width = len(self.needs)
        for i in range(request.num_registered, num_full):
            for group, suffix in enumerate(self._suffixes):
                block_id = request.block_ids[i * width + group]
                assert block_id != NO_BLOCK, f"request {request.id}: block {i} of group {group} was given back unregistered"
                self.enter(digests[i] + suffix, block_id)

    def _held(self, request: Request) -> list[int]:
        return [i for i in request.block_ids if i != NO_BLOCK]
