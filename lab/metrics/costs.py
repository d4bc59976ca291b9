"""What each part of a step must move and compute, from the model's shape. Torch-free.

Bytes are counted as if every tensor were read or written once by each pass over it: a weight once a step, an activation by
the layer that makes it and by the one that uses it. Smaller tensors may stay in the processor's caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.metrics.roofline import ModelShape

ELEMENTWISE, LM_HEAD, WRITE, ATTEND, SAMPLE = "elementwise", "lm_head", "attention write", "attention attend", "sample"


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes moved and floating point operations."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer: what it is called within its block, its sizes, and its weights' bytes as they are stored."""

    name: str
    in_features: int
    out_features: int
    weights_bytes: int

    def cost(self, num_tokens: int, itemsize: int) -> Cost:
        activations = num_tokens * (self.in_features + self.out_features) * itemsize
        return Cost(self.weights_bytes + activations, 2 * num_tokens * self.in_features * self.out_features)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention layer."""

    num_heads: int
    head_dim: int
    kv_bytes_per_token: int
    window: int | None = None  # tokens that a token sees, None: all


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step had to do: the tokens it computed, the logits it sampled from, and each row's share and context."""

    num_tokens: int  # padding included
    num_logits: int
    q_lens: Sequence[int]
    ctx_lens: Sequence[int]


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The shapes that a step's costs follow from. `linears` are those of the layers, in the order in which they run."""

    model: ModelShape
    linears: Sequence[LinearShape]
    lm_head: LinearShape
    attention: Sequence[AttentionShape]
    itemsize: int  # of an activation

    def of_step(self, step: StepShape, *, reads_logits: bool = True) -> dict[str, Cost]:
        """The cost of each part that has one. Without `reads_logits` the head itself finds the largest, and none is stored."""
        costs: dict[str, Cost] = {ELEMENTWISE: self._elementwise(step.num_tokens)}
        for linear in self.linears:
            costs[linear.name] = costs.get(linear.name, Cost()) + linear.cost(step.num_tokens, self.itemsize)
        costs[LM_HEAD] = self.lm_head.cost(step.num_logits, self.itemsize)
        costs[WRITE] = Cost(2 * step.num_tokens * sum(layer.kv_bytes_per_token for layer in self.attention))
        costs[ATTEND] = sum((self._attend(layer, step) for layer in self.attention), Cost())
        if reads_logits:
            costs[SAMPLE] = Cost(step.num_logits * self.model.vocab_size * 4)
        return costs

    def _attend(self, layer: AttentionShape, step: StepShape) -> Cost:
        seen = [ctx if layer.window is None else min(ctx, layer.window) for ctx in step.ctx_lens]
        pairs = sum(_pairs(q_len, ctx, layer.window) for q_len, ctx in zip(step.q_lens, step.ctx_lens, strict=True))
        width = layer.num_heads * layer.head_dim
        return Cost(sum(seen) * layer.kv_bytes_per_token + 2 * step.num_tokens * width * self.itemsize, 4 * width * pairs)

    def _elementwise(self, num_tokens: int) -> Cost:
        """Embedding, norms with the residual, rotation, activation: each as one fused pass."""
        model = self.model
        norm = 4 * model.hidden_size  # reads the residual and what is added, writes the sum and its normed form
        rotated = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
        activation = 3 * model.intermediate_size
        elements = model.num_layers * (2 * norm + rotated + activation) + 2 * model.hidden_size + norm
        operations = model.num_layers * (2 * 5 * model.hidden_size + 3 * rotated + 5 * model.intermediate_size)
        return Cost(num_tokens * elements * self.itemsize, num_tokens * operations)


def _pairs(q_len: int, ctx_len: int, window: int | None) -> int:
    """How many keys the last `q_len` tokens of a context see together, each those up to its own."""
    first = ctx_len - q_len + 1  # seen by the first of them
    if window is None or ctx_len <= window:
        return q_len * (first + ctx_len) // 2
    num_full = min(q_len, ctx_len - window + 1)  # those that see as many as the window holds
    return num_full * window + (q_len - num_full) * (first + window - 1) // 2
