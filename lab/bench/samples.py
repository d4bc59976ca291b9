"""Shows the first outputs of a run, shortened, so that nonsense is seen at once."""

from collections.abc import Sequence
from typing import IO

from lab.bench.sender import Planned
from lab.contracts.workload import WorkItem
from lab.engine.request_output import RequestOutput

MOST_CHARACTERS = 240


def print_samples(shown: Sequence[tuple[Planned, RequestOutput]], stream: IO[str]) -> None:
    """Prompt and first sample of each, as text on lines of their own; token ids where there is no text."""
    for planned, output in sorted(shown, key=lambda pair: pair[0].number):
        sample = output.outputs[0]
        print(f"[{planned.id}] prompt: {shortened(prompt_text(planned.item))}", file=stream)
        print(f"{' ' * len(planned.id)}   output: {shortened(sample.text or str(sample.token_ids))}\n", file=stream)


def prompt_text(item: WorkItem) -> str:
    """What was asked: the text, the last message of a chat, or token ids."""
    if item.messages is not None:
        return str(item.messages[-1].get("content", ""))
    return item.prompt if item.prompt is not None else str(item.prompt_token_ids)


def shortened(text: str, limit: int = MOST_CHARACTERS) -> str:
    """One line of at most `limit` characters, cut in the middle."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    half = (limit - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
