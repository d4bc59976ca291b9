"""The blocks of the KV pool: who is free, in which order they are reused, and what is cached in them. Torch-free.

A block is in use when somebody holds a reference to it, and free otherwise. A free block may still hold contents under a
digest, which a later request can hit: it leaves the free list in O(1). Eviction is lazy: a free block keeps its digest until
it is handed out for other contents, and at that moment the digest leaves the lookup table. So `num_free` counts evictable
blocks too, and at idle every block is free.

Order of the free list, which is the order of reuse: blocks without a digest first (there is nothing to lose), then
cached ones by the time they were freed, the last block of a sequence before its first (a prefix is worth more than what
comes after it).

Two blocks may fill with the same contents, when two requests computed them side by side. The one that was registered
first stays in the lookup table; the other keeps no digest, serves its own request only and is reused first once free.
"""

from collections.abc import Sequence


class Block:
    """One block of the pool. `prev` and `next` link it into the free list while `num_refs` is 0."""

    __slots__ = ("digest", "id", "next", "num_refs", "prev")

    def __init__(self, id: int) -> None:
        self.id = id
        self.num_refs = 0
        self.digest: bytes | None = None  # what it is found by in the lookup table; None when it is not in there
        self.prev: Block = self
        self.next: Block = self


class BlockPool:
    """The only writer of reference counts, digests and the free list."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.peak_used = 0
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._cached: dict[bytes, Block] = {}
        self._free = Block(-1)  # sentinel of the circular free list: next is reused first, prev last
        for block in self._blocks:
            self._link_before(self._free, block)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that a request could hit, in use or not."""
        return len(self._cached)

    def num_free_without(self, block_ids: Sequence[int]) -> int:
        """How many blocks would be free once these have been shared."""
        blocks = self._blocks
        return self.num_free - sum(1 for i in block_ids if blocks[i].num_refs == 0)

    def take(self, num_new: int) -> list[int]:
        """The ids of so many blocks from the free list, which has them; what is cached in them is forgotten."""
        new_ids = []
        block = self._free.next
        for _ in range(num_new):
            if block.digest is not None:
                del self._cached[block.digest]
                block.digest = None
            block.num_refs = 1
            new_ids.append(block.id)
            block = block.next
        self._free.next, block.prev = block, self._free  # the whole run leaves the list at once
        self.num_free -= num_new
        used = self.num_blocks - self.num_free
        if used > self.peak_used:
            self.peak_used = used
        return new_ids

    def share(self, block_ids: Sequence[int]) -> None:
        """One more reference to each of these blocks, which may be free."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.num_refs == 0:
                block.prev.next, block.next.prev = block.next, block.prev
                self.num_free -= 1
            block.num_refs += 1

    def put_back(self, block_ids: Sequence[int]) -> None:
        """One reference less to each of these blocks of a sequence, the last one first."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.num_refs -= 1
            if block.num_refs == 0:
                self._link_before(self._free.next if block.digest is None else self._free, block)
                self.num_free += 1

    def enter(self, digest: bytes, block_id: int) -> None:
        """Let a block be found by this digest, unless another one is."""
        if digest not in self._cached:
            block = self._blocks[block_id]
            self._cached[digest] = block
            block.digest = digest

    def forget_cached(self) -> None:
        """Forget all cached contents."""
        self._cached.clear()
        for block in self._blocks:
            block.digest = None

    def check_pool(self) -> None:
        """Verify every invariant; AssertionError says which is broken."""
        seen = set()
        block = self._free.next
        while block is not self._free:
            assert block.id not in seen, f"block {block.id} is in the free list twice"
            assert block.next.prev is block and block.prev.next is block, f"block {block.id} is linked wrongly"
            seen.add(block.id)
            block = block.next
        assert len(seen) == self.num_free, f"{len(seen)} blocks in the free list, {self.num_free} counted"
        assert self.num_used <= self.peak_used, f"{self.num_used} blocks in use, peak {self.peak_used}"
        for block in self._blocks:
            assert (block.num_refs == 0) == (block.id in seen), f"block {block.id} with {block.num_refs} references"
            cached = block.digest is not None and self._cached.get(block.digest) is block
            assert cached or block.digest is None, f"block {block.id} has a digest that does not lead to it"
        with_digest = sum(1 for block in self._blocks if block.digest is not None)
        assert with_digest == len(self._cached), f"{with_digest} blocks with a digest, {len(self._cached)} in the table"

    @staticmethod
    def _link_before(place: Block, block: Block) -> None:
        block.prev, block.next = place.prev, place
        place.prev.next = block
        place.prev = block
