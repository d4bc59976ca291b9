"""The identity of a full block: a hash chain over everything that its keys and values depend on. Torch-free.

digest of block i = H("B", digest of block i - 1, its tokens), and the digest before block 0 is H("R", block size, keys).
The keys are what else the contents depend on (the KV dtype, a LoRA adapter) and whom they may be shared with (cache_salt,
fork_group). H is BLAKE2b or SHA-256, of 256 bits: collision resistant, so that nobody can craft a prompt that hits another
one's blocks, and the same in every process and on every machine (it does not depend on PYTHONHASHSEED).

The encoding is unambiguous. A block's tokens are fixed in number and width (little-endian, 4 bytes each), a digest is fixed
in width, every key is written with its type and length, and the first byte tells the two kinds of input apart.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import partial

from lab.errors import unknown

DIGEST_BYTES = 32
ALGORITHMS: dict[str, Callable] = {
    "blake2b": partial(hashlib.blake2b, digest_size=DIGEST_BYTES),
    "sha256": hashlib.sha256,
}

Key = str | bytes | int | None


class BlockHasher:
    """Computes digests of full blocks. It keeps nothing of the requests: the digests are stored with them.

    Args:
        block_size: tokens per block.
        algo: a name of `ALGORITHMS`; UserError for another one.
        extra_keys: what the contents of every block of this cache depend on beside the tokens, e.g. the KV dtype.
        lookahead: how many tokens past its own a block's contents depend on: these are part of its digest.
    """

    def __init__(self, block_size: int, algo: str = "blake2b", extra_keys: Sequence[Key] = (), lookahead: int = 0) -> None:
        if algo not in ALGORITHMS:
            raise unknown("cache.hash_algo", algo, ALGORITHMS)
        self.block_size = block_size
        self._lookahead = lookahead
        self._hash = ALGORITHMS[algo]
        self._extra_keys = tuple(extra_keys)
        self._plain_root = self._root(None, None)

    def root(self, cache_salt: str | None = None, fork_group: str | None = None) -> bytes:
        """The digest that stands before the first block of a sequence with these keys."""
        if cache_salt is None and fork_group is None:
            return self._plain_root
        return self._root(cache_salt, fork_group)

    def _root(self, cache_salt: str | None, fork_group: str | None) -> bytes:
        keys = (self.block_size, cache_salt, fork_group, *self._extra_keys)
        return self._hash(b"R" + b"".join(map(_encode, keys))).digest()

    def chain(self, parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
        """The digests of the full blocks that `token_ids` fill, the first of which comes after the digest `parent`.

        With a lookahead, only of those that have so many tokens after them.
        """
        num_full = max(0, len(token_ids) - self._lookahead) // self.block_size * self.block_size
        num_tokens = num_full + self._lookahead if num_full else 0
        data = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
        width, hash_ = 4 * self.block_size, self._hash
        digests = []
        for start in range(0, 4 * num_full, width):
            parent = hash_(b"B" + parent + data[start : start + width + 4 * self._lookahead]).digest()
            digests.append(parent)
        return digests


def _encode(key: Key) -> bytes:
    """One key as type, length and contents."""
    if key is None:
        kind, data = b"n", b""
    elif isinstance(key, str):
        kind, data = b"s", key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        kind, data = b"b", key
    else:
        kind, data = b"i", str(int(key)).encode()
    return kind + struct.pack("<Q", len(data)) + data
