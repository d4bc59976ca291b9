"""The contract of a tracking sink: where a run's records go."""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.contracts.plugin import Plugin


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a sink is told at the start of a run."""

    folder: Path
    config: dict[str, Any]  # the resolved settings, plain data
    resolved: dict[str, Any]  # which plugin serves each component, and why


class Sink(Plugin):
    """Takes the records of a run as they come. A sink must never make the run fail or wait for a network."""

    @abstractmethod
    def start(self, run: RunInfo) -> None: ...

    @abstractmethod
    def step(self, record: dict[str, Any]) -> None:
        """One line of steps.jsonl."""

    @abstractmethod
    def request(self, record: dict[str, Any]) -> None:
        """One line of requests.jsonl."""

    @abstractmethod
    def finish(self, metrics: dict[str, Any], exit_code: int) -> None:
        """The summary; called once, also after an interrupted or failed run."""
