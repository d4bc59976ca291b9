"""The contract of a weight format: how a linear layer's weights are stored, repacked, applied and read back."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lab.contracts.plugin import Plugin

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear layer y_TO = x_TI @ w_OI^T (+ bias). `parts` are the output sizes of layers fused into this one."""

    name: str
    in_features: int  # I
    out_features: int  # O
    dtype: "torch.dtype"
    device: "torch.device"
    parts: tuple[tuple[str, int], ...]  # (checkpoint name of the part, its rows); one part when nothing is fused
    bias: bool = False
    gated: bool = False  # the product is gate and up side by side, of which only silu(gate) * up is wanted
    batch_invariant: bool = False  # a row must get the same bits whatever rows stand beside it: the feature of that name


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One stored tensor of a linear layer, whole (all parts). `shard_dim` is the dimension along the output parts."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"
    shard_dim: int | None = 0


class Quant(Plugin):
    """A weight format."""

    libraries: ClassVar[Mapping[str, Sequence[Path]]] = {}  # C++ that it loads on the CPU by lab.native: name, sources

    @classmethod
    def detect(cls, hf_config: dict[str, Any]) -> bool:
        """Whether a checkpoint with this config.json is of this format."""
        return False

    def wants(self, spec: LinearSpec) -> bool:
        """Whether this layer is quantized; a layer it does not want is kept in the model's own dtype."""
        return True

    @abstractmethod
    def params(self, spec: LinearSpec) -> dict[str, ParamSpec]:
        """The tensors that the checkpoint holds for this layer, by the suffix of their name (bias not included)."""

    @abstractmethod
    def finish(self, w: "dict[str, torch.Tensor]", spec: LinearSpec) -> "dict[str, torch.Tensor]":
        """Repack the loaded tensors once for `apply`."""

    @abstractmethod
    def apply(self, w: "dict[str, torch.Tensor]", x_TI: "torch.Tensor", spec: LinearSpec) -> "torch.Tensor":
        """y_TO without the bias; traceable by torch.compile, or one custom op."""

    def argmax(self, w: "dict[str, torch.Tensor]", x_TI: "torch.Tensor", spec: LinearSpec) -> "torch.Tensor | None":
        """ids_T (int64): the index of the largest entry of each row of `apply`, found without storing the product.

        It is the id that comparing the whole product would give: entries are compared as `apply` rounds them, the lowest id
        wins among equals, and the first entry that is not a number wins over all. None where the format has no such product;
        the caller then compares what `apply` returns. The layer has no bias.
        """
        return None

    def gated(self, w: "dict[str, torch.Tensor]", x_TI: "torch.Tensor", spec: LinearSpec) -> "torch.Tensor | None":
        """silu(gate) * up (T, O / 2) of a layer whose `spec.gated` is set, without storing what `apply` returns.

        Rounded as if it were computed from that. None where the format has no such product.
        """
        return None

    @abstractmethod
    def dequantize(self, w: "dict[str, torch.Tensor]", spec: LinearSpec) -> "torch.Tensor":
        """w_OI in float32 from the finished tensors: the oracle that `apply` is tested against."""
