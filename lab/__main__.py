"""The command line: `python -m lab VERB [flags] [overrides]`, also installed as `lab`.

Exit codes: 0 done; 2 a mistake the user can mend, one message on stderr; 1 a fault of ours, with its traceback; 130 Ctrl-C.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. A fault of ours passes through as its exception, one of a plugin is named."""
    with _noting_interrupts() as interrupts:
        try:
            from lab.cli.arguments import parse
            from lab.cli.verbs import VERBS, overview

            arguments = parse(list(sys.argv[1:] if argv is None else argv))
            if arguments.verb is None:
                print(overview())
                return 0 if arguments.wants_help else 2
            verb = VERBS[arguments.verb]
            if arguments.wants_help:
                print(verb.help_text())
                return 0
            module, _, function = verb.target.partition(":")
            code = getattr(importlib.import_module(module), function)(arguments)
            sys.stdout.flush()  # here, where a reader that has left is no error
            return code
        except UserError as error:
            print(f"lab: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return _say_interrupted()
        except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:  # noqa: BLE001 - raised again unless a plugin is to blame
            from lab.registry import to_blame

            if isinstance(error, ImportError) and interrupts:  # what numpy and torch make of it while they are imported
                return _say_interrupted()
            plugin = to_blame(error)
            if plugin is None:
                raise
            traceback.print_exception(error)
            what = f"{type(error).__name__}: {error}"
            print(f"lab: {plugin.kind} plugin '{plugin.name}' ({plugin.path}) failed, see above: {what}", file=sys.stderr)
            return 1


def _say_interrupted() -> int:
    print("lab: interrupted", file=sys.stderr)
    return 130


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """While open, Ctrl-C raises KeyboardInterrupt as ever and is noted in the list: some make another exception of it."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread only
        yield noted
        return

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
