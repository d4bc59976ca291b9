"""The Triton kernels of `flash`: writing the paged cache, and attention over it with an online softmax.

Attention follows FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691): a program owns a tile of queries and walks over
tiles of keys. The query heads of one KV head stand side by side in the tile, so that each key is loaded once for all of them.
Rows with few tokens (decodes, draft verification) may have their keys cut into splits that are reduced afterwards
(flash-decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

Launch grids follow from padded sizes alone: programs that find no work exit. Scores are kept in units of log2, so that exp2
serves. A quantized cache is read as its numbers: the scales of keys go into the scores, those of values into the weights.
KV_SCALES is one of the constants below, HEAD_SIZE the entries of the cache for one block and KV head, scales included.
Names: M query rows of a tile (token m // GROUP, head m % GROUP), N keys of a tile, D head dim padded to a power of two.
"""

from .decode import decode_kernel, reduce_kernel
from .prefill import prefill_kernel
from .shared import merge_kernel, shared_kernel
from .walk import HEAD, NONE, TOKEN_HEAD
from .write import write_kernel

__all__ = [
    "HEAD",
    "NONE",
    "TOKEN_HEAD",
    "decode_kernel",
    "merge_kernel",
    "prefill_kernel",
    "reduce_kernel",
    "shared_kernel",
    "write_kernel",
]
