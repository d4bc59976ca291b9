"""The contract of a scheduling policy: who is served first, and who is preempted. Torch-free."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from lab.capabilities import Capabilities
from lab.types import Request


class Policy(ABC):
    """Orders the waiting queue and picks victims; everything else about scheduling belongs to the core."""

    kind: ClassVar[str]
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @dataclass(frozen=True)
    class Options:
        pass

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def key(self, request: Request) -> tuple:
        """The waiting queue serves the smallest key first. It must not change while the request waits."""

    @abstractmethod
    def victim(self, running: list[Request]) -> Request:
        """Which of the running requests (in order of admission, never empty) gives its blocks back."""
