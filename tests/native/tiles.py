"""Kernels of matrix tiles (AMX) on machines that have none."""

from pathlib import Path

EMULATED = ("-DLAB_EMULATED_TILES",)  # see lab/native/include/lab/tiles.h


def emulated_tiles() -> tuple[str, ...]:
    """The compiler's flags where the processor has no tiles of its own."""
    return () if "amx_tile" in Path("/proc/cpuinfo").read_text().split() else EMULATED
