"""The contract of a workload: the requests of a run, with their arrival times. Torch-free."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lab.contracts.plugin import Plugin


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to send. Exactly one of prompt, prompt_token_ids and messages is set."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # over the run's defaults
    arrival_s: float = 0.0  # after the start of the run
    priority: int = 0
    cache_salt: str | None = None
    reference: str | None = None
    category: str | None = None  # what drafts come to is told by category too


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a workload may want to know of the model."""

    vocab_size: int
    max_model_len: int
    special_ids: frozenset[int]
    encode: Callable[[str], list[int]]


class Workload(Plugin):
    """Makes the list of requests of a run; the same seed makes the same list."""

    def __init__(self, options: Any, seed: int) -> None:
        super().__init__(options)
        self.seed = seed

    @abstractmethod
    def items(self, model: ModelFacts) -> list[WorkItem]:
        """The requests, by arrival time."""
