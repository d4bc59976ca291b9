"""Multi-token-prediction modules, which some models are trained and published with: one decoder layer that drafts.

The module of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2): entry j joins the hidden state of position j, after
the model's final norm, and the embedding of token j + 1, each behind a norm of its own; a projection brings both to the size
of one, a decoder layer like the model's follows, then a norm and the model's own head, which guesses token j + 2. What the
norm gives takes the place of the hidden state of the next entry, so that the one module drafts any number of tokens.

Two sets of names are published: MiMo's (https://arxiv.org/abs/2505.07608), beside Qwen2's layers, and DeepSeek-V3's, where the
module is one layer more than config.json counts. They differ in which half the projection reads first as well.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lab.errors import UserError
from lab.model.checkpoint import Checkpoint
from lab.model.config import ModelConfig
from lab.model.decoder import Build, Decoder, FeedForward, SelfAttention
from lab.model.layers.attention import AttentionLayer
from lab.model.layers.linear import Linear
from lab.model.layers.rope import Rope
from lab.model.safetensors_checkpoint import SafetensorsCheckpoint, find_files


@dataclass(frozen=True)
class Names:
    """What the tensors of a module are called; `at` has a place for the number of the model's layers."""

    at: str
    embed_norm: str
    hidden_norm: str
    projection: str
    is_embedding_first: bool  # in what the projection reads
    norm: str
    head: str | None = None  # a copy of the model's, or one of the module's own
    embedding: str | None = None  # a copy of the model's, which is used

    def place(self, num_layers: int) -> str:
        return self.at.format(num_layers)


MIMO = Names("model.mtp_layers.0", "token_layernorm", "hidden_layernorm", "input_proj", False, "final_layernorm")
DEEPSEEK = Names("model.layers.{}", "enorm", "hnorm", "eh_proj", True, "shared_head.norm", "shared_head.head", "embed_tokens")


class MtpHead(nn.Module):
    """A module beside its model. Its result is both the next entry's hidden state and what the vocabulary's head reads."""

    draft_ids = None  # it can propose whatever the model can say

    def __init__(self, build: Build, names: Names, at: str, lm_head: Linear) -> None:
        super().__init__()
        size = build.config.hidden_size
        self._is_embedding_first = names.is_embedding_first
        self.embed_norm = build.norm(f"{at}.{names.embed_norm}", size)
        self.hidden_norm = build.norm(f"{at}.{names.hidden_norm}", size)
        projection = f"{at}.{names.projection}"
        self.projection = build.linear(projection, 2 * size, ((projection, size),))
        self.input_norm = build.norm(f"{at}.input_layernorm", size)
        self.self_attention = SelfAttention(build, f"{at}.self_attn", 0)
        self.post_attention_norm = build.norm(f"{at}.post_attention_layernorm", size)
        self.feed_forward = FeedForward(build, f"{at}.mlp")
        self.norm = build.norm(f"{at}.{names.norm}", size)
        self.rope = Rope(build.config.rope, build.max_model_len, build.device, build.fused)
        self.lm_head = lm_head

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        return [self.self_attention.attention]

    def forward(self, states_TD: torch.Tensor, embeds_TD: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """What stands in for the hidden states one position further on; in the forward context of the module's own cache."""
        halves = [self.hidden_norm(states_TD), self.embed_norm(embeds_TD)]
        if self._is_embedding_first:
            halves.reverse()
        hidden_TD = self.projection(torch.cat(halves, -1))
        delta_TD = self.self_attention(self.input_norm(hidden_TD), *self.rope(positions_T))
        normed_TD, hidden_TD = self.post_attention_norm.of_sum(hidden_TD, delta_TD)
        return self.norm.of_sum(hidden_TD, self.feed_forward(normed_TD))[0]

    def greedy(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """ids_L of the most likely tokens."""
        ids_L = self.lm_head.argmax(hidden_LD)
        return self.lm_head(hidden_LD).float().argmax(-1) if ids_L is None else ids_L

    def logits(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        """logits_LV in float32."""
        return self.lm_head(hidden_LD).float()


def load_mtp(folder: Path, target: Decoder, config: ModelConfig, build: Build) -> MtpHead:
    """The module in `folder`, which may be the checkpoint of `target` itself; `config` and `build` are the target's.

    Raises:
        UserError: there is none, there are several, or it is one for another target.
    """
    if not find_files(folder):
        raise UserError(f"{folder} has no *.safetensors, in which a multi-token-prediction module could be.")
    checkpoint = SafetensorsCheckpoint(folder)
    try:
        names = _names(checkpoint, folder, config)
        at = names.place(config.num_layers)
        with torch.inference_mode():
            build = build.for_config(dataclasses.replace(config, num_layers=1, layer_windows=(None,)))
            head = MtpHead(build, names, at, _lm_head(checkpoint, names, at, target, build))
            for module in head.modules():
                if hasattr(module, "load") and module is not target.lm_head:
                    module.load(checkpoint)
    finally:
        checkpoint.close()
    return head.eval()


def is_of_mtp(name: str, config: ModelConfig) -> bool:
    """Whether a tensor of a model's checkpoint belongs to such a module, and so to no layer of the model."""
    if "num_nextn_predict_layers" not in config.raw:
        return False
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return name.startswith("model.mtp_layers.") or (layer is not None and int(layer[1]) >= config.num_layers)


def _names(checkpoint: Checkpoint, folder: Path, config: ModelConfig) -> Names:
    held = set(checkpoint.names())
    found = [n for n in (MIMO, DEEPSEEK) if f"{n.place(config.num_layers)}.{n.projection}.weight" in held]
    if len(found) != 1:
        wanted = " nor ".join(f"{n.place(config.num_layers)}.{n.projection}.weight" for n in (MIMO, DEEPSEEK))
        raise UserError(
            f"{folder} has no multi-token-prediction module for this model: its weights have neither {wanted}. "
            "spec=eagle and spec=medusa draft by heads that can be trained for any model (`lab train-draft`), spec=ngram "
            "without one."
        )
    (names,) = found
    beside = ("model.mtp_layers.1.", f"model.layers.{config.num_layers + 1}.")
    if any(name.startswith(beside) for name in held):
        raise UserError(
            f"{folder} has several multi-token-prediction modules; lab drafts by one, as MiMo and DeepSeek-V3 have."
        )
    return names


def _lm_head(checkpoint: Checkpoint, names: Names, at: str, target: Decoder, build: Build) -> Linear:
    """The module's own head where the checkpoint has it, else the model's."""
    own = f"{at}.{names.head}"
    if names.head is None or f"{own}.weight" not in set(checkpoint.names()):
        return target.lm_head
    return build.linear(own, build.config.hidden_size, ((own, build.config.vocab_size),))
