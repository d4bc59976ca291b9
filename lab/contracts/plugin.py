"""What the contracts of all kinds have in common. Torch-free."""

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar

from lab.capabilities import Capabilities


class Plugin(ABC):  # noqa: B024 - what is abstract is in the contracts
    """A class that `@register(kind, name)` makes known."""

    kind: ClassVar[str]
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @dataclass(frozen=True)
    class Options:
        pass

    @classmethod
    def capabilities_with(cls, options: Any) -> Capabilities:
        """What it can serve with these options; of most plugins that does not depend on them."""
        return cls.capabilities

    def __init__(self, options: Any) -> None:
        self.options = options
