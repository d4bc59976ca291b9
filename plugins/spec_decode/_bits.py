"""Which drafts leave a request its bits, whatever is computed beside it."""

from dataclasses import replace
from typing import Any

from lab.api import Capabilities


def keeping_bits(capabilities: Capabilities, options: Any) -> Capabilities:
    """Those of a proposer with a model of its own, with these options: batch_invariant for chains of its likeliest tokens.

    Drafts that are drawn leave the distribution of a request that samples, and not its tokens: these depend on which of them
    were drafts, and so on the steps that the requests beside it allow.
    """
    wanted = ["with spec.draw=false"] if options.draw else []
    if getattr(options, "tree", "none") not in ("none", "auto"):  # not all of them have trees; auto drafts chains then
        wanted.append("with spec.tree=none")
    if wanted:
        return replace(capabilities, lacks=(("batch_invariant", "it has " + " and ".join(wanted)),))
    return replace(capabilities, features=capabilities.features | {"batch_invariant"})
