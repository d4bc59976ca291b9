"""Cascade attention: keys that several rows begin with are attended to once for all of these rows' queries.

Rows share keys where their block tables begin with the same blocks, as prefix caching makes them. Such keys lie before all of
the rows' queries, so nothing of them is masked. Each query's result is then merged from its parts, of the shared keys and of
the row's own, by their logsumexp (as in https://flashinfer.ai/2024/02/02/cascade-inference.html).
"""

from lab.api import UserError

AUTO, NEVER = -1, 0  # as in cpu/plan.h


def least_shared(cascade: int | str) -> int:
    """From how many tokens on rows share them, or AUTO (where it pays) or NEVER, for the option of that name."""
    if cascade in ("auto", "never"):
        return AUTO if cascade == "auto" else NEVER
    if isinstance(cascade, str) or cascade < 1:
        raise UserError(f"attention.cascade={cascade}: it takes auto, never, or a number of tokens from 1 on.")
    return cascade
