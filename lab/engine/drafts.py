"""What drafts do not go together with, said before a run begins."""

from collections.abc import Sequence

import torch

from lab.contracts.spec import Proposer
from lab.engine.backends import backends_of
from lab.errors import UserError
from lab.kv.groups import Grouping
from lab.model.layers.attention import AttentionLayer
from lab.settings import Settings


def check_layers_fit(proposer: Proposer, grouping: Grouping) -> None:
    """A proposer's own layers use the block table of a model that keeps all tokens. Raises UserError for another."""
    if proposer.attention_layers and not grouping.is_plain:
        raise UserError(
            f"spec plugin '{proposer.name}' has attention layers of its own, in blocks of the model's, and this model's layers "
            "with a window give blocks back. Add cache.free_behind_window=false, or choose a spec plugin without layers."
        )


def tree_obstacle(
    settings: Settings, layers: Sequence[AttentionLayer], dtype: torch.dtype, device: torch.device, depth: int
) -> str | None:
    """See lab.contracts.spec.Target.tree_obstacle."""
    if settings.debug.batch_invariant:
        return "debug.batch_invariant=true"
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    if windows and min(windows) <= depth:
        return f"a layer of this model sees a window of {min(windows)} tokens"
    try:
        backends_of(settings, layers, dtype, device, {}, {"spec_verify", "tree_verify"})
    except UserError as error:
        return str(error).partition("\n")[0]
    return None


def check_trees_fit(settings: Settings, layers: Sequence[AttentionLayer], proposer: Proposer) -> None:
    """Raises UserError for what trees of drafts do not go together with, if the proposer cannot do without any."""
    if not proposer.tree_depth or proposer.tree_optional:
        return
    name, depth = proposer.name, proposer.tree_depth
    if settings.debug.batch_invariant:
        raise UserError(
            f"spec plugin '{name}' proposes trees, where a path is attended to with others beside it: its bits are not those "
            "of plain decoding, as debug.batch_invariant=true asks. Use chains of drafts (spec.tree=none)."
        )
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    if windows and min(windows) <= depth:
        raise UserError(
            f"spec plugin '{name}' proposes trees of depth {depth}, and a layer of this model sees a window of {min(windows)} "
            "tokens: a tree must be less deep than that."
        )
