"""What LLM and AsyncLLM have in common: how they are made, and what can be asked of both."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from lab.engine.stack import Stack, build_stack, settings_for
from lab.errors import UserError, nearest
from lab.settings import Settings


class Opened(ABC):
    """A model opened from Python; also a context manager, which closes it."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        attention: str | None = None,
        spec: str | None = None,
        quant: str | None = None,
        moe: str | None = None,
        draft_length: str | None = None,
        overrides: Sequence[str] = (),
        settings: Settings | None = None,
        **unknown: Any,
    ) -> None:
        """Load the model.

        Args:
            model: a name from conf/model, a local folder, a .gguf file or a hub id; by default what the settings name.
            attention, spec, quant, moe, draft_length: plugins by name.
            overrides: further settings in Hydra's syntax.
            settings: ready settings, in place of all the above.

        Raises:
            UserError: for what the arguments get wrong.
        """
        if unknown:
            raise _no_argument(type(self).__name__, next(iter(unknown)))
        plugins = {"attention": attention, "spec": spec, "quant": quant, "moe": moe, "draft_length": draft_length}
        self._start(build_stack(settings_for(model, plugins, overrides, settings)))

    @classmethod
    def of(cls, stack: Stack) -> Self:
        """One on a stack that is built already, for studies that build many on the same weights."""
        opened = cls.__new__(cls)
        opened._start(stack)
        return opened

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def settings(self) -> Settings:
        return self._open_stack.settings

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, None for a model without one."""
        return self._open_stack.frontend.tokenizer

    @abstractmethod
    def close(self) -> None:
        """Give the model's memory back. More than once does no harm."""

    @abstractmethod
    def _start(self, stack: Stack) -> None:
        """Take the loaded engine, once."""

    @property
    @abstractmethod
    def _open_stack(self) -> Stack:
        """The engine with its front."""


def _no_argument(cls: str, name: str) -> UserError:
    parameters = inspect.signature(Opened.__init__).parameters.values()
    names = [p.name for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    guess = nearest(name, names)
    hint = f" Did you mean '{guess}'?" if guess else ""
    return UserError(
        f"{cls} takes no argument '{name}'.{hint}\nAvailable: {', '.join(names)}; any setting goes into overrides, e.g. "
        "overrides=['cache.block_size=32']."
    )
