"""The identity of a block: everything before it counts, nothing is ambiguous, and every process agrees."""

import itertools
import os
import subprocess
import sys

import pytest

from lab.errors import UserError
from lab.kv.prefix import ALGORITHMS, BlockHasher


def chain(hasher, token_ids, **keys):
    digests = [hasher.root(**keys)]
    for i in range(0, len(token_ids), hasher.block_size):
        digests.append(hasher.block(digests[-1], token_ids[i : i + hasher.block_size]))
    return digests[1:]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_block_depends_on_all_before_it(algo):
    hasher = BlockHasher(4, algo)
    first, second = chain(hasher, [1, 2, 3, 4, 9, 9, 9, 9])
    other_first, other_second = chain(hasher, [4, 3, 2, 1, 9, 9, 9, 9])
    same_first, third = chain(hasher, [1, 2, 3, 4, 9, 9, 9, 8])
    assert first == same_first
    assert len({first, second, other_first, other_second, third}) == 5
    assert all(len(d) * 8 >= 128 for d in (first, second))


def test_algorithms_differ_and_an_unknown_one_is_refused_by_name():
    assert BlockHasher(4, "blake2b").root() != BlockHasher(4, "sha256").root()
    with pytest.raises(UserError, match="blake2b"):
        BlockHasher(4, "blake2")


def test_no_two_sets_of_keys_have_the_same_root():
    """Values that would be equal if they were just written one after another, or without their types."""
    values = [None, "", "a", "b", "ab", "1", 1, -1, b"a", b"1", "None", "a\x00b"]
    roots = {}
    for salt, fork in itertools.product([v for v in values if v is None or isinstance(v, str)], repeat=2):
        for extra in [(), *((v,) for v in values), ("a", "b"), ("", "ab"), ("ab", ""), ("a", None)]:
            root = BlockHasher(4, extra_keys=extra).root(salt, fork)
            assert root not in roots, f"{(salt, fork, extra)} and {roots[root]}"
            roots[root] = (salt, fork, extra)
    assert len(roots) > 500


def test_a_key_that_spells_out_other_keys_is_not_taken_for_them():
    plain = BlockHasher(4, extra_keys=("y", None)).root("x")
    assert plain != BlockHasher(4).root("xnsy")


def test_a_block_of_another_size_or_of_a_root_is_never_the_same():
    small, large = BlockHasher(2), BlockHasher(4)
    assert chain(small, [1, 2])[0] != chain(large, [1, 2, 0, 0])[0]
    assert small.root() != large.root()


@pytest.mark.parametrize("token", [0, 255, 256, 65536, 2**32 - 1])
def test_token_ids_are_taken_whole(token):
    hasher = BlockHasher(1)
    others = {0, 1, 255, 256, 65535, 65536, 2**31, 2**32 - 1} - {token}
    assert hasher.block(hasher.root(), [token]) not in {hasher.block(hasher.root(), [t]) for t in others}


def test_every_process_computes_the_same_digests():
    program = (
        "from lab.kv.prefix import BlockHasher\n"
        "for algo in ('blake2b', 'sha256'):\n"
        "    h = BlockHasher(16, algo, ('float32', 7))\n"
        "    for salt in (None, 'salt'):\n"
        "        d = h.root(salt)\n"
        "        for i in range(3):\n"
        "            d = h.block(d, range(16 * i, 16 * i + 16))\n"
        "            print(d.hex())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0].split())) == 12
