"""The decoder: one implementation for the whole family of Llama-like models, whose differences are data in ModelConfig."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn

from lab.contracts.quant import LinearSpec, Quant
from lab.model.config import ModelConfig
from lab.model.layers.attention import AttentionLayer
from lab.model.layers.embed import Embedding
from lab.model.layers.fused import Formulas
from lab.model.layers.linear import Linear
from lab.model.layers.norm import RMSNorm
from lab.model.layers.rope import Rope


@dataclass(frozen=True)
class Build:
    """What every layer is built with.

    `plain` serves the linear layers that `quant` does not want, `fused` is what runs between linear layers.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    quant: Quant
    plain: Quant
    fused: Formulas
    max_model_len: int
    batch_invariant: bool = False

    def linear(
        self, name: str, in_features: int, parts: tuple[tuple[str, int], ...], *, bias: bool = False, gated: bool = False
    ) -> Linear:
        """A linear layer known as `name`, whose parts have these checkpoint names and rows."""
        rows = sum(size for _, size in parts)
        spec = LinearSpec(name, in_features, rows, self.dtype, self.device, parts, bias, gated, self.batch_invariant)
        return Linear(spec, self.quant if self.quant.wants(spec) else self.plain)

    def for_config(self, config: ModelConfig) -> "Build":
        """To build unquantized layers of another shape."""
        return dataclasses.replace(self, config=config, quant=self.plain)

    def norm(self, name: str, size: int) -> RMSNorm:
        config = self.config
        return RMSNorm(name, size, config.rms_norm_eps, self.dtype, self.device, self.fused, has_offset=config.norm_offset)


def attention_layer(config: ModelConfig, layer: int, at: str) -> AttentionLayer:
    """The attention of layer number `layer`, known to the checkpoint as `at`."""
    return AttentionLayer(
        layer,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.attention_scale or config.head_dim**-0.5,
        sliding_window=config.layer_windows[layer],
        softcap=config.attention_softcap,
        name=at,
    )


class SelfAttention(nn.Module):
    """Projections, rotary positions and the attention layer."""

    def __init__(self, build: Build, at: str, layer: int, *, in_features: int | None = None) -> None:
        """`in_features`: of the projections, where they are not the hidden size."""
        super().__init__()
        config = build.config
        self._rotate = build.fused.rotate
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if config.fused_checkpoint:
            parts = ((f"{at}.qkv_proj", q_rows + 2 * kv_rows),)
        else:
            parts = ((f"{at}.q_proj", q_rows), (f"{at}.k_proj", kv_rows), (f"{at}.v_proj", kv_rows))
        self.qkv_proj = build.linear(f"{at}.qkv_proj", in_features or config.hidden_size, parts, bias=config.qkv_bias)
        self.q_norm = build.norm(f"{at}.q_norm", self.head_dim) if config.qk_norm else None
        self.k_norm = build.norm(f"{at}.k_norm", self.head_dim) if config.qk_norm else None
        self.attention = attention_layer(config, layer, at)
        o_parts = ((f"{at}.o_proj", config.hidden_size),)
        self.o_proj = build.linear(f"{at}.o_proj", q_rows, o_parts, bias=config.output_bias)

    def forward(self, hidden_TD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = self.qkv_proj(hidden_TD).unflatten(1, (-1, self.head_dim))
        num_rotated = self.num_heads + self.num_kv_heads
        if self.q_norm is None:
            qk = self._rotate(heads[:, :num_rotated], cos, sin)  # queries and keys in one go
            q_TNH, k_TKH = qk[:, : self.num_heads], qk[:, self.num_heads :]
        else:
            q_TNH = self._rotate(self.q_norm(heads[:, : self.num_heads]), cos, sin)
            k_TKH = self._rotate(self.k_norm(heads[:, self.num_heads : num_rotated]), cos, sin)
        return self.o_proj(self.attention(q_TNH, k_TKH, heads[:, num_rotated:]))


class FeedForward(nn.Module):
    """SwiGLU or GeGLU: down(act(gate x) * up x), act being silu or gelu (Shazeer, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, build: Build, at: str) -> None:
        super().__init__()
        hidden, inner, bias = build.config.hidden_size, build.config.intermediate_size, build.config.mlp_bias
        if build.config.fused_checkpoint:
            parts = ((f"{at}.gate_up_proj", 2 * inner),)
        else:
            parts = ((f"{at}.gate_proj", inner), (f"{at}.up_proj", inner))
        is_silu = build.config.activation == "silu"
        self.gate_up_proj = build.linear(f"{at}.gate_up_proj", hidden, parts, bias=bias, gated=is_silu and not bias)
        self.down_proj = build.linear(f"{at}.down_proj", inner, ((f"{at}.down_proj", hidden),), bias=bias)
        self._act_mul = build.fused.silu_mul if is_silu else build.fused.gelu_mul

    def forward(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        gated_TF = self.gate_up_proj.gated(hidden_TD)
        return self.down_proj(self._act_mul(self.gate_up_proj(hidden_TD)) if gated_TF is None else gated_TF)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual path; with output_norms before another norm too."""

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        at, size, config = f"model.layers.{layer}", build.config.hidden_size, build.config
        self.is_local = config.local_rope is not None and config.layer_windows[layer] is not None
        self.input_norm = build.norm(f"{at}.input_layernorm", size)
        self.self_attention = SelfAttention(build, f"{at}.self_attn", layer)
        self.attention_output_norm: RMSNorm | None = None
        self.feed_forward_output_norm: RMSNorm | None = None
        if config.output_norms:  # whose names are not what the others' would suggest
            self.attention_output_norm = build.norm(f"{at}.post_attention_layernorm", size)
            self.post_attention_norm = build.norm(f"{at}.pre_feedforward_layernorm", size)
            self.feed_forward_output_norm = build.norm(f"{at}.post_feedforward_layernorm", size)
        else:
            self.post_attention_norm = build.norm(f"{at}.post_attention_layernorm", size)
        self.feed_forward = FeedForward(build, f"{at}.mlp")

    def forward(
        self, hidden_TD: torch.Tensor, delta_TD: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual path, and what is to be added to it: each sum is made in one pass with the norm that reads it."""
        if delta_TD is None:
            normed_TD = self.input_norm(hidden_TD)
        else:
            normed_TD, hidden_TD = self.input_norm.of_sum(hidden_TD, delta_TD)
        delta_TD = self.self_attention(normed_TD, cos, sin)
        if self.attention_output_norm is not None:
            delta_TD = self.attention_output_norm(delta_TD)
        normed_TD, hidden_TD = self.post_attention_norm.of_sum(hidden_TD, delta_TD)
        delta_TD = self.feed_forward(normed_TD)
        if self.feed_forward_output_norm is not None:
            delta_TD = self.feed_forward_output_norm(delta_TD)
        return hidden_TD, delta_TD


class Decoder(nn.Module):
    """The model. Tokens of all rows lie one after another; rows are told apart by the attention layers alone.

    `aux_layers` are layers whose inputs (the residual path) are asked for beside the result, by a proposer of drafts that
    works on them; layer number num_layers stands for what enters the final norm.
    """

    aux_layers: tuple[int, ...] = ()
    states_width = 0  # it takes nothing but ids and positions

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.build = build
        config = build.config
        size = config.vocab_size, config.hidden_size
        self.embed = Embedding(
            "model.embed_tokens", *size, build.dtype, build.device, build.fused, scaled=config.scaled_embedding
        )
        self.layers = nn.ModuleList(DecoderLayer(build, layer) for layer in range(config.num_layers))
        self.norm = build.norm("model.norm", config.hidden_size)
        self.rope = Rope(config.rope, build.max_model_len, build.device, build.fused)
        self.local_rope: Rope | None = None
        if config.local_rope is not None:
            self.local_rope = Rope(config.local_rope, build.max_model_len, build.device, build.fused)
        self._softcap = config.logits_softcap
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self.fused, self.batch_invariant = build.fused, build.batch_invariant
        self.lm_head = build.linear("lm_head", config.hidden_size, ((head, config.vocab_size),))

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [layer.self_attention.attention for layer in self.layers]

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """hidden_TD after the final norm, or all that `split` takes apart; the step's forward context must be open."""
        turns = self.rope(positions_T)
        local_turns = turns if self.local_rope is None else self.local_rope(positions_T)
        hidden_TD, delta_TD = self.embed(input_ids_T), None
        aux = {}
        for index, layer in enumerate(self.layers):
            if index in self.aux_layers:
                aux[index] = hidden_TD if delta_TD is None else hidden_TD + delta_TD
            hidden_TD, delta_TD = layer(hidden_TD, delta_TD, *(local_turns if layer.is_local else turns))
        normed_TD, hidden_TD = self.norm.of_sum(hidden_TD, delta_TD)
        if not self.aux_layers:
            return normed_TD
        aux[len(self.layers)] = hidden_TD
        return torch.stack([normed_TD, *(aux[index] for index in self.aux_layers)])

    def split(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What `forward` gave, as hidden_TD and aux_ATD in the order of `aux_layers`, None when there are none."""
        return (output[0], output[1:]) if self.aux_layers else (output, None)

    def logits(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """logits_LV in float32."""
        logits_LV = self.lm_head(hidden_LD).float()
        return logits_LV if self._softcap is None else torch.tanh(logits_LV / self._softcap) * self._softcap

    def head_of(self, ids: torch.Tensor | None) -> Linear:
        """A vocabulary projection onto these tokens alone; None: the head itself."""
        if ids is None:
            return self.lm_head
        weight_OI = self.lm_head.quant.dequantize(self.lm_head.weights, self.lm_head.spec)[ids.to(self.build.device)]
        plain = self.build.for_config(self.build.config)
        part = plain.linear("lm_head", self.build.config.hidden_size, (("lm_head", len(ids)),))
        part.keep(part.quant.finish({"weight": weight_OI.to(self.build.dtype)}, part.spec))
        return part

    def greedy(self, hidden_LD: torch.Tensor) -> torch.Tensor | None:
        """ids_L of the largest logits, the lowest among equals, without the logits; None where they have to be computed.

        Capped logits may be equal where those before are not.
        """
        return None if self._softcap is not None else self.lm_head.argmax(hidden_LD)
