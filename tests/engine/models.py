"""The rigs as models ready to generate: small caches, one thread, integrity checked after every step."""

from pathlib import Path
from typing import Any

from lab import LLM, AsyncLLM
from tests import rigs

SMALL = ["compile.mode=none", "num_threads=1", "cache.num_blocks=64", "debug.check_integrity=true", "model.max_model_len=256"]
SMALL.append("draft_length=fixed")  # with a proposer, drafts are verified whether they pay or not
GREEDY = {"temperature": 0.0}


def count_alpha(folder: Path) -> Path:
    """COUNT with ALPHA: 'ABC' goes on 'DEFG...'."""
    rigs.alpha_tokenizer(folder)
    return rigs.count(folder)


def open_llm(folder: Path, *overrides: str, **arguments: Any) -> LLM:
    return LLM(folder, overrides=[*SMALL, *overrides], **arguments)


def open_async_llm(folder: Path, *overrides: str, **arguments: Any) -> AsyncLLM:
    return AsyncLLM(folder, overrides=[*SMALL, *overrides], **arguments)
