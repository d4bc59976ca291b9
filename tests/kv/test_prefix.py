"""The identity of a block: everything before it counts, nothing is ambiguous, and every process agrees."""

import itertools
import os
import subprocess
import sys

import pytest

from lab.errors import UserError
from lab.kv.prefix import ALGORITHMS, BlockHasher


def chain(hasher, token_ids, **keys):
    return hasher.chain(hasher.root(**keys), token_ids)


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


def test_a_chain_is_the_same_whether_it_grows_at_once_or_in_steps():
    hasher = BlockHasher(4)
    token_ids = list(range(22))
    at_once = chain(hasher, token_ids)
    assert len(at_once) == 5, "the last block is not full"
    first = chain(hasher, token_ids[:9])
    assert first + hasher.chain(first[-1], token_ids[8:]) == at_once


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
    assert chain(hasher, [token])[0] not in {chain(hasher, [t])[0] for t in others}


def test_every_process_computes_the_same_digests():
    program = (
        "from lab.kv.prefix import BlockHasher\n"
        "for algo in ('blake2b', 'sha256'):\n"
        "    h = BlockHasher(16, algo, ('float32', 7))\n"
        "    for salt in (None, 'salt'):\n"
        "        print(*(d.hex() for d in h.chain(h.root(salt), range(48))))\n"
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


def test_with_a_lookahead_the_tokens_after_a_block_are_part_of_it():
    hasher = BlockHasher(2, lookahead=1)
    assert chain(hasher, [1, 2]) == []
    first, second = chain(hasher, [1, 2, 3, 4, 5])
    assert chain(hasher, [1, 2, 3, 4]) == [first]
    assert chain(hasher, [1, 2, 9, 4, 5])[0] != first
    assert hasher.chain(first, [3, 4, 5]) == [second]
    assert chain(BlockHasher(2), [1, 2, 3, 4, 5])[0] != first
