"""Static batching: the baseline that studies compare continuous batching with."""

from itertools import islice

from lab.sched.queue import WaitingQueue
from lab.types import Request, Status


class StaticBatch:
    """The members of the batch in progress that wait for admission; nobody else is admitted before it has wholly ended.

    A batch is the first `max_num_seqs` requests waiting when nothing runs. Its members start over as many steps as their
    prompts need. The first one that the cache has no room for closes the batch: it and those after it wait for the next.
    A preempted member belongs to its batch and comes back.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._members: dict[str, Request] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._members

    def open(self, waiting: WaitingQueue, idle: bool) -> bool:
        """Whether anybody may be admitted; forms the next batch when the last one has ended."""
        if idle and not self._members:
            self._members = {r.id: r for r in islice(waiting, self._max_num_seqs)}
        return bool(self._members)

    def close(self) -> None:
        """Send those that have never started to the next batch."""
        self._members = {r.id: r for r in self._members.values() if r.status is Status.PREEMPTED}

    def add(self, request: Request) -> None:
        self._members[request.id] = request

    def remove(self, request: Request) -> None:
        self._members.pop(request.id, None)
