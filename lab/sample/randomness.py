"""Counter-based random numbers: a draw depends on the request's seed, the position and the purpose, and on nothing else.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), used as a
counter: draw number c of a seed is mix64(mix64(seed) + (c + 1) * GAMMA) with c = position * NUM_PURPOSES + purpose. Mixing
the seed first keeps the sequences of neighbouring seeds apart. A request thus gets the same numbers whatever its row, its
batch, the steps it was served in, and however often it was preempted.
"""

from enum import IntEnum

import numpy as np

NUM_PURPOSES = 4  # fixed, so that a new purpose does not change the draws of the others

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_TURN = np.uint64(0xD1342543DE82EF95)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Purpose(IntEnum):
    """What a uniform is for: every purpose has its own at each output position."""

    SAMPLE = 0  # choosing a token from the target distribution
    ACCEPT = 1  # accepting or rejecting a draft that was drawn from a distribution
    RECOVER = 2  # choosing the token that replaces a rejected one
    DRAFT = 3  # drawing a draft from the proposer's distribution


def uniforms(seeds_X: np.ndarray, positions_X: np.ndarray, purpose: Purpose, turns_X: np.ndarray | None = None) -> np.ndarray:
    """One float64 in [0, 1) for each pair of seed and output position, with 53 random bits.

    Args:
        seeds_X: uint64 seeds of the requests.
        positions_X: index of the token among the request's outputs, from 0.
        turns_X: which of several draws for one purpose at a position, as siblings in a tree of drafts need them; None: the
            first, 0. Each turn has a sequence of its own, as if the request had as many seeds.
    """
    if turns_X is not None:
        seeds_X = seeds_X ^ np.where(turns_X > 0, _mix64(turns_X.astype(np.uint64) * _TURN), np.uint64(0))
    counter_X = positions_X.astype(np.uint64) * np.uint64(NUM_PURPOSES) + np.uint64(purpose + 1)
    bits_X = _mix64(_mix64(seeds_X) + counter_X * _GAMMA)
    return (bits_X >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(value_X: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on an array of uint64, whose arithmetic wraps around."""
    value_X = (value_X ^ (value_X >> np.uint64(30))) * _MIX_1
    value_X = (value_X ^ (value_X >> np.uint64(27))) * _MIX_2
    return value_X ^ (value_X >> np.uint64(31))
