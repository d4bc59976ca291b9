"""A step while it is being planned."""

from lab.types import Chunk, NewRow, Request, Step


class StepPlan:
    """What has been decided so far; the scheduler fills it and makes a `Step` of it.

    `requests` and `chunks` go together. Adding a chunk moves its request's progress on as if the step were done.
    """

    __slots__ = ("budget", "chunks", "index", "new_rows", "num_preempted", "num_reserved", "num_tokens", "requests")

    def __init__(self, index: int, budget: int) -> None:
        self.index = index
        self.budget = budget  # tokens that may still be added
        self.num_tokens = 0
        self.num_preempted = 0
        self.num_reserved = 0  # blocks that rows in the middle of their prefill will want
        self.requests: list[Request] = []
        self.chunks: list[Chunk] = []
        self.new_rows: list[NewRow] = []

    def add(self, request: Request, num_tokens: int, num_drafts: int, new_block_ids: list[int]) -> None:
        """Give the request's next `num_tokens` positions, `num_drafts` of them drafts, a place in the step."""
        start = request.num_computed
        end = start + num_tokens
        samples = end - num_drafts == len(request.token_ids) + request.num_in_flight
        request.num_computed = end
        if samples:
            request.num_in_flight += 1 + num_drafts
        draft_ids = request.draft_ids
        if draft_ids:
            draft_ids, request.draft_ids = draft_ids[:num_drafts], []
        self.chunks.append(Chunk(request.id, start, num_tokens, num_drafts, samples, new_block_ids, draft_ids))
        self.requests.append(request)
        self.budget -= num_tokens
        self.num_tokens += num_tokens

    def drop(self, request: Request) -> None:
        """Take a request's chunk out again, if it has one. Its progress is the caller's business."""
        if request not in self.requests:
            return
        i = self.requests.index(request)
        chunk = self.chunks.pop(i)
        del self.requests[i]
        if chunk.samples:
            request.num_in_flight -= 1 + chunk.num_drafts
        self.budget += chunk.num_tokens
        self.num_tokens -= chunk.num_tokens

    def finish(self, freed: list[str]) -> Step:
        return Step(self.index, self.new_rows, self.chunks, freed, self.num_tokens, self.num_preempted)
