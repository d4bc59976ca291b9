"""Tables for people: drawn on a terminal, plain aligned columns everywhere else."""

import sys
from collections.abc import Sequence


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows of text under headers."""
    if sys.stdout.isatty():
        _draw(headers, rows, title)
        return
    if title:
        print(title)
    widths = [max(len(line[i]) for line in (headers, *rows)) for i in range(len(headers))]
    for line in (headers, *rows):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


def number(value: float | None, digits: int = 1) -> str:
    """A measured value for a table; empty when there is none."""
    return "" if value is None else f"{value:,.{digits}f}"


def in_bytes(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("the last unit takes every count")


def _draw(headers: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*headers, title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)
    console.print(table)
