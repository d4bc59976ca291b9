"""Which captured shape a step runs on: pure policy, no device and no torch in it.

A mode says how the forward pass of decode steps and of other (mixed) steps is run: `full`, all of it as one captured graph,
attention included; `piecewise`, captured pieces with attention between them; `none`, nothing captured (compiled pieces, if
there are any, are called one by one).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.capabilities import GRAPH_SUPPORT

Mode = Literal["none", "piecewise", "full"]

GRAPH_MODES: dict[str, tuple[Mode, Mode]] = {  # (decode steps, mixed steps)
    "none": ("none", "none"),
    "piecewise": ("piecewise", "piecewise"),
    "full": ("full", "full"),
    "full_decode_only": ("full", "none"),
    "full_and_piecewise": ("full", "piecewise"),
}


@dataclass(frozen=True, slots=True)
class BatchKey:
    """A shape that a step runs on. Equal keys share one captured graph."""

    mode: Mode
    num_tokens: int  # padding included
    num_rows: int = 0  # rows that attention is planned for, padding included; 0 where the graph does not depend on it
    uniform_q: int = 0  # tokens of every row, in a graph of uniform rows; 0 in others


@dataclass(frozen=True, slots=True)
class Modes:
    """What decode and mixed steps run on, and why that is less than what was asked for."""

    decode: Mode
    mixed: Mode
    reasons: tuple[str, ...] = ()


def settle(asked: str, *, graph_support: str, has_pieces: bool, uniform_q: int) -> Modes:
    """The modes to use for `asked`, lowered to what the attention plugin and the compiled pieces allow.

    Args:
        graph_support: the least that any attention backend of the run declares (never, decode, uniform, any).
        uniform_q: tokens of a row in a decode step: 1, or 1 + drafts.
    """
    decode, mixed = GRAPH_MODES[asked]
    support, reasons = GRAPH_SUPPORT.index(graph_support), []
    below = "piecewise" if has_pieces else "none"
    if mixed == "full" and support < GRAPH_SUPPORT.index("any"):
        mixed = below
        reasons.append(f"mixed steps run {mixed}: attention declares graph support '{graph_support}', full needs 'any'")
    needed = "decode" if uniform_q == 1 else "uniform"
    if decode == "full" and support < GRAPH_SUPPORT.index(needed):
        decode = below
        reasons.append(f"decode steps run {decode}: attention declares graph support '{graph_support}', full needs '{needed}'")
    if not has_pieces and "piecewise" in (decode, mixed):
        decode, mixed = ("none" if mode == "piecewise" else mode for mode in (decode, mixed))
        reasons.append("nothing runs piecewise: compile.mode=none makes no pieces")
    return Modes(decode, mixed, tuple(reasons))


def derived_sizes(max_rows: int, uniform_q: int, max_tokens: int) -> tuple[int, ...]:
    """Token counts to capture when none are given: dense where batches are small, up to twice a full decode step."""
    top = min(2 * max_rows * uniform_q, max_tokens, 512)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), max_rows * uniform_q, top}
    return tuple(sorted(size for size in sizes if size <= top))


class Dispatcher:
    """Chooses a key for each step.

    With `sizes`, keys are those of `keys` and a step is padded up to the next of them; a step larger than all of them runs
    uncaptured. With None, any shape will do (the CPU, where a compiled callable takes every size): nothing is padded.

    A decode step has `uniform_q` tokens in every row, or one: where drafts are not worth verifying there are none.
    """

    def __init__(self, modes: Modes, sizes: Sequence[int] | None, *, max_rows: int, uniform_q: int = 1) -> None:
        self.modes = modes
        self.sizes = None if sizes is None else tuple(sorted(set(sizes)))
        self._max_rows = max_rows
        self.uniform_q = uniform_q
        self._uniform_sizes = {q: self._sizes_of_uniform_rows(q) for q in {1, uniform_q}}

    def _sizes_of_uniform_rows(self, q: int) -> tuple[int, ...]:
        limit = self._max_rows * q
        return tuple(sorted({min(-(-size // q) * q, limit) for size in self.sizes or ()}))

    @property
    def keys(self) -> tuple[BatchKey, ...]:
        """Every key that can be dispatched to a captured graph, largest first: the order in which to capture."""
        keys = set()
        if self.modes.decode != "none":
            keys |= {self._decode_key(size, q) for q, sizes in self._uniform_sizes.items() for size in sizes}
        if self.modes.mixed != "none":
            keys |= {self._mixed_key(size) for size in self.sizes or ()}
        return tuple(sorted(keys, key=lambda key: (-key.num_tokens, key.mode, key.uniform_q)))

    def dispatch(self, num_tokens: int, num_rows: int, *, uniform: bool) -> BatchKey:
        """The key for a step of so many tokens in so many rows; `uniform`: every row has `uniform_q` tokens."""
        q = 1 if num_tokens == num_rows else self.uniform_q
        is_decode = num_tokens == num_rows * q and (uniform or q == 1)
        mode = self.modes.decode if is_decode else self.modes.mixed
        if mode == "none":
            return BatchKey("none", num_tokens)
        sizes = self._uniform_sizes[q] if is_decode else self.sizes
        if self.sizes is None:
            size = num_tokens
        else:
            index = bisect_left(sizes, num_tokens)
            if index == len(sizes):
                return BatchKey("none", num_tokens)
            size = sizes[index]
        return self._decode_key(size, q) if is_decode else self._mixed_key(size)

    def _decode_key(self, size: int, q: int) -> BatchKey:
        if self.modes.decode == "full":
            return BatchKey("full", size, size // q, q)
        return BatchKey("piecewise", size)

    def _mixed_key(self, size: int) -> BatchKey:
        if self.modes.mixed == "full":
            return BatchKey("full", size, min(size, self._max_rows))
        return BatchKey("piecewise", size)
