"""Order among the tokens of a row, the same on every device: larger logit first, and among equals the lower id.

Rows are a vocabulary long and only few of their entries matter, so a row is first reduced to the maxima (or sums) of
blocks, in one pass at memory speed, and the exact work is done inside the few blocks that can hold the answer.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

ARGMAX_BLOCK = 128
SUM_BLOCK = 256
TOP_BLOCKS = (32, 64)  # torch reduces shorter blocks several times more slowly

ENTRIES_AT_ONCE = {"cpu": 2**19, "cuda": 2**27}  # of vocabulary-wide work: on a CPU so much stays in the cache

_LOW_32 = 0xFFFFFFFF


def first_argmax(x_LV: Tensor) -> Tensor:
    """The id of the largest entry of each row, the lowest one among equals: int64 of shape L."""
    if x_LV.shape[1] <= 2 * ARGMAX_BLOCK:
        return x_LV.argmax(-1)
    block_L1 = _reduce_blocks(x_LV, ARGMAX_BLOCK, torch.amax).argmax(-1, keepdim=True)
    ids_LB = _ids_of_blocks(block_L1, ARGMAX_BLOCK).clamp_(max=x_LV.shape[1] - 1)
    return ids_LB.gather(1, x_LV.gather(1, ids_LB).argmax(-1, keepdim=True)).squeeze(1)


def top(x_WV: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The `num` largest entries of each row in order: values (float32) and ids (int64), both of shape W x num.

    Every one of the `num` largest entries lies in one of the `num` blocks that come first when blocks are ordered by their
    maxima, so two small sorts replace one over the vocabulary. Ids are part of the sorted keys: the result does not depend
    on the algorithm that sorts them.
    """
    vocab_size = x_WV.shape[1]
    assert 0 < num <= vocab_size, f"top {num} of {vocab_size}"
    block = _block_for_top(vocab_size, num)
    if block == 1:
        ids_WX = torch.arange(vocab_size, device=x_WV.device).expand(x_WV.shape)
        values_WX = x_WV
    else:
        maxima_WX = _reduce_blocks(x_WV, block, torch.amax)
        blocks_WX = torch.arange(maxima_WX.shape[1], device=x_WV.device).expand(maxima_WX.shape)
        blocks_WX = _first_ids(maxima_WX, blocks_WX, num)
        ids_WX = _ids_of_blocks(blocks_WX, block)
        values_WX = _blocks(x_WV, blocks_WX, block, ids_WX)
    ids_WK = _first_ids(values_WX, ids_WX, num)
    return x_WV.gather(1, ids_WK), ids_WK


def num_larger(x_WV: Tensor, value_W1: Tensor) -> Tensor:
    """How many entries of each row are strictly larger than the row's value: int64 of shape W."""
    larger_WV = (x_WV > value_W1).view(torch.uint8)  # a block holds fewer than 256 of them, so uint8 cannot overflow
    return _reduce_blocks(larger_WV, ARGMAX_BLOCK, _sum_uint8).sum(-1, dtype=torch.int64)


def block_sums(weights_WV: Tensor) -> Tensor:
    """Sums of consecutive blocks of SUM_BLOCK entries, in float64: shape W x number of blocks."""
    return _reduce_blocks(weights_WV, SUM_BLOCK, torch.sum).double()


def pick(weights_WV: Tensor, uniform_W: Tensor) -> Tensor:
    """Draw one id from each row by inverse CDF over ids: the first whose running sum exceeds uniform * total.

    The search runs over block sums and then inside one block, in float64. The comparison is strict, so an entry of weight
    zero is never chosen; where rounding makes a block's entries sum to less than the block's sum, the last entry of
    positive weight is taken, so the search never runs off the end.

    Args:
        weights_WV: float32, not negative, each row with a positive sum; they need not sum to one.
        uniform_W: float64 in [0, 1).
    """
    running_WX = block_sums(weights_WV).cumsum(-1)
    target_W1 = uniform_W.unsqueeze(1) * running_WX[:, -1:]
    block_W1 = (running_WX <= target_W1).sum(-1, keepdim=True).clamp_(max=running_WX.shape[1] - 1)
    before_W1 = running_WX.gather(1, (block_W1 - 1).clamp_(min=0)).masked_fill_(block_W1 == 0, 0.0)
    ids_WB = _ids_of_blocks(block_W1, min(SUM_BLOCK, weights_WV.shape[1]))
    inside_W = pick_short(_gather_inside(weights_WV, ids_WB, 0.0).double(), (target_W1 - before_W1).squeeze(1))
    return ids_WB.gather(1, inside_W.unsqueeze(1)).squeeze(1)


def pick_short(weights_WK: Tensor, target_W: Tensor) -> Tensor:
    """The first index whose running sum exceeds the row's target, or the last one of positive weight. Weights are float64."""
    index_W = (weights_WK.cumsum(-1) <= target_W.unsqueeze(1)).sum(-1)
    places_K = torch.arange(weights_WK.shape[1], device=weights_WK.device)
    last_W = ((weights_WK > 0) * places_K).amax(-1)
    return torch.minimum(index_W, last_W)


def parts(rows: np.ndarray, x_WV: Tensor, *, row_by_row: bool = False) -> Iterator[np.ndarray]:
    """Rows of x in parts that bound the temporaries of vocabulary-wide work; `row_by_row`: each by itself.

    A row by itself is reduced in the same order always. Among others it need not be: on CUDA torch chooses by their number.
    """
    size = 1 if row_by_row else max(1, ENTRIES_AT_ONCE[x_WV.device.type] // x_WV.shape[1])
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _block_for_top(vocab_size: int, num: int) -> int:
    """The size of blocks that leaves the fewest entries to sort; 1 when blocks would not pay."""
    block = min(TOP_BLOCKS, key=lambda size: vocab_size // size + num * size)
    return block if 2 * (vocab_size // block + num * block) <= vocab_size else 1


def _sum_uint8(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim, dtype=torch.uint8)


def _reduce_blocks(x_WV: Tensor, block: int, reduce) -> Tensor:
    """Reduce consecutive blocks of a row; the last one may be shorter."""
    whole = x_WV.shape[1] // block * block
    parts = [reduce(x_WV[:, :whole].unflatten(1, (-1, block)), dim=-1)] if whole else []
    if whole < x_WV.shape[1]:
        parts.append(reduce(x_WV[:, whole:], dim=-1).unsqueeze(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _ids_of_blocks(blocks_WX: Tensor, block: int) -> Tensor:
    """The ids that these blocks cover, which may reach past the vocabulary in its last block."""
    return (blocks_WX.unsqueeze(-1) * block + torch.arange(block, device=blocks_WX.device)).flatten(1)


def _blocks(x_WV: Tensor, blocks_WX: Tensor, block: int, ids_WX: Tensor) -> Tensor:
    """The entries of these blocks, -inf past the vocabulary. Whole blocks are several times faster to copy than entries."""
    if x_WV.shape[1] % block:
        return _gather_inside(x_WV, ids_WX, -torch.inf)
    num_blocks = x_WV.shape[1] // block
    first_W1 = torch.arange(0, len(x_WV) * num_blocks, num_blocks, device=x_WV.device).unsqueeze(1)
    return x_WV.reshape(-1, block).index_select(0, (blocks_WX + first_W1).flatten()).view(len(x_WV), -1)


def _gather_inside(x_WV: Tensor, ids_WX: Tensor, outside: float) -> Tensor:
    """x at these ids, and `outside` for ids past the vocabulary."""
    vocab_size = x_WV.shape[1]
    values_WX = x_WV.gather(1, ids_WX.clamp(max=vocab_size - 1))
    return values_WX.masked_fill_(ids_WX >= vocab_size, outside)


def _first_ids(values_WX: Tensor, ids_WX: Tensor, num: int) -> Tensor:
    """The ids of the `num` largest values in order, ties by id.

    A value and its id make one int64 key that sorts ascending: the bits of the float, made monotone and negated, above
    the id. On the CPU numpy's vectorised selection and sort are several times faster than torch's sort and topk.
    """
    bits_WX = (values_WX + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    monotone_WX = bits_WX ^ ((bits_WX >> 31) & 0x7FFFFFFF)
    keys_WX = torch.add(ids_WX, monotone_WX, alpha=-(2**32))
    if keys_WX.is_cpu:
        keys = keys_WX.numpy()
        if num < keys.shape[1]:
            keys = np.partition(keys, num - 1, axis=-1)[:, :num]
        first_WK = torch.from_numpy(np.sort(keys, axis=-1))
    else:
        first_WK = keys_WX.topk(num, largest=False, sorted=True).values
    return first_WK & _LOW_32
