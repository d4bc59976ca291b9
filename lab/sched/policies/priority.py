"""By priority, then by arrival."""

from lab.api import Capabilities, Policy, Request, register


@register("policy", "priority")
class ByPriority(Policy):
    """Serves the lowest priority number first; the worst number, then the latest arrival, gives way when the cache is full."""

    capabilities = Capabilities()

    def key(self, request: Request) -> tuple:
        return request.priority, request.arrival_s, request.arrival_index

    def victim(self, running: list[Request]) -> Request:
        return max(running, key=self.key)
