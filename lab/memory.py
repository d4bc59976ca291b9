"""CPU memory in huge pages: what is read from end to end at every step (weights, the KV pool) is found faster in it.

With 4 KiB pages a decode step of a small model touches more pages than the processor remembers the places of. Linux gives
2 MiB pages where it is asked to (madvise); elsewhere, and where it refuses, this is ordinary memory. Pages are taken when they
are first written, so memory that is asked for and not used costs nothing.
"""

import ctypes
import functools
import logging
import mmap

import torch

log = logging.getLogger("lab")

HUGE_PAGE = 2 << 20
CHUNK = 64 << 20  # taken from the system at a time
LEAST = 64 << 10  # smaller tensors are left where they are
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of malloc.h
ALIGNMENT = 64  # a cache line, and the widest vector register


def huge_empty(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes (uint8), beginning on a huge page. The memory lives as long as a tensor that views it."""
    pages = -(-num_bytes // HUGE_PAGE) + 1  # one more, to begin on a page
    mapped = mmap.mmap(-1, pages * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel that was built without them
            log.debug("no huge pages: %s", error)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE_PAGE
    return memory[start : start + num_bytes]


def give_back() -> None:
    """Hand freed memory back to the system, where the C library would keep it for later (glibc; elsewhere nothing)."""
    if trim := _malloc_trim():
        trim(0)


def keep_freed() -> None:
    """Let the C library keep freed memory for the next tensor (glibc; elsewhere nothing).

    Asked anew from the system, each page of a large tensor costs a fault when it is first written: for work that makes and
    drops many large tensors, more than what is computed in them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, CHUNK)):
            mallopt(option, value)


@functools.cache
def _malloc_trim():
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HugePages:
    """Moves tensors into huge pages, one behind the other."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's copy in huge pages; the tensor itself where it would not pay: small, not dense, not on the CPU."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return tensor
        if tensor.nbytes < LEAST or not tensor.is_contiguous():
            return tensor
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._free):
            self._free = huge_empty(max(size, CHUNK))
        place, self._free = self._free[: tensor.nbytes], self._free[size:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
