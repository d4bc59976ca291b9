"""Prompts from a file of JSON lines, or the set that comes with lab."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from lab.bench.arrivals import ArrivalOptions, arrange
from lab.capabilities import Capabilities
from lab.contracts.workload import ModelFacts, WorkItem, Workload
from lab.errors import UserError, nearest
from lab.registry import register
from lab.sampling_params import SamplingParams

DEFAULT_PROMPTS = Path(__file__).parent / "default_prompts.jsonl"
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@register("workload", "prompts")
class PromptsWorkload(Workload):
    """Prompts, token ids or chats from a JSONL file; without a file, a varied set of two dozen."""

    capabilities = Capabilities(priority=1)

    @dataclass(frozen=True, kw_only=True)
    class Options(ArrivalOptions):
        path: str | None = None  # JSON lines; null: the built-in set
        num_requests: int | None = None  # null: every line once; more than there are lines starts over
        shuffle: bool = False  # by the run's seed

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_requests is not None and self.num_requests < 1:
                raise UserError(f"workload.num_requests must be at least 1, got {self.num_requests}.")
            if self.path == "":
                raise UserError("workload.path is empty: give a file of JSON lines, or null for the built-in prompts.")

    def __init__(self, options: Any, seed: int) -> None:
        """Raises UserError for a file that cannot be read or a line that is wrong, with its number."""
        super().__init__(options, seed)
        self._items = read_prompts(Path(options.path).expanduser() if options.path is not None else DEFAULT_PROMPTS)

    def items(self, model: ModelFacts) -> list[WorkItem]:
        items = list(self._items)
        if self.options.shuffle:
            random.Random(f"shuffle {self.seed}").shuffle(items)
        count = self.options.num_requests or len(items)
        return arrange([items[i % len(items)] for i in range(count)], self.options, self.seed)


def read_prompts(path: Path) -> list[WorkItem]:
    """The requests of a JSONL file; empty lines are skipped. Raises UserError with file and line number."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except OSError as error:
        raise UserError(f"workload: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"workload: {path} is not UTF-8 text (byte {error.start}).") from None
    items = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            items.append(_parse(line, f"{path}, line {number}"))
    if not items:
        raise UserError(f"workload: {path} holds no requests.")
    return items


def _parse(line: str, where: str) -> WorkItem:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}.") from None
    if not isinstance(data, dict):
        raise UserError(f'{where}: must be an object like {{"prompt": "..."}}, got {type(data).__name__}.')
    for key, value in data.items():
        if key not in _CHECKS:
            guess = nearest(key, _CHECKS)
            hint = f" Did you mean '{guess}'?" if guess else ""
            raise UserError(f"{where}: unknown key '{key}'.{hint}\nAvailable: {', '.join(_CHECKS)}.")
        allowed, wanted = _CHECKS[key]
        if not allowed(value):
            raise UserError(f"{where}: {key} must be {wanted}, got {_short(value)}.")
    given = [key for key in PROMPT_KEYS if key in data]
    if len(given) != 1:
        raise UserError(f"{where}: must have exactly one of {', '.join(PROMPT_KEYS)}; it has {' and '.join(given) or 'none'}.")
    try:
        SamplingParams.from_mapping(data.get("sampling", {}), base=SamplingParams(max_tokens=None))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return WorkItem(**data)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_time(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and _is_text(m.get("role")) for m in value)


def _is_text_or_null(value: Any) -> bool:
    return value is None or _is_text(value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt": (_is_text, "text"),
    "prompt_token_ids": (_is_token_ids, "a list of token ids"),
    "messages": (_is_messages, 'a list of messages like {"role": "user", "content": "..."}'),
    "sampling": (lambda value: isinstance(value, dict), "an object of sampling parameters"),
    "arrival_s": (_is_time, "a time in seconds, 0 or more"),
    "priority": (_is_count, "a whole number"),
    "cache_salt": (_is_text_or_null, "text"),
    "reference": (_is_text_or_null, "text"),
    "category": (_is_text_or_null, "text"),
}


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
