"""Draft heads in the published formats, ready to run beside their target: one decoder layer over the target's hidden states.

`eagle1` is EAGLE-1 and EAGLE-2 (Li et al., https://arxiv.org/abs/2401.15077, https://arxiv.org/abs/2406.16858), `eagle3` is
EAGLE-3 (https://arxiv.org/abs/2503.01840). Which of them a folder holds cannot be told from its architecture, only from the
names of its tensors, and EAGLE-1's are those of a cut-off Llama: so the kind is given, and checked.

Entry j of a row is made of hidden state j and token j + 1; its result guesses token j + 2. What the layer gives for one entry
takes the place of the hidden state of the next, so that the head goes on by itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lab.errors import UserError, unknown
from lab.model.checkpoint import Checkpoint
from lab.model.config import ModelConfig, read_config_as, read_json
from lab.model.decoder import Build, Decoder, FeedForward, SelfAttention
from lab.model.layers.attention import AttentionLayer
from lab.model.layers.embed import Embedding
from lab.model.layers.linear import Linear
from lab.model.layers.rope import Rope
from lab.model.pickled_checkpoint import PickledCheckpoint
from lab.model.safetensors_checkpoint import SafetensorsCheckpoint, find_files

KINDS = ("eagle3", "eagle1")
PICKLED = "pytorch_model.bin"
OF_THE_TARGET = "embed_tokens.weight"  # a copy of the target's, which is used


class EagleLayer(nn.Module):
    """The decoder layer. With `fuses` the embedding joins the hidden state at the attention's input, each behind its norm."""

    def __init__(self, build: Build, at: str, *, fuses: bool) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.input_norm = build.norm(f"{at}.input_layernorm", size) if fuses else None
        self.hidden_norm = build.norm(f"{at}.hidden_norm", size) if fuses else None
        self.self_attention = SelfAttention(build, f"{at}.self_attn", 0, in_features=2 * size if fuses else size)
        self.post_attention_norm = build.norm(f"{at}.post_attention_layernorm", size)
        self.feed_forward = FeedForward(build, f"{at}.mlp")

    def forward(
        self, hidden_TD: torch.Tensor, embeds_TD: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual path, and what is to be added to it."""
        x = hidden_TD
        if embeds_TD is not None:
            x = torch.cat([self.input_norm(embeds_TD), self.hidden_norm(hidden_TD)], -1)
        normed_TD, hidden_TD = self.post_attention_norm.of_sum(hidden_TD, self.self_attention(x, cos, sin))
        return hidden_TD, self.feed_forward(normed_TD)


class EagleHead(nn.Module):
    """A head of either kind. `draft_ids` are the target's ids of what it can propose, None when that is everything."""

    def __init__(self, build: Build, kind: str, draft_vocab: int | None, *, has_bias: bool) -> None:
        super().__init__()
        size = build.config.hidden_size
        self.build = build
        self.fused, self.batch_invariant = build.fused, build.batch_invariant
        self.states_width = size
        self.compiled: Callable[..., torch.Tensor] | None = None  # what runs in the place of `forward`, once it is compiled
        self.kind = kind
        self.fuses = kind == "eagle3"
        self.aux_layers: tuple[int, ...] = ()
        self.fc = build.linear("fc", (3 if self.fuses else 2) * size, (("fc", size),), bias=has_bias)
        self.layer = EagleLayer(build, "midlayer" if self.fuses else "layers.0", fuses=self.fuses)
        self.norm = build.norm("norm", size) if self.fuses else None
        self.rope = Rope(build.config.rope, build.max_model_len, build.device, build.fused)
        self.embed: Embedding | None = None  # the target's
        self.draft_ids: torch.Tensor | None = None
        self._draft_vocab = draft_vocab
        self._lm_head: Linear | None = None

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [self.layer.self_attention.attention]

    def states(self, hidden_TD: torch.Tensor, aux_ATD: torch.Tensor | None) -> torch.Tensor:
        """What the target's hidden states are to `forward`: EAGLE-3 fuses those of three layers."""
        if not self.fuses:
            return hidden_TD
        return self.fc(aux_ATD.transpose(0, 1).flatten(1))

    def run(self, states_TD: torch.Tensor, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """`forward`, compiled where it is."""
        return (self.compiled or self)(ids_T.int(), positions_T, states_TD.contiguous())

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, states_TD: torch.Tensor) -> torch.Tensor:
        """What stands in for the hidden states one position further on; in the forward context of the head's own cache.

        `ids_T` are the target's, of the tokens behind these positions.
        """
        cos, sin = self.rope(positions_T)
        embeds_TD = self.embed(ids_T)
        if self.fuses:
            hidden_TD, delta_TD = self.layer(states_TD, embeds_TD, cos, sin)
        else:
            hidden_TD, delta_TD = self.layer(self.fc(torch.cat([embeds_TD, states_TD], -1)), None, cos, sin)
        return hidden_TD + delta_TD

    def greedy(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """The target's ids_L of the most likely tokens."""
        x_LD = self._for_vocabulary(hidden_LD)
        ids_L = self._lm_head.argmax(x_LD)
        if ids_L is None:
            ids_L = self._lm_head(x_LD).float().argmax(-1)
        return self.target_ids(ids_L)

    def logits(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """logits over what it can propose, in float32."""
        return self._lm_head(self._for_vocabulary(hidden_LD)).float()

    def top(self, hidden_LD: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k likeliest tokens, or as many as there are: log-probabilities in float32, and the target's ids."""
        logits_LV = self._lm_head(self._for_vocabulary(hidden_LD))
        log_probs_LK, ids_LK = self.fused.top(logits_LV, min(k, logits_LV.shape[1]))
        return log_probs_LK, self.target_ids(ids_LK)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of the head's own."""
        return ids if self.draft_ids is None else self.draft_ids[ids]

    def take_vocabulary(self, build: Build, checkpoint: Checkpoint, target: Decoder) -> None:
        """Read maps and projection; a projection that the head does not bring is the target's, of its own tokens."""
        names, vocab_size = set(checkpoint.names()), build.config.vocab_size
        if "d2t" in names:
            self.draft_ids = _draft_ids(checkpoint, vocab_size).to(build.device)
        rows = vocab_size if self.draft_ids is None else len(self.draft_ids)
        if self._draft_vocab not in (None, rows):
            raise UserError(
                f"{checkpoint.file_of('fc.weight')}: config.json says draft_vocab_size {self._draft_vocab}, and the head has "
                f"{rows} draft tokens."
            )
        if "lm_head.weight" in names:
            self._lm_head = build.linear("lm_head", build.config.hidden_size, (("lm_head", rows),))
            self._lm_head.load(checkpoint)
        else:
            self._lm_head = target.head_of(self.draft_ids)

    def _for_vocabulary(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        return hidden_LD if self.norm is None else self.norm(hidden_LD)


def load_head(folder: Path, kind: str, target: Decoder, config: ModelConfig, build: Build) -> EagleHead:
    """The head in `folder`, for `target` of shape `config`.

    Args:
        build: of the target; the head's layers are made with its dtype and device, unquantized.

    Raises:
        UserError: an unknown kind, a folder without a head, or one that is made for another target.
    """
    if kind not in KINDS:
        raise unknown("kind of draft head", kind, KINDS)
    raw = read_json(folder / "config.json")
    checkpoint = _open(folder)
    try:
        _check_kind(checkpoint, folder, kind)
        with torch.inference_mode():
            head_config = _head_config(folder, raw, config)
            build = build.for_config(head_config)
            has_bias = "fc.bias" in set(checkpoint.names())
            head = EagleHead(build, kind, raw.get("draft_vocab_size"), has_bias=has_bias)
            head.aux_layers = _aux_layers(folder, raw, config) if head.fuses else ()
            for module in head.modules():
                if hasattr(module, "load"):
                    module.load(checkpoint)
            head.take_vocabulary(build, checkpoint, target)
            head.embed = target.embed
        if extra := sorted(set(checkpoint.names()) - checkpoint.used - {OF_THE_TARGET, "t2d", "d2t"}):
            raise UserError(f"{checkpoint.file_of(extra[0])}: tensor '{extra[0]}' belongs to no part of an {kind} head.")
    finally:
        checkpoint.close()
    return head.eval()


def _open(folder: Path) -> Checkpoint:
    if find_files(folder):
        return SafetensorsCheckpoint(folder)
    if (folder / PICKLED).is_file():
        return PickledCheckpoint(folder / PICKLED)
    raise UserError(f"{folder} has no draft head: neither *.safetensors nor {PICKLED}.")


def _check_kind(checkpoint: Checkpoint, folder: Path, kind: str) -> None:
    names = set(checkpoint.names())
    found = "eagle3" if any(name.startswith("midlayer.") for name in names) else "eagle1" if "fc.weight" in names else None
    if found is None:
        raise UserError(f"{folder} holds no EAGLE head: it has no tensor 'fc.weight'.")
    if found != kind:
        raise UserError(f"{folder} holds an {found} head, and {kind} was asked for.")


def _head_config(folder: Path, raw: dict[str, Any], config: ModelConfig) -> ModelConfig:
    """The head's own shape, which must meet the target's."""
    found = read_config_as("LlamaForCausalLM", folder / "config.json", {"vocab_size": config.vocab_size, **raw})
    for name in ("hidden_size", "vocab_size"):
        its, wanted = getattr(found, name), getattr(config, name)
        if its != wanted:
            raise UserError(f"the draft head in {folder} is for a target of {name} {its}; this one has {wanted}.")
    return found


def _aux_layers(folder: Path, raw: dict[str, Any], config: ModelConfig) -> tuple[int, ...]:
    """As its config says, else the published choice."""
    count = config.num_layers
    given = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(given) if given is not None else (min(2, count), count // 2, max(count - 3, 0))
    if len(layers) != 3 or any(type(layer) is not int or not 0 <= layer <= count for layer in layers):
        raise UserError(f"{folder / 'config.json'}: the aux layers {list(layers)} must be three of 0 to {count}.")
    return layers


def _draft_ids(checkpoint: Checkpoint, vocab_size: int) -> torch.Tensor:
    """d2t holds offsets: target id = draft id + d2t[draft id]."""
    offsets = torch.empty(checkpoint.shape_of("d2t"), dtype=torch.int64)
    checkpoint.read("d2t", offsets)
    ids = torch.arange(len(offsets)) + offsets
    if not ((ids >= 0) & (ids < vocab_size)).all():
        raise UserError(f"{checkpoint.file_of('d2t')}: d2t leads outside the target's vocabulary of {vocab_size}.")
    return ids
