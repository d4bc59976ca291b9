"""Medusa heads (Cai et al., https://arxiv.org/abs/2401.10774): each guesses one token, from one hidden state of the target.

Head k at hidden state j guesses token j + 2 + k: residual blocks x + silu(W x + b), then a vocabulary projection. Read in both
published forms: `medusa_lm_head.pt` (`{k}.{j}.linear.*`, `{k}.{num_layers}.weight`), and safetensors (`medusa_heads.blocks.*`,
`medusa_heads.lm_heads.*`, `medusa_heads.token_map`). A head that brings no projection takes the target's. How many heads and
blocks there are is told by the tensors: the published config.json is known to be wrong about it.
"""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from lab.errors import UserError
from lab.model.checkpoint import Checkpoint
from lab.model.config import ModelConfig
from lab.model.decoder import Build, Decoder
from lab.model.layers.linear import Linear
from lab.model.pickled_checkpoint import PickledCheckpoint
from lab.model.safetensors_checkpoint import SafetensorsCheckpoint, find_files

PICKLED = "medusa_lm_head.pt"
BLOCK = {  # names of block j of head k in each form
    PICKLED: re.compile(r"(\d+)\.(\d+)\.linear\.weight"),
    "safetensors": re.compile(r"medusa_heads\.blocks\.(\d+)\.layers\.(\d+)\.weight"),
}
TOKEN_MAP = "medusa_heads.token_map"


class MedusaHeads(nn.Module):
    """All heads of one target. `draft_ids` are the target's ids of what they can propose, None when that is everything."""

    aux_layers: tuple[int, ...] = ()
    attention_layers: tuple[()] = ()

    def __init__(self, blocks: list[list[Linear]], projections: list[Linear], draft_ids: torch.Tensor | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(of_head) for of_head in blocks)
        self.projections = nn.ModuleList(projections)
        self.draft_ids = draft_ids

    @property
    def num_heads(self) -> int:
        return len(self.blocks)

    def logits(self, hidden_LD: torch.Tensor, head: int) -> torch.Tensor:
        """What a head thinks of what it can propose, in float32."""
        return self.projections[head](self._mixed(hidden_LD, head)).float()

    def greedy(self, hidden_LD: torch.Tensor, head: int) -> torch.Tensor:
        """The target's ids_L of a head's most likely tokens."""
        x_LD = self._mixed(hidden_LD, head)
        ids_L = self.projections[head].argmax(x_LD)
        if ids_L is None:
            ids_L = self.projections[head](x_LD).float().argmax(-1)
        return ids_L if self.draft_ids is None else self.draft_ids[ids_L]

    def _mixed(self, hidden_LD: torch.Tensor, head: int) -> torch.Tensor:
        for block in self.blocks[head]:
            hidden_LD = hidden_LD + functional.silu(block(hidden_LD))
        return hidden_LD


def load_medusa(folder: Path, target: Decoder, config: ModelConfig, build: Build) -> MedusaHeads:
    """The heads in `folder`. Raises UserError when there are none, or they are of another target's sizes."""
    form, checkpoint = _open(folder)
    try:
        found = [match for name in checkpoint.names() if (match := BLOCK[form].fullmatch(name))]
        num_heads = 1 + max((int(match[1]) for match in found), default=-1)
        num_blocks = 1 + max((int(match[2]) for match in found), default=-1)
        if not found or len(found) != num_heads * num_blocks:
            raise UserError(f"{folder} holds no Medusa heads: {len(found)} residual blocks of {num_heads} heads are there.")
        _check_size(checkpoint, found[0][0], config.hidden_size)
        with torch.inference_mode():
            blocks = [
                [_linear(build, checkpoint, _block_name(form, k, j), config.hidden_size, bias=True) for j in range(num_blocks)]
                for k in range(num_heads)
            ]
            draft_ids = _token_map(checkpoint, config.vocab_size, build.device)
            rows = config.vocab_size if draft_ids is None else len(draft_ids)
            names = [f"{k}.{num_blocks}" if form == PICKLED else f"medusa_heads.lm_heads.{k}" for k in range(num_heads)]
            if f"{names[0]}.weight" in set(checkpoint.names()):
                projections = [_linear(build, checkpoint, name, rows) for name in names]
            else:
                projections = [target.head_of(draft_ids)] * num_heads
        if extra := sorted(set(checkpoint.names()) - checkpoint.used):
            raise UserError(f"{checkpoint.file_of(extra[0])}: tensor '{extra[0]}' belongs to no part of Medusa heads.")
    finally:
        checkpoint.close()
    return MedusaHeads(blocks, projections, draft_ids).eval()


def _open(folder: Path) -> tuple[str, Checkpoint]:
    if (folder / PICKLED).is_file():
        return PICKLED, PickledCheckpoint(folder / PICKLED)
    if find_files(folder):
        return "safetensors", SafetensorsCheckpoint(folder)
    raise UserError(f"{folder} has no Medusa heads: neither *.safetensors nor {PICKLED}.")


def _block_name(form: str, head: int, block: int) -> str:
    return f"{head}.{block}.linear" if form == PICKLED else f"medusa_heads.blocks.{head}.layers.{block}"


def _linear(build: Build, checkpoint: Checkpoint, name: str, rows: int, *, bias: bool = False) -> Linear:
    linear = build.for_config(build.config).linear(name, build.config.hidden_size, ((name, rows),), bias=bias)
    linear.load(checkpoint)
    return linear


def _check_size(checkpoint: Checkpoint, name: str, hidden_size: int) -> None:
    shape = checkpoint.shape_of(name)
    if shape != (hidden_size, hidden_size):
        raise UserError(
            f"{checkpoint.file_of(name)}: the heads are for a target of hidden_size {shape[-1]}; this one has {hidden_size}."
        )


def _token_map(checkpoint: Checkpoint, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    if TOKEN_MAP not in set(checkpoint.names()):
        return None
    ids = torch.empty(checkpoint.shape_of(TOKEN_MAP), dtype=torch.int64)
    checkpoint.read(TOKEN_MAP, ids)
    if not ((ids >= 0) & (ids < vocab_size)).all():
        raise UserError(f"{checkpoint.file_of(TOKEN_MAP)}: token_map leads outside the target's vocabulary of {vocab_size}.")
    return ids.to(device)
