"""Which drafts leave a request its bits, whatever is computed beside it."""

from dataclasses import replace
from typing import Any

from lab.api import Capabilities


def keeping_bits(capabilities: Capabilities, options: Any) -> Capabilities:
    """Those of a proposer with a model of its own, with these options: batch_invariant for chains of its likeliest tokens.

    Drafts that are drawn leave the distribution of a request that samples, and not its tokens: these depend on which of them
    were drafts, and so on the steps that the requests beside it allow.
    """
    is_chain = getattr(options, "tree", "none") == "none"  # not all of them have trees
    if options.draw or not is_chain:
        return capabilities
    return replace(capabilities, features=capabilities.features | {"batch_invariant"})
