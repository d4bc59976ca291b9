"""First come, first served."""

from lab.api import Capabilities, Policy, Request, register


@register("policy", "fcfs")
class FirstComeFirstServed(Policy):
    """Serves requests in the order of arrival; the last one admitted gives way when the cache is full."""

    capabilities = Capabilities()

    def key(self, request: Request) -> tuple:
        return request.arrival_s, request.arrival_index

    def victim(self, running: list[Request]) -> Request:
        return running[-1]
