"""The target's hidden states of texts that are learnt from more than once: computed in the first epoch, then read from disk.

A file without a name holds them, so that nothing is left behind however the training ends. The system keeps in memory what fits
there; the rest is streamed.
"""

import itertools
import mmap
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


class KeptStates:
    """A row of `width` numbers for each token of texts that are known by their numbers, 0 and up."""

    def __init__(self, folder: Path, lengths: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self._start = [0, *itertools.accumulate(lengths)]
        self._is_there = [False] * len(lengths)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(max(self._start[-1], 1) * width * dtype.itemsize)
            mapped = mmap.mmap(file.fileno(), 0)
        self._rows = torch.frombuffer(mapped, dtype=dtype).view(-1, width)

    def read(self, numbers: Sequence[int], longest: int, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The rows of these texts, each padded to `longest` (with anything that is finite). `compute` gives them all anew."""
        if not all(self._is_there[number] for number in numbers):
            found = compute()
            for index, number in enumerate(numbers):
                rows = self._of(number)
                rows.copy_(found[index * longest : index * longest + len(rows)])
                self._is_there[number] = True
            return found
        found = self._rows.new_zeros(len(numbers) * longest, self._rows.shape[1])
        for index, number in enumerate(numbers):
            rows = self._of(number)
            found[index * longest : index * longest + len(rows)] = rows
        return found

    def _of(self, number: int) -> torch.Tensor:
        return self._rows[self._start[number] : self._start[number + 1]]
