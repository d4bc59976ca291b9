"""requests.jsonl and steps.jsonl in the run folder."""

import json
from io import FileIO
from pathlib import Path
from typing import Any

from lab.contracts.sink import RunInfo, Sink
from lab.errors import UserError
from lab.registry import register


@register("sink", "jsonl")
class JsonlSink(Sink):
    """The run folder's own record, always on: each line reaches the system at once, so a killed run keeps it."""

    def start(self, run: RunInfo) -> None:
        """Raises UserError when the files cannot be made."""
        self._requests = _open(run.folder / "requests.jsonl")
        self._steps = _open(run.folder / "steps.jsonl")

    def step(self, record: dict[str, Any]) -> None:
        _write(self._steps, record)

    def request(self, record: dict[str, Any]) -> None:
        _write(self._requests, record)

    def finish(self, metrics: dict[str, Any], exit_code: int) -> None:
        self._requests.close()
        self._steps.close()


def _open(path: Path) -> FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from None


def _write(file: FileIO, record: dict[str, Any]) -> None:
    """Append one line, unbuffered. Raises UserError when the disk does not take it."""
    data = memoryview((json.dumps(record, separators=(",", ":")) + "\n").encode())
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:
        raise UserError(f"cannot write {file.name}: {error.strerror}. What was written before is kept.") from None
