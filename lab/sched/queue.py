"""The waiting requests in the policy's order."""

import heapq
from collections.abc import Iterator

from lab.contracts.policy import Policy
from lab.types import Request


class WaitingQueue:
    """A heap by the policy's key, smallest first; equal keys are served in the order in which they were pushed.

    The key is taken when a request is pushed. Removal marks the entry, which is dropped when it comes to the top, or when
    marked entries are more than half of the heap, so that its size stays within twice that of the queue.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple, int, Request]] = []
        self._aside: list[tuple[tuple, int, Request]] = []
        self._serials: dict[str, int] = {}  # of the entries that count, by request id
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._serials)

    def __iter__(self) -> Iterator[Request]:
        """All waiting requests in the order of service."""
        return (request for _, serial, request in sorted(self._heap) if self._serials.get(request.id) == serial)

    def push(self, request: Request) -> None:
        assert request.id not in self._serials, f"request {request.id} is waiting already"
        self._serials[request.id] = self._num_pushed
        heapq.heappush(self._heap, (self._policy.key(request), self._num_pushed, request))
        self._num_pushed += 1

    def peek(self) -> Request | None:
        """The request to serve first, those set aside not counted; None when there is none."""
        heap = self._heap
        while heap:
            _, serial, request = heap[0]
            if self._serials.get(request.id) == serial:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> Request:
        """Take out the request that `peek` showed."""
        _, serial, request = heapq.heappop(self._heap)
        assert self._serials.pop(request.id) == serial, "pop comes after peek"
        return request

    def set_aside(self) -> None:
        """Pass over the request that `peek` showed, until `restore`; it goes on waiting in its place."""
        self._aside.append(heapq.heappop(self._heap))

    def restore(self) -> None:
        """Put back all that was set aside."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def remove(self, request: Request) -> None:
        """Take out a request wherever it stands; KeyError when it does not wait."""
        del self._serials[request.id]
        if len(self._heap) > 2 * len(self._serials) + 16:
            self._heap = [e for e in self._heap if self._serials.get(e[2].id) == e[1]]
            heapq.heapify(self._heap)
