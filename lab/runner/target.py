"""The target as proposers see it, and what loads their own layers for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from lab.errors import UserError
from lab.model.config import ModelConfig, read_config
from lab.model.decoder import Decoder
from lab.model.draft_head import EagleHead, load_head
from lab.model.medusa_head import load_medusa
from lab.model.mtp_head import load_mtp
from lab.model.source import resolve_model


@dataclass(frozen=True, slots=True)
class BoundTarget:
    """See lab.contracts.spec.Target."""

    name: str
    model: Decoder
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_model_len: int
    load: Callable[[Path, ModelConfig], Decoder]  # another model, unquantized
    tree_obstacle: Callable[[int], str | None]
    heads: list[EagleHead] = field(default_factory=list)  # that were loaded

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.model.embed(ids_T)

    def logits(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        return self.model.logits(hidden_LD)

    def greedy(self, hidden_LD: torch.Tensor) -> torch.Tensor:
        ids_L = self.model.greedy(hidden_LD)
        return self.model.logits(hidden_LD).argmax(-1) if ids_L is None else ids_L

    def load_head(self, folder: Path, kind: str) -> nn.Module:
        if kind == "medusa1":
            return load_medusa(folder, self.model, self.config, self.model.build)
        head = load_head(folder, kind, self.model, self.config, self.model.build)
        self.heads.append(head)
        return head

    def load_mtp(self, folder: Path | None) -> nn.Module:
        return load_mtp(folder or resolve_model(self.name), self.model, self.config, self.model.build)

    def load_model(self, path: str) -> nn.Module:
        return self.load(*find_draft_model(path, self.config, self.max_model_len))


def find_draft_model(path: str, target: ModelConfig, max_model_len: int) -> tuple[Path, ModelConfig]:
    """The folder and shape of a model that is to draft for `target`, fetched if need be. Raises UserError when it cannot."""
    folder = resolve_model(path)
    config = read_config(folder)
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"the draft model {path} has a vocabulary of {config.vocab_size} tokens, the target one of "
            f"{target.vocab_size}: they must be the same."
        )
    if config.max_position_embeddings < max_model_len:
        raise UserError(
            f"the draft model {path} takes {config.max_position_embeddings} positions, and contexts may have "
            f"{max_model_len} tokens. Set model.max_model_len={config.max_position_embeddings}."
        )
    return folder, config
