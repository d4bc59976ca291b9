"""Ctrl-C as a wish that the loop of a run looks at between steps, so that nothing is cut in half."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the user pressed Ctrl-C."""

    def __init__(self) -> None:
        self.wanted = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt  # the second time: now
        self.wanted = True


@contextmanager
def gentle_interrupt() -> Iterator[Interrupt]:
    """While open, the first Ctrl-C sets `wanted` and the second one raises KeyboardInterrupt."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt._on_signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
