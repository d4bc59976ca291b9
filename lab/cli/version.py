"""`lab --version`."""

import lab
from lab.cli.arguments import Arguments


def version(arguments: Arguments) -> int:
    print(f"lab {lab.__version__}")
    return 0
