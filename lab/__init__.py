"""lab: a laboratory bench for LLM inference. `from lab import LLM, SamplingParams`."""

from typing import TYPE_CHECKING, Any

from lab.errors import UserError
from lab.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lab.engine.async_llm import AsyncLLM
    from lab.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "UserError", "__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is asked for: the command line's answers must come at once."""
    if name == "LLM":
        from lab.engine.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from lab.engine.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'lab' has no attribute {name!r}")
