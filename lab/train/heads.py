"""Draft heads as they are trained: plain modules whose parameters have the names of the published formats.

EAGLE-1 (Li et al., https://arxiv.org/abs/2401.15077): one decoder layer on fc(embedding of the next token, hidden state),
whose result goes to the target's head. EAGLE-3 (Li et al., https://arxiv.org/abs/2503.01840): fc fuses hidden states of
three of the target's layers, the embedding joins them at the attention's input, and training unrolls the head over its own
outputs. Medusa (Cai et al., https://arxiv.org/abs/2401.10774): head k, a residual block and a vocabulary projection,
guesses the token k + 2 further on.

Indices: entry j of a text is made of its hidden state j and token j + 1, and guesses token j + 2. The entries of all texts lie
one after another (T).
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from lab.model.config import ModelConfig
from lab.model.decoder import Decoder
from lab.model.layers.norm import RMSNorm
from lab.train.chain import Chain

SMALL = 0.02  # of weights that begin at random


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exact = x.float()
        return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self._eps) * self.weight).to(x.dtype)


class Attention(nn.Module):
    """The projections of attention; which entries see which is the business of a Chain."""

    def __init__(self, config: ModelConfig, in_features: int) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._size = config.num_heads, config.num_kv_heads, config.head_dim
        q_rows, kv_rows = self._heads * self._size, self._kv_heads * self._size
        self.q_proj = nn.Linear(in_features, q_rows, bias=False)
        self.k_proj = nn.Linear(in_features, kv_rows, bias=False)
        self.v_proj = nn.Linear(in_features, kv_rows, bias=False)
        self.o_proj = nn.Linear(q_rows, config.hidden_size, bias=False)

    def forward(self, x_TD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q_TNH, k_TKH and v_TKH. `cos` and `sin` (T, 1, half) are those of the entries' positions."""
        q, k, v = (projection(x_TD).unflatten(-1, (-1, self._size)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return rotated(q, cos, sin), rotated(k, cos, sin), v


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As lab.model.layers.fused.Formulas.rotate."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest], -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The one decoder layer. EAGLE-1's has no norm at its input, EAGLE-3's norms embedding and hidden state apart."""

    def __init__(self, config: ModelConfig, inner: int, *, fuses: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, 2 * size if fuses else size)
        if fuses:
            self.input_layernorm, self.hidden_norm = Norm(size, eps), Norm(size, eps)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = FeedForward(size, inner)

    def before(
        self, hidden_TD: torch.Tensor, embeds_TD: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Attention's q_TNH, k_TKH and v_TKH."""
        x = hidden_TD
        if embeds_TD is not None:
            x = torch.cat([self.input_layernorm(embeds_TD), self.hidden_norm(hidden_TD)], -1)
        return self.self_attn(x, cos, sin)

    def behind(self, hidden_TD: torch.Tensor, attended_TX: torch.Tensor) -> torch.Tensor:
        """What the layer makes of attention's result."""
        hidden_TD = hidden_TD + self.self_attn.o_proj(attended_TX)
        return hidden_TD + self.mlp(self.post_attention_layernorm(hidden_TD))

    def forward(
        self, hidden_TD: torch.Tensor, embeds_TD: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, chain: Chain
    ) -> tuple[torch.Tensor, Chain]:
        """What the chain's asked entries give, and the longer chain."""
        y_XNH, longer = chain.attend(*self.before(hidden_TD, embeds_TD, cos, sin))
        return self.behind(chain.asked(hidden_TD), y_XNH.flatten(1)), longer

    def compile_parts(self) -> None:
        """Compile what stands before attention and behind it, for any number of entries."""
        self.before = torch.compile(self.before, dynamic=True)
        self.behind = torch.compile(self.behind, dynamic=True)


class Eagle1(nn.Module):
    """EAGLE-1: `layers.0` on fc(embedding, hidden state); what it gives stands in for the target's hidden state."""

    kind = "eagle1"

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, inner, fuses=False)])

    @property
    def layer(self) -> Layer:
        return self.layers[0]

    def start(self, states: torch.Tensor) -> torch.Tensor:
        """What the first step takes for the hidden states: here the target's own."""
        return states

    def forward(
        self, hidden_TD: torch.Tensor, embeds_TD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, chain: Chain
    ) -> tuple[torch.Tensor, Chain]:
        return self.layers[0](self.fc(torch.cat([embeds_TD, hidden_TD], -1)), None, cos, sin, chain)

    def for_vocabulary(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """What the vocabulary projection takes."""
        return hidden_LD

    @torch.no_grad()
    def start_from(self, target: Decoder) -> None:
        """Begin with the target's last layer; fc passes the hidden state through."""
        size = self.fc.out_features
        self.fc.weight.normal_(0, SMALL / 4)
        self.fc.weight[:, size:] += torch.eye(size)
        _copy_layer(self.layers[0], target, 0)


class Eagle3(nn.Module):
    """EAGLE-3: `fc` fuses three hidden states, `midlayer` takes embedding and fused state, `norm` stands before the head."""

    kind = "eagle3"

    def __init__(self, config: ModelConfig, inner: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config, inner, fuses=True)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    @property
    def layer(self) -> Layer:
        return self.midlayer

    def start(self, states: torch.Tensor) -> torch.Tensor:
        """The fused states."""
        return self.fc(states)

    def forward(
        self, hidden_TD: torch.Tensor, embeds_TD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, chain: Chain
    ) -> tuple[torch.Tensor, Chain]:
        return self.midlayer(hidden_TD, embeds_TD, cos, sin, chain)

    def for_vocabulary(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_LD)

    @torch.no_grad()
    def start_from(self, target: Decoder) -> None:
        """Begin with the target's last layer and final norm; fc passes the last of the three states through."""
        size = self.fc.out_features
        self.fc.weight.normal_(0, SMALL / 4)
        self.fc.weight[:, 2 * size :] += torch.eye(size)
        _copy_layer(self.midlayer, target, size)
        _copy_norm(self.midlayer.hidden_norm, target.layers[-1].input_norm)
        _copy_norm(self.norm, target.norm)


class Medusa(nn.Module):
    """Heads of one residual block each, named as in the converted form of the published ones."""

    kind = "medusa1"

    def __init__(self, config: ModelConfig, num_heads: int) -> None:
        super().__init__()
        size = config.hidden_size
        blocks = (nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(size, size)])}) for _ in range(num_heads))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden_LD: torch.Tensor, head: int) -> torch.Tensor:
        """What head `head`'s vocabulary projection takes."""
        (layer,) = self.blocks[head]["layers"]
        return hidden_LD + functional.silu(layer(hidden_LD))

    @torch.no_grad()
    def start_from(self, target: Decoder) -> None:
        """Begin as the target's own head."""
        for block in self.blocks:
            block["layers"][0].weight.zero_()
            block["layers"][0].bias.zero_()


def rotations(target: Decoder, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (T, 1, half), for a position that the target does not have those of its last one."""
    places_T = positions_T.clamp(max=len(target.rope.cos) - 1)
    return target.rope.cos[places_T].unsqueeze(1), target.rope.sin[places_T].unsqueeze(1)


def _copy_layer(layer: Layer, target: Decoder, offset: int) -> None:
    """The target's last layer, its attention's inputs from column `offset`; the other columns small."""
    source = target.layers[-1]
    attention = layer.self_attn
    pieces = _dense(source.self_attention.qkv_proj).split([p.out_features for p in _projections(attention)])
    for projection, piece in zip(_projections(attention), pieces, strict=True):
        projection.weight.normal_(0, SMALL / 4)
        projection.weight[:, offset:] += piece
    attention.o_proj.weight.copy_(_dense(source.self_attention.o_proj))
    _copy_norm(layer.post_attention_layernorm, source.post_attention_norm)
    gate_up, down = _dense(source.feed_forward.gate_up_proj), _dense(source.feed_forward.down_proj)
    inner, most = layer.mlp.down_proj.in_features, down.shape[1]
    if inner > most:
        for weight in layer.mlp.parameters():
            weight.normal_(0, SMALL)
    used = min(inner, most)
    # of a smaller feed-forward, the inner units with the largest outputs
    best = down.norm(dim=0).topk(used).indices.sort().values
    layer.mlp.gate_proj.weight[:used] = gate_up[:most][best]
    layer.mlp.up_proj.weight[:used] = gate_up[most:][best]
    layer.mlp.down_proj.weight[:, :used] = down[:, best]


def _projections(attention: Attention) -> Sequence[nn.Linear]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _dense(linear: nn.Module) -> torch.Tensor:
    return linear.quant.dequantize(linear.weights, linear.spec)


def _copy_norm(norm: Norm, source: RMSNorm) -> None:
    norm.weight.copy_(source.weight)
