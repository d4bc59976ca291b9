"""The contract of an expert kernel."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lab.capabilities import Capabilities

if TYPE_CHECKING:
    import torch


class Moe(ABC):
    """Runs the experts of a mixture-of-experts layer (SwiGLU experts: w2(silu(w1 x) * w3 x))."""

    kind: ClassVar[str]
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def pack(self, w13_EGD: "torch.Tensor", w2_EDF: "torch.Tensor") -> Any:
        """Repack once: w13 stacks gate and up projections (G = 2F), w2 is the down projection."""

    @abstractmethod
    def experts(self, x_TD: "torch.Tensor", ids_TA: "torch.Tensor", gates_TA: "torch.Tensor", w: Any) -> "torch.Tensor":
        """y_TD, the gated sum over each token's A experts. An id of -1 is not on this rank and adds nothing."""
