"""The command line: `python -m lab VERB [flags] [overrides]`, also installed as `lab`.

Exit codes: 0 done; 2 a mistake the user can mend, one message on stderr; 1 a fault of ours, with its traceback; 130 Ctrl-C.
"""

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from lab.errors import UserError
from lab.interrupt import Interrupt, told_interrupt

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code. A fault of ours passes through as its exception, one of a plugin is named.

    Without `argv` it is the process's own command; interrupted, the process ends here where a step still runs.
    """
    code = _run_verb(list(sys.argv[1:] if argv is None else argv))
    if argv is None and code == INTERRUPTED and any(_is_at_work(thread) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # an ordinary exit would wait for the step
    return code


def _run_verb(words: list[str]) -> int:
    with told_interrupt("lab: interrupted") as interrupt:
        try:
            from lab.cli.arguments import parse
            from lab.cli.verbs import VERBS, overview

            arguments = parse(words)
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
            return _interrupted(interrupt)
        except BrokenPipeError:  # the reader of our output, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except Exception as error:  # noqa: BLE001 - raised again unless a plugin is to blame
            from lab.registry import to_blame

            if isinstance(error, ImportError) and interrupt.wanted:  # what numpy and torch make of it while they are imported
                return INTERRUPTED
            plugin = to_blame(error)
            if plugin is None:
                raise
            traceback.print_exception(error)
            what = f"{type(error).__name__}: {error}"
            print(f"lab: {plugin.kind} plugin '{plugin.name}' ({plugin.path}) failed, see above: {what}", file=sys.stderr)
            return 1


def _interrupted(interrupt: Interrupt) -> int:
    if not interrupt.wanted:  # nothing was said of it yet
        print("lab: interrupted", file=sys.stderr)
    return INTERRUPTED


def _is_at_work(thread: threading.Thread) -> bool:
    """Whether it is one of ours that the end of the process would wait for."""
    return thread.name.startswith("lab-") and not thread.daemon


if __name__ == "__main__":
    sys.exit(main())
