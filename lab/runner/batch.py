"""The inputs of one forward pass, gathered from the persistent rows."""

from dataclasses import dataclass

import numpy as np
import torch

from lab.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class Share:
    """One row's true share of a step, once it is known what the step before accepted."""

    row: int
    start: int  # position of its first token
    num_tokens: int
    num_drafts: int  # its last so many tokens are drafts
    samples: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model and the attention plugins see of a step: rows one after another, no padding between them.

    Arrays ending in `_cpu` are host mirrors of the tensors of the same name.
    """

    num_tokens: int  # T
    num_rows: int  # R
    max_q: int  # the longest row's tokens in this step
    max_ctx: int  # the longest row's context
    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64; -1 is padding
    q_start_R1: torch.Tensor  # int32: row r has tokens q_start[r] .. q_start[r + 1] - 1
    ctx_len_R: torch.Tensor  # int32: tokens of the row in the cache once this step has written its own
    blocks_RM: torch.Tensor  # int32 block table; entries past the context are 0
    logits_idx_L: torch.Tensor  # int64: the tokens whose logits are sampled from
    q_start_R1_cpu: np.ndarray
    ctx_len_R_cpu: np.ndarray
    blocks_RM_cpu: np.ndarray


class BatchBuilder:
    """Gathers a `Batch` from the rows; all arithmetic is on the host, one copy to the device each."""

    def __init__(self, rows: Rows, block_size: int, device: torch.device) -> None:
        self._rows = rows
        self._block_size = block_size
        self._device = device

    def build(self, shares: list[Share]) -> Batch:
        rows, block_size = self._rows, self._block_size
        num_rows = len(shares)
        row_R = np.fromiter((s.row for s in shares), np.int64, num_rows)
        start_R = np.fromiter((s.start for s in shares), np.int64, num_rows)
        count_R = np.fromiter((s.num_tokens for s in shares), np.int64, num_rows)
        q_start_R1 = np.zeros(num_rows + 1, np.int32)
        np.cumsum(count_R, out=q_start_R1[1:])
        num_tokens = int(q_start_R1[-1])
        if num_tokens == num_rows:  # one token a row: the usual decode step
            row_T, positions_T = row_R, start_R
        else:
            row_T = np.repeat(row_R, count_R)
            positions_T = np.arange(num_tokens) + np.repeat(start_R - q_start_R1[:-1], count_R)
        ctx_len_R = (start_R + count_R).astype(np.int32)
        max_ctx = int(ctx_len_R.max())
        blocks_RM = rows.blocks_RM[row_R, : -(-max_ctx // block_size)]
        slots_T = rows.blocks_RM[row_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
        return Batch(
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_q=int(count_R.max()),
            max_ctx=max_ctx,
            input_ids_T=self._to_device(rows.tokens_RC[row_T, positions_T]),
            positions_T=self._to_device(positions_T),
            slots_T=self._to_device(slots_T),
            q_start_R1=self._to_device(q_start_R1),
            ctx_len_R=self._to_device(ctx_len_R),
            blocks_RM=self._to_device(blocks_RM),
            logits_idx_L=self._to_device(_logits_index(shares, q_start_R1)),
            q_start_R1_cpu=q_start_R1,
            ctx_len_R_cpu=ctx_len_R,
            blocks_RM_cpu=blocks_RM,
        )

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _logits_index(shares: list[Share], q_start_R1: np.ndarray) -> np.ndarray:
    ends = q_start_R1[1:]
    if all(s.samples and s.num_drafts == 0 for s in shares):
        return ends.astype(np.int64) - 1
    index: list[int] = []
    for share, end in zip(shares, ends.tolist(), strict=True):
        if share.samples:
            index.extend(range(end - 1 - share.num_drafts, end))
    return np.array(index, np.int64)
