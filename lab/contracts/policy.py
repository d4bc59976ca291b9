"""The contract of a scheduling policy: who is served first, and who is preempted. Torch-free."""

from abc import abstractmethod

from lab.contracts.plugin import Plugin
from lab.types import Request


class Policy(Plugin):
    """Orders the waiting queue and picks victims; everything else about scheduling belongs to the core."""

    @abstractmethod
    def key(self, request: Request) -> tuple:
        """The waiting queue serves the smallest key first. It must not change while the request waits."""

    @abstractmethod
    def victim(self, running: list[Request]) -> Request:
        """Which of the running requests (in order of admission, never empty) gives its blocks back."""
