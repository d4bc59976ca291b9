"""`lab --version`."""

import lab
from lab.cli.arguments import Arguments


def version(arguments: Arguments) -> int:
    """Print the version of lab."""
    print(f"lab {lab.__version__}")
    return 0
