"""Ctrl-C: answered at once with a line on stderr, and taken by loops as a wish that they look at between steps, so that
nothing is cut in half. Torch-free.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType, ModuleType

STOPPING = "lab: stopping after the running step; Ctrl-C again stops at once"
AFTER_STEP = "lab: stopping after the running step and writing what is there; Ctrl-C again stops at once"
WRITING = "lab: writing what is there; Ctrl-C again stops at once"


class Interrupt:
    """How often the user has pressed Ctrl-C, and what was said of the first time."""

    def __init__(self, told: str, *, gentle: bool) -> None:
        self.count = 0
        self._told = told
        self._gentle = gentle

    @property
    def wanted(self) -> bool:
        return self.count > 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            _tell(self._told)
        if self.count > 1 or not self._gentle:
            signal.default_int_handler(number, frame)


def gentle_interrupt(told: str = AFTER_STEP) -> AbstractContextManager[Interrupt]:
    """While open, the first Ctrl-C says `told` and sets `wanted`, and the second one raises KeyboardInterrupt."""
    return _handling(Interrupt(told, gentle=True))


def told_interrupt(told: str) -> AbstractContextManager[Interrupt]:
    """While open, every Ctrl-C raises KeyboardInterrupt as ever, and the first says `told`."""
    return _handling(Interrupt(told, gentle=False))


def import_interruptibly(module: str) -> ModuleType:
    """importlib.import_module, with a Ctrl-C meanwhile raised at its end: numpy and torch may swallow the KeyboardInterrupt."""
    imported = importlib.import_module(module)
    if (outer := _open_now()) is not None and outer.wanted:
        raise KeyboardInterrupt
    return imported


@contextmanager
def _handling(interrupt: Interrupt) -> Iterator[Interrupt]:
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
        yield interrupt
        return
    if (outer := _open_now()) is not None:
        interrupt.count = outer.count  # where the KeyboardInterrupt was swallowed, the wish is not
    before = signal.signal(signal.SIGINT, interrupt._on_signal)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _open_now() -> Interrupt | None:
    handler = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    return handler if isinstance(handler, Interrupt) else None


def _tell(text: str) -> None:
    """Print on stderr, from within a signal's handler: the line that the terminal shows ^C in, or a bar, ends first."""
    text = f"\n{text}" if sys.stderr.isatty() else text
    try:
        print(text, file=sys.stderr, flush=True)
    except RuntimeError:  # the signal came in the middle of printing there
        os.write(2, f"{text}\n".encode())
