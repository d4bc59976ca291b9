"""How a kernel cuts its work for a shape and a GPU: a small table in order of preference, the first entry that fits is taken.

Nothing is timed at start-up: a choice that depends on the shape alone makes runs repeatable and start-ups short.
"""

from lab.api import dataclass

PREFILL = ((128, 64, 3), (128, 64, 2), (64, 64, 3), (64, 64, 2), (64, 32, 2), (32, 32, 2), (16, 16, 1))  # M, N, stages
DECODE = ((128, 5), (64, 5), (64, 3), (32, 5), (32, 3), (16, 1))  # N, stages
PROGRAMS_PER_SM = 2  # decode programs whose tiles must fit beside each other, so that one loads while another computes
RESERVED_BYTES = 2048  # of shared memory, for reductions across warps


@dataclass(frozen=True, slots=True)
class Gpu:
    """What of a GPU the choice depends on; the defaults are those of an H100."""

    num_sms: int = 132
    shared_bytes: int = 232_448  # the most that one program may have


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of M query rows (0: the plan's choice) and N keys, and how Triton runs it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, dim: int, q_bytes: int, kv_bytes: int, block_m: int = 0) -> int:
        """Shared memory for the queries, the weights, and the keys and values of every stage. An estimate from above."""
        rows = block_m or self.block_m
        buffers = self.num_stages // 2 + 1  # of keys and values: a stage between two loads holds the block numbers
        return rows * dim * q_bytes + rows * self.block_n * q_bytes + 2 * buffers * self.block_n * dim * kv_bytes


def prefill_config(gpu: Gpu, group: int, dim: int, q_bytes: int, kv_bytes: int) -> Config:
    """For rows of many tokens: `group` query heads per KV head, head dim padded to `dim`."""
    configs = []
    for least_m, block_n, num_stages in PREFILL:
        block_m = max(least_m, power_of_two(group))
        if block_m * dim <= _largest_tile(q_bytes):
            configs.append(Config(block_m, block_n, 8 if block_m * dim > 64 * 128 else 4, num_stages))
    limit = gpu.shared_bytes - RESERVED_BYTES
    return next((c for c in configs if c.shared_bytes(dim, q_bytes, kv_bytes) <= limit), configs[-1])


def decode_config(gpu: Gpu, dim: int, q_bytes: int, kv_bytes: int, block_m: int) -> Config:
    """For rows of few tokens, whose tile is only as high as it must be."""
    configs = [Config(0, block_n, 4, num_stages) for block_n, num_stages in DECODE]
    limit = (gpu.shared_bytes - RESERVED_BYTES) // PROGRAMS_PER_SM
    return next((c for c in configs if c.shared_bytes(dim, q_bytes, kv_bytes, block_m) <= limit), configs[-1])


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def _largest_tile(q_bytes: int) -> int:
    """Entries of a query tile whose sums stay in registers (float32 products are made without tensor cores, from fewer)."""
    return 128 * 128 if q_bytes < 4 else 64 * 64
