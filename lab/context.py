"""The forward context: what the layers of the step in progress may see without its being passed through the model.

The runner opens it around the forward pass; attention layers read it through the custom op `lab::attention`. One context
per process is open at a time: the runner executes steps one after another.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from lab.contracts.attention import Attention
    from lab.runner.batch import Batch


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What one step's forward pass works on, each by attention layer."""

    batches: "list[Batch]"  # the step as the layer's KV group sees it
    backends: "list[Attention]"
    plans: list[Any]
    kv: "list[torch.Tensor]"


_open: list[ForwardContext] = []


def current() -> ForwardContext:
    """The context of the forward pass in progress."""
    assert _open, "no forward pass is in progress"
    return _open[-1]


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one for the forward pass inside the `with` block."""
    _open.append(context)
    try:
        yield
    finally:
        _open.pop()
