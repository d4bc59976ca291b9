"""The inputs of a step on the host, and the persistent buffers on the device that captured graphs read them from."""

from dataclasses import dataclass

import numpy as np
import torch

PADDING_SLOT = -1
SHARED = ("input_ids_T", "positions_T", "q_start_R1", "ctx_len_R", "logits_idx_L")  # the same for every KV group


@dataclass(frozen=True, slots=True)
class HostTable:
    """What of a step is each KV group's own."""

    slots_T: np.ndarray
    blocks_RM: np.ndarray


@dataclass(frozen=True, slots=True)
class HostTrees:
    """The arrays of a `BatchTrees`."""

    start_R: np.ndarray
    ancestors_T: np.ndarray

    def padded(self, num_tokens: int, num_rows: int) -> "HostTrees":
        return HostTrees(np.pad(self.start_R, (0, num_rows)), np.pad(self.ancestors_T, (0, num_tokens)))


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The arrays of a `Batch`, by the same names; `tables` has those of each KV group."""

    input_ids_T: np.ndarray
    positions_T: np.ndarray
    q_start_R1: np.ndarray
    ctx_len_R: np.ndarray
    logits_idx_L: np.ndarray
    tables: list[HostTable]
    trees: HostTrees | None = None

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array; a group's number follows the name of its own."""
        found = {name: getattr(self, name) for name in SHARED}
        for group, table in enumerate(self.tables):
            found[f"slots_T {group}"], found[f"blocks_RM {group}"] = table.slots_T, table.blocks_RM
        if self.trees is not None:
            found["tree_start_R"], found["ancestors_T"] = self.trees.start_R, self.trees.ancestors_T
        return found

    def padded(self, num_tokens: int, num_rows: int) -> "HostBatch":
        """With padding tokens (id 0, position 0, no slot) and padding rows (no tokens, no context) behind the real ones."""
        tokens, rows = num_tokens - len(self.input_ids_T), num_rows - len(self.ctx_len_R)
        if not tokens and not rows:
            return self
        return HostBatch(
            input_ids_T=np.pad(self.input_ids_T, (0, tokens)),
            positions_T=np.pad(self.positions_T, (0, tokens)),
            q_start_R1=np.pad(self.q_start_R1, (0, rows), mode="edge"),
            ctx_len_R=np.pad(self.ctx_len_R, (0, rows)),
            logits_idx_L=self.logits_idx_L,
            tables=[
                HostTable(
                    np.pad(table.slots_T, (0, tokens), constant_values=PADDING_SLOT),
                    np.pad(table.blocks_RM, ((0, rows), (0, 0))),
                )
                for table in self.tables
            ],
            trees=None if self.trees is None else self.trees.padded(tokens, rows),
        )


class InputBuffers:
    """Device tensors for the largest step, and pinned host mirrors from which they are copied without waiting.

    A mirror is written again only after the copy that reads it is over.
    """

    def __init__(self, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device, num_groups: int = 1) -> None:
        shapes = {
            "input_ids_T": ((max_tokens,), torch.int32),
            "positions_T": ((max_tokens,), torch.int64),
            "q_start_R1": ((max_rows + 1,), torch.int32),
            "ctx_len_R": ((max_rows,), torch.int32),
            "logits_idx_L": ((max_tokens,), torch.int64),
            "tree_start_R": ((max_rows,), torch.int32),
            "ancestors_T": ((max_tokens,), torch.int64),
        }
        for group in range(num_groups):
            shapes[f"slots_T {group}"] = (max_tokens,), torch.int64
            shapes[f"blocks_RM {group}"] = (max_rows, max_blocks), torch.int32
        is_cuda = device.type == "cuda"
        self._device = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}
        self._host = {name: torch.zeros(shape, dtype=dtype, pin_memory=is_cuda) for name, (shape, dtype) in shapes.items()}
        self._views = {name: tensor.numpy() for name, tensor in self._host.items()}
        self._copied = torch.cuda.Event() if is_cuda else None

    def fill(self, host: HostBatch) -> dict[str, torch.Tensor]:
        """Copy a step's arrays in; returns the parts of the buffers that hold them. Block tables keep their full width."""
        if self._copied is not None:
            self._copied.synchronize()
        tensors = {}
        for name, array in host.arrays().items():
            count = len(array)
            if array.ndim == 2:
                self._views[name][:count, : array.shape[1]] = array
                self._views[name][:count, array.shape[1] :] = 0
            else:
                self._views[name][:count] = array
            tensors[name] = self._device[name][:count]
            tensors[name].copy_(self._host[name][:count], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return tensors
