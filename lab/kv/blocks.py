"""Which block of the KV pool belongs to whom: allocation, sharing, and the prefix cache. Torch-free.

How blocks are kept, shared and evicted is the business of the pool (`lab.kv.pool`).

Blocks are registered by their contents to be, when the step that fills them is planned: attention writes the keys and
values of all tokens of a step before it reads any, and steps execute in order.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lab.kv.groups import Full, Need
from lab.kv.pool import BlockPool
from lab.kv.prefix import BlockHasher, Key
from lab.types import Request

NO_IDS: list[int] = []  # what nearly every row gets in nearly every step: one list for all, never written to


@dataclass(slots=True)
class PrefixCacheStats:
    """Counts in prompt tokens, over first admissions only: a preempted request that comes back is not counted again.

    A request that may not read the cache (it asks for prompt_logprobs) adds nothing, nor does any request while prefix
    caching is off.
    """

    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queries if self.queries else 0.0


class BlockManager(BlockPool):
    """The pool, with the block tables of the requests: the only writer of those. `needs`: what each group of layers keeps.

    Args:
        num_blocks: blocks in the pool. None is set aside: padding uses slot -1.
        block_size: tokens per block.
        enable_prefix_caching: share full blocks between requests with a common prefix. When off, only the siblings of a
            fork_group share, and only their prompt's blocks.
        hash_algo: see `lab.kv.prefix.ALGORITHMS`.
        extra_keys: what the contents of every block depend on beside the tokens, e.g. the KV dtype.
        lookahead: how many tokens past its own the contents of a block depend on.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_algo: str = "blake2b",
        extra_keys: tuple[Key, ...] = (),
        lookahead: int = 0,
    ) -> None:
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        super().__init__(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.needs: tuple[Need, ...] = (Full(),)
        self.stats = PrefixCacheStats()
        self._lookahead = lookahead
        self._hasher = BlockHasher(block_size, hash_algo, extra_keys, lookahead)

    def blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a request of up to so many tokens holds at a time."""
        return -(-num_tokens // self.block_size)

    def wanted(self, num_tokens: int, block_ids: list[int]) -> int:
        """How many blocks beside those of its table a request may take until so many of its tokens are computed."""
        return self.blocks_for(num_tokens) - len(block_ids)

    def tokens_in(self, block_ids: list[int]) -> int:
        """How many tokens a table of full blocks stands for."""
        return len(block_ids) * self.block_size

    def match(self, request: Request) -> list[int]:
        """The blocks of the longest cached prefix of the request's tokens; nothing is taken or counted yet.

        They never cover all the tokens: the last one must be computed, for its logits.
        """
        if request.params.prompt_logprobs is not None or not self._shares(request):
            return []
        limit = (len(request.token_ids) - max(1, self._lookahead)) // self.block_size
        if not self.enable_prefix_caching:
            limit = min(limit, (request.num_prompt - self._lookahead) // self.block_size)
        return self._find(self._digests(request, limit)[:limit])

    def admit(self, request: Request, hit_ids: list[int], num_tokens: int) -> None:
        """Give the request its block table: the blocks that `match` found, then new ones up to `num_tokens` tokens.

        The caller has made sure that enough are free (`num_free_without`).
        """
        assert not request.block_ids, f"request {request.id} has blocks already"
        self._begin(request, hit_ids)
        num_hit = self.tokens_in(hit_ids)
        request.num_registered = num_hit // self.block_size
        if self.enable_prefix_caching and request.params.prompt_logprobs is None and request.num_preemptions == 0:
            self.stats.queries += request.num_prompt
            self.stats.hits += num_hit
        new_ids = self.extend(request, num_tokens)
        assert new_ids is not None, f"request {request.id} was admitted without room for it"

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Append blocks until the table holds `num_tokens` tokens; returns the new ones' ids.

        None, and nothing is changed, when too few are free.
        """
        return self._append(request, -(-num_tokens // self.block_size) - len(request.block_ids))

    def _append(self, request: Request, num_new: int) -> list[int] | None:
        if num_new <= 0:
            return NO_IDS
        if num_new > self.num_free:
            return None
        new_ids = self.take(num_new)
        request.block_ids += new_ids
        return new_ids

    def register(self, request: Request) -> None:
        """Put the full blocks into the lookup table of all tokens that are known, and computed or about to be.

        The first `num_computed` tokens are those computed by a step that is done, submitted or being planned; what of them
        is not in `token_ids` yet (in flight, or a draft) is left out until it is known.
        """
        num_computed, num_known = request.num_computed, len(request.token_ids) - self._lookahead
        num_full = (num_computed if num_computed < num_known else num_known) // self.block_size
        if num_full <= request.num_registered or not self._shares(request):
            return
        if not self.enable_prefix_caching:
            num_full = min(num_full, (request.num_prompt - self._lookahead) // self.block_size)
        if num_full > request.num_registered:
            self._enter(request, self._digests(request, num_full), num_full)
            request.num_registered = num_full

    def free(self, request: Request) -> None:
        """Take the request's blocks back. What is cached in them can be hit until they are reused."""
        self.put_back(request.block_ids)
        request.block_ids = []
        request.num_registered = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached contents. False, and nothing is changed, while any block is in use."""
        if self.num_used:
            return False
        self.forget_cached()
        return True

    def check_integrity(self, requests: Iterable[Request] | None = None) -> None:
        """Verify every invariant; AssertionError says which is broken.

        Args:
            requests: all requests that have blocks, to compare the reference counts with; None skips that.
        """
        self.check_pool()
        if requests is not None:
            num_refs = [0] * self.num_blocks
            for request in requests:
                held = self._held(request)
                assert len(set(held)) == len(held), f"request {request.id} has a block twice"
                for block_id in held:
                    num_refs[block_id] += 1
            assert num_refs == [block.num_refs for block in self._blocks], "reference counts and block tables differ"

    def _find(self, digests: list[bytes]) -> list[int]:
        """The table of the longest prefix of blocks with these digests that is cached."""
        found: list[int] = []
        for digest in digests:
            block = self._cached.get(digest)
            if block is None:
                break
            found.append(block.id)
        return found

    def _begin(self, request: Request, hit_ids: list[int]) -> None:
        """Make the blocks that `match` found the request's table."""
        self.share(hit_ids)
        request.block_ids = list(hit_ids)

    def _enter(self, request: Request, digests: list[bytes], num_full: int) -> None:
        """Put the request's blocks from `num_registered` on, up to `num_full`, into the lookup table."""
        for i in range(request.num_registered, num_full):
            self.enter(digests[i], request.block_ids[i])

    def _held(self, request: Request) -> list[int]:
        """The blocks that the request has a reference to."""
        return request.block_ids

    def _shares(self, request: Request) -> bool:
        return self.enable_prefix_caching or request.fork_group is not None

    def _digests(self, request: Request, num_blocks: int) -> list[bytes]:
        """The request's digests, computed as far as its first `num_blocks` blocks."""
        digests, size = request.block_hashes, self.block_size
        if len(digests) < num_blocks:
            if digests:
                parent = digests[-1]
            else:  # siblings have common contents anyhow: their key is needed only where nothing else may be shared
                parent = self._hasher.root(request.cache_salt, None if self.enable_prefix_caching else request.fork_group)
            digests += self._hasher.chain(parent, request.token_ids[len(digests) * size : num_blocks * size + self._lookahead])
        return digests
