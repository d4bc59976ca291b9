"""The contract of an expert kernel."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from lab.contracts.plugin import Plugin

if TYPE_CHECKING:
    import torch


class Moe(Plugin):
    """Runs the experts of a mixture-of-experts layer (SwiGLU experts: w2(silu(w1 x) * w3 x))."""

    @abstractmethod
    def pack(self, w13_EGD: "torch.Tensor", w2_EDF: "torch.Tensor") -> Any:
        """Repack once: w13 stacks gate and up projections (G = 2F), w2 is the down projection."""

    @abstractmethod
    def experts(self, x_TD: "torch.Tensor", ids_TA: "torch.Tensor", gates_TA: "torch.Tensor", w: Any) -> "torch.Tensor":
        """y_TD, the gated sum over each token's A experts. An id of -1 is not on this rank and adds nothing."""
