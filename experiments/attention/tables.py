"""What cpu.py found, as tables in Markdown and as plots."""

from collections.abc import Iterator, Sequence
from typing import Any

from lab.report.svg import bars

FIRST = "flash"  # what the others are compared with
Row = dict[str, Any]


def markdown(limits: dict[str, float], rows: Sequence[Row], note: str) -> str:
    """A table for each kind of work, and the ratios that say whether `flash` is ahead."""
    reading, products = limits["read_gb_per_s"], limits["bf16_gflop_per_s"]
    parts = [f"Limits: {reading:.1f} GB/s of reading, {products:,.0f} GFLOP/s of bf16 products. {note}", ""]
    for work, unit, limit in (("decode", "gb_per_s", reading), ("prefill", "gflop_per_s", products)):
        found = [row for row in rows if row["work"] == work]
        if found:
            parts += [*_table(found, unit, limit), ""]
    for row in rows:
        if row["work"] == "shared":
            times = ", ".join(f"{name} {row[f'{name}_us']:,.0f} us" for name in ("never", "always", "auto"))
            ratio = f"{row['never_over_auto']:.2f} times as fast by auto"
            parts.append(f"- {row['rows']} rows of {row['tokens']} behind {row['shared']:,} shared tokens: {times}; {ratio}")
        if row["work"] == "overhead":
            calls = ", ".join(f"{name.removesuffix('_us')} {us:.1f} us" for name, us in row.items() if name.endswith("_us"))
            parts.append(f"- one token for each of {row['batch']} rows: {calls}")
    return "\n".join(parts) + "\n"


def _table(rows: Sequence[Row], unit: str, limit: float) -> Iterator[str]:
    names = _contestants(rows, unit)
    others = [name for name in names if name != FIRST]
    shown = unit.replace("gb_per_s", "GB/s").replace("gflop_per_s", "GFLOP/s")
    compared = [f"{FIRST} over {name}" for name in others] if FIRST in names else []
    header = [
        rows[0]["work"],
        *(f"{name}, us ({shown})" for name in names),
        *compared,
        *([f"{FIRST} of limit"] if compared else []),
    ]
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        cells = [_label(row), *(f"{_us(row, name):,.0f} ({row[f'{name}_{unit}']:,.1f})" for name in names)]
        if compared:
            cells += [f"{_us(row, name) / _us(row, FIRST):.2f}" for name in others]
            cells.append(f"{row[f'{FIRST}_{unit}'] / limit:.0%}")
        yield f"| {' | '.join(cells)} |"


def plots(limits: dict[str, float], rows: Sequence[Row]) -> dict[str, str]:
    """SVG by file name: what each contestant reaches on each shape, and the limit."""
    found = {}
    for work, unit, limit, title in (
        ("decode", "gb_per_s", "read_gb_per_s", "decode: GB/s of keys and values read (batch x context)"),
        ("prefill", "gflop_per_s", "bf16_gflop_per_s", "prefill: GFLOP/s"),
    ):
        of_work = [row for row in rows if row["work"] == work]
        if of_work:
            names = _contestants(of_work, unit)
            values = [(f"{_label(row)}  {name}", row[f"{name}_{unit}"]) for row in of_work for name in names]
            found[f"{work}.svg"] = bars(title, [*values, ("limit", limits[limit])])
    return found


def _contestants(rows: Sequence[Row], unit: str) -> list[str]:
    return [key.removesuffix(f"_{unit}") for key in rows[0] if key.endswith(f"_{unit}")]


def _us(row: Row, name: str) -> float:
    return row[f"{name}_us"] if f"{name}_us" in row else row[f"{name}_ms"] * 1e3


def _label(row: Row) -> str:
    if row["work"] == "decode":
        return f"{row['batch']} x {row['context']:,}"
    return f"{row['tokens']:,} tokens" + (f" after {row['before']:,}" if row["before"] else "")
