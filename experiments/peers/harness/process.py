"""A peer's process, seen from run.py."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.protocol import Answer, Request, Start, Started

# Read by the libraries at import, before any code of the peer's runs; the rest is the peer's own business.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class PeerFailed(Exception):
    """The peer ended, said nothing in time, or answered something else than was asked for.

    The message is fit to be published; `details` may name paths of this machine.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = list(details)


class PeerProcess:
    """Start a peer's script under its interpreter, and ask it things. A context manager: the process ends with it.

    While it is paused, the process and all it started are stopped by a signal, so that nothing of an idle peer runs.
    """

    def __init__(self, name: str, python: str, script: Path, log: Path, threads: int) -> None:
        self.name = name
        self._log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        variables = {name: str(threads) for name in THREAD_VARIABLES}
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **variables},
                start_new_session=True,  # a group of its own, for the signals
            )
        self._pending = b""

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def prepare(self, model: Path, folder: Path, timeout_s: float) -> None:
        self._ask({"do": "prepare", "model": str(model), "folder": str(folder)}, timeout_s)

    def start(self, start: Start, timeout_s: float) -> Started:
        return Started(**self._ask({"do": "start", **asdict(start)}, timeout_s))

    def run(self, requests: Sequence[Request], timeout_s: float) -> Answer:
        """Raises PeerFailed also when the answer is not the tokens asked for."""
        asked = {"do": "run", "requests": [asdict(request) for request in requests]}
        answer = Answer(**self._ask(asked, timeout_s))
        got = [len(ids) for ids in answer.token_ids]
        wanted = [request.num_output for request in requests]
        if got != wanted:
            raise PeerFailed(f"{self.name} gave other numbers of tokens than were asked for", [f"{got} for {wanted}"])
        return answer

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self, patience_s: float = 10.0) -> None:
        """End the process by the end of its input; kill its group when that takes too long."""
        self.resume()
        with contextlib.suppress(BrokenPipeError):  # it ended by itself, and something was still on its way to it
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        line = self._read_line(time.monotonic() + timeout_s)
        try:
            return json.loads(line)
        except json.JSONDecodeError:
            raise PeerFailed(f"{self.name} answered with something else than JSON", [repr(line[:80])]) from None

    def _read_line(self, deadline: float) -> bytes:
        output = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([output], [], [], max(deadline - time.monotonic(), 0))[0]:
                self._signal(signal.SIGKILL)
                raise PeerFailed(f"{self.name} did not answer in time", [f"its log is {self._log}"])
            read = os.read(output, 1 << 20)
            if not read:
                raise self._ended()
            self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _ended(self) -> PeerFailed:
        code = self._process.wait()
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            said = file.read().decode(errors="replace").strip().splitlines()
        return PeerFailed(f"{self.name} ended with exit code {code}", said[-4:])
