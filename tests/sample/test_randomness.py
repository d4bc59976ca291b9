"""Counter-based uniforms: the published generator, one number for each seed, position and purpose."""

import numpy as np

from lab.sample.randomness import NUM_PURPOSES, Purpose, uniforms
from tests.sample.reference import chi_square_p

SPLITMIX64_OF_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]


def draws(seeds, positions, purpose=Purpose.SAMPLE):
    return uniforms(np.array(seeds, np.uint64), np.array(positions), purpose)


def test_published_values():
    """Seed 0 mixes to 0, so its draws are the generator's own sequence from state 0."""
    assert NUM_PURPOSES == 4
    found = [draws([0], [0], purpose)[0] for purpose in (Purpose.SAMPLE, Purpose.ACCEPT, Purpose.RECOVER)]
    found.append(draws([0], [1])[0])
    wanted = [(SPLITMIX64_OF_0[i] >> 11) * 2.0**-53 for i in (0, 1, 2, 4)]
    assert found == wanted


def test_every_seed_position_and_purpose_has_its_own():
    seeds = [0, 1, 2, 2**63, 2**64 - 1]
    found = [u for s in seeds for p in Purpose for u in draws([s] * 500, range(500), p)]
    assert len(set(found)) == 5 * len(Purpose) * 500


def test_seeds_apart_by_the_step_of_the_counter_do_not_share_a_sequence():
    gamma = 0x9E3779B97F4A7C15
    assert not set(draws([1] * 100, range(100))) & set(draws([(1 + NUM_PURPOSES * gamma) % 2**64] * 100, range(100)))


def test_range_and_independence_of_the_batch():
    together = draws(range(10000), [7] * 10000)
    assert together.min() >= 0.0 and together.max() < 1.0
    assert draws([1234], [7])[0] == together[1234]


def test_uniform_and_uncorrelated():
    by_position, by_seed = draws([5] * 200_000, range(200_000)), draws(range(200_000), [0] * 200_000)
    for found in (by_position, by_seed):
        counts = np.bincount((found * 100).astype(int), minlength=100).tolist()
        assert chi_square_p(counts, [0.01] * 100) > 1e-4
    for other in (by_position[1:], draws([5] * 199_999, range(199_999), Purpose.ACCEPT), by_seed[:-1]):
        assert abs(np.corrcoef(by_position[:-1], other)[0, 1]) < 0.01
