"""No speculation: one token per request and step."""

from lab.api import Capabilities, Draft, Proposer, ProposeView, register


@register("spec", "none")
class NoDrafts(Proposer):
    """Proposes nothing: plain decoding, the baseline that every proposer is compared with."""

    capabilities = Capabilities(features={"batch_invariant"}, priority=1)
    num_drafts = 0

    def propose(self, view: ProposeView) -> Draft:
        return Draft([[] for _ in view.rows_R])
