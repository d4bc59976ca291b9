"""The contract of an attention plugin: one class, and one `Plan` of its own."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from lab.contracts.plugin import Plugin

if TYPE_CHECKING:
    import torch

    from lab.registry import Entry
    from lab.runner.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer's shape. Layers with equal specs share a backend object and a plan."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    scale: float
    block_size: int  # B
    dtype: "torch.dtype"
    kv_dtype: "torch.dtype"
    device: "torch.device"
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    softcap: float | None = None
    kv_scales: Literal["none", "token_head", "head"] = "none"  # of a quantized kv_dtype (float8_e4m3fn, int8): see Attention
    # a token must get the same bits whatever rows and tokens are computed beside it: asked only of the feature of that name
    batch_invariant: bool = False
    has_sinks: bool = False  # the softmax has one more term for each query head, a logit of the layer's: see Attention


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator of torch.ops that returns nothing, and its arguments by name: q, k, v, out, slots, kv, or a field of the
    plan that holds a tensor."""

    operator: "torch._ops.OpOverload"
    arguments: tuple[str, ...]


class Attention(Plugin):
    """Paged attention over a cache whose layout is the plugin's own.

    Shapes: q_TNH, k_TKH, v_TKH and out_TNH for the T tokens of a step, rows one after another as in `batch.q_start_R1`.

    Of a quantized cache (`spec.kv_scales`) a value is what is stored times a scale, and the scales are part of the layout, so
    that a block's bytes count them. `token_head`: `write` gives each token, KV head and half (keys, values) a scale of its
    own and stores it with the block. `head`: a layer's scales are fixed, one for each half and KV head, and `set_scales` puts
    them into the layer's cache once; what lies beyond them is clipped.

    Of layers with attention sinks (`spec.has_sinks`) each query head has a logit that no key stands behind: its exponential
    counts in the denominator of the softmax (and so in the logsumexp), neither scaled nor capped. `set_sinks` puts a layer's
    into its cache once, for layers of one spec share all else.

    With the feature `tree_verify` a step's drafts may be trees (`batch.trees`, see lab.runner.batch.BatchTrees): a node sees
    the keys of its own path among them, and `move` brings those of the accepted path together afterwards.
    """

    libraries: ClassVar[Mapping[str, Sequence[Path]]] = {}  # C++ that it loads on the CPU by lab.native: name, sources

    @classmethod
    def parts(cls, options: Any) -> "dict[str, tuple[Entry, Any]]":
        """The plugins that it hands its work to, with their options, by what each is for; most do all themselves."""
        return {}

    def __init__(self, options: Any, spec: AttentionSpec) -> None:
        super().__init__(options)
        self.spec = spec

    @abstractmethod
    def kv_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """The shape of one layer's cache of `num_blocks` blocks, keys and values together."""

    @abstractmethod
    def plan(self, batch: "Batch", reuse: Any = None) -> Any:
        """What `attend` needs to know of the step: made once for all layers.

        With `reuse`, an earlier plan of the same batch shape, fill its tensors in place and return it, so that a captured
        graph which reads them sees the new step.
        """

    @abstractmethod
    def write(self, k_TKH: "torch.Tensor", v_TKH: "torch.Tensor", kv: "torch.Tensor", slots_T: "torch.Tensor") -> None:
        """Store keys and values at their slots. Slot -1 is padding and must change nothing."""

    @abstractmethod
    def attend(self, q_TNH: "torch.Tensor", kv: "torch.Tensor", plan: Any, out_TNH: "torch.Tensor") -> None:
        """Causal attention by absolute position over all of the row that is in `kv`, this step's keys included.

        Writes into out_TNH. The outputs of padding tokens must be finite.
        """

    def operators(self) -> Sequence[OperatorCall] | None:
        """What `write` and then `attend` do on the CPU, if it is no more than calls of operators: a compiled step then runs
        them without Python. None: it is more.
        """
        return None

    def attend_lse(
        self, q_TNH: "torch.Tensor", kv: "torch.Tensor", plan: Any, out_TNH: "torch.Tensor", lse_TN: "torch.Tensor"
    ) -> None:
        """As `attend`, and into lse_TN (float32) the natural logsumexp of the scores, scaled and capped, that each query
        sees: parts of one attention are merged by it. Called only where the feature `lse` is declared.
        """
        raise TypeError(f"attention plugin '{self.name}' declares no lse")

    def move(self, kv: "torch.Tensor", from_X: "torch.Tensor", to_X: "torch.Tensor") -> None:
        """Copy what a layer's cache holds at the slots from_X, bit by bit and with any scales of it, to the slots to_X. All is
        read as it was before. Called only where the feature `tree_verify` is declared.
        """
        raise TypeError(f"attention plugin '{self.name}' declares no tree_verify")

    @abstractmethod
    def export_blocks(self, kv: "torch.Tensor", block_ids: "torch.Tensor") -> "torch.Tensor":
        """Copy X blocks out as x_XB2KH (key then value), whatever the layout; if quantized, the values in `spec.dtype`."""

    @abstractmethod
    def load_blocks(self, kv: "torch.Tensor", block_ids: "torch.Tensor", x_XB2KH: "torch.Tensor") -> None:
        """Put blocks in, the inverse of `export_blocks`; a quantized cache rounds them once more."""

    def set_scales(self, kv: "torch.Tensor", scales_2K: "torch.Tensor") -> None:
        """Keep the fixed scales of a layer (float32; keys, then values) in its cache, before anything is written."""
        raise AssertionError(f"attention plugin '{self.name}' was given scales, and declares no quantized KV dtype")

    def set_sinks(self, kv: "torch.Tensor", sinks_N: "torch.Tensor") -> None:
        """Keep the sinks of a layer (float32) in its cache, before anything is attended to."""
        raise AssertionError(f"attention plugin '{self.name}' was given sinks, and does not declare them")
