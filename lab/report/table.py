"""The summary of a run as tables in human units. Torch-free."""

from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from lab.metrics.quiet import taken_by_others
from lab.report.spec import CATEGORY_HEADER, category_rows, spec_rows

LATENCY_ROWS = (
    ("TTFT", "ttft_ms"),
    ("ITL", "itl_ms"),
    ("TPOT", "tpot_ms"),
    ("end to end", "e2e_ms"),
    ("queue", "queue_ms"),
    ("prefill", "prefill_ms"),
    ("decode", "decode_ms"),
)
PERCENTILES = ("mean", "p50", "p90", "p99", "max")


def milliseconds(ms: float) -> str:
    """A time with three significant digits and the unit that fits: us, ms, s or min."""
    if ms < 0.9995:
        return f"{ms * 1e3:.0f} us"
    if ms < 999.5:
        return f"{ms:.2f} ms" if ms < 9.995 else f"{ms:.1f} ms" if ms < 99.95 else f"{ms:.0f} ms"
    seconds = ms / 1e3
    return f"{seconds:.2f} s" if seconds < 119.5 else f"{seconds / 60:.1f} min"


def size(count: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def peaks(memory: Mapping[str, Any]) -> str:
    """The most memory that the run's process held and, where its tensors are not there, the most that they took of the GPU."""
    on_gpu = f", of its tensors on the GPU {size(memory['peak_device_bytes'])}" if "peak_device_bytes" in memory else ""
    return f"peak of this process {size(memory['peak_rss_bytes'])}{on_gpu}"


def weights(memory: Mapping[str, Any]) -> str:
    """What the weights take as they are stored and, where that is another size, the parameters themselves."""
    stored, parameters = size(memory["weights_bytes"]), size(memory["parameter_bytes"])
    return stored if stored == parameters else f"{stored} (as stored for computing; the parameters are {parameters})"


def headline(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary's lines, name and value, of what the run has."""
    failed = f", {metrics['num_failed']} failed" if metrics["num_failed"] else ""
    unfinished = f", {metrics['num_unfinished']} unfinished" if metrics.get("num_unfinished") else ""
    rows = [
        ("requests", f"{metrics['num_requests']}{failed}{unfinished}"),
        ("tokens", f"{metrics['prompt_tokens']:,} prompt, {metrics['output_tokens']:,} output"),
        ("duration", milliseconds(metrics["duration_s"] * 1e3)),
    ]
    if share := taken_by_others(metrics):
        rows.append(("machine", f"busy: other processes took {share} of the CPU during the run, so its times say little"))
    if "output_tok_per_s" in metrics:
        rows.append(
            ("throughput", f"{metrics['output_tok_per_s']:,.1f} output tok/s, {metrics['requests_per_s']:.2f} requests/s")
        )
    if "goodput_req_per_s" in metrics:
        rows.append(("goodput", f"{metrics['goodput_req_per_s']:.2f} requests/s"))
    if metrics.get("preemptions"):
        rows.append(("preemptions", str(metrics["preemptions"])))
    if cache := metrics.get("prefix_cache"):
        rows.append(("prefix cache", f"{cache['hit_rate']:.1%} of {cache['queries']:,} prompt tokens"))
    if spec := metrics.get("spec"):
        rows += spec_rows(spec)
    if kv := metrics.get("kv"):
        share = kv["peak_used_blocks"] / kv["num_blocks"]
        taken = size(kv["peak_used_blocks"] * kv["bytes_per_block"])
        rows.append(("KV cache", f"peak {kv['peak_used_blocks']:,} of {kv['num_blocks']:,} blocks ({share:.1%}), {taken}"))
    if memory := metrics.get("memory"):
        rows.append(("memory", f"{peaks(memory)}; weights {weights(memory)}"))
    roofline = metrics.get("roofline", {})
    if "floor_ratio" in roofline:
        step, floor = milliseconds(roofline["decode_step_ms"]), milliseconds(roofline["decode_floor_ms"])
        if roofline["quiet"]:
            slower = roofline.get("shortfall", 0.0)
            late = f"; when last measured, the memory was {slower:.0%} slower than that floor supposes" if slower else ""
            rows.append(("decode step", f"{step}, {roofline['floor_ratio']:.2f} times its floor of {floor}{late}"))
        else:
            told = (
                f"{step}; the floor is a guess ({floor}): its measurement was disturbed, `lab roofline --measure` makes another"
            )
            rows.append(("decode step", told))
    if startup := metrics.get("startup_s"):
        rows.append(("start-up", milliseconds(startup["total"] * 1e3)))
    return rows


def latency_rows(metrics: Mapping[str, Any]) -> list[list[str]]:
    """One row per latency that the run has: its name and its percentiles."""
    return [
        [label, *(milliseconds(metrics[key][name]) for name in PERCENTILES)] for label, key in LATENCY_ROWS if key in metrics
    ]


def print_summary(metrics: Mapping[str, Any], stream: IO[str]) -> None:
    """Print the tables that the run has: drawn by rich on a terminal, plain columns elsewhere."""
    tables = [(["latency", *PERCENTILES], latency_rows(metrics))]
    tables.append((list(CATEGORY_HEADER), category_rows(metrics.get("categories", {}))))
    tables = [(header, rows) for header, rows in tables if rows]
    if stream.isatty():
        _draw(headline(metrics), tables, Console(file=stream))
    else:
        print(plain_table([list(row) for row in headline(metrics)]), file=stream)
        for header, rows in tables:
            print("\n" + plain_table([header, *rows]), file=stream)
    if metrics.get("num_first_token_steps") == 1 and metrics["num_requests"] - metrics["num_failed"] > 1:
        print("\nThe first tokens of all requests came in the same step: each TTFT is that of all prompts.", file=stream)


def _draw(lines: Sequence[tuple[str, str]], tables: Sequence[tuple[list[str], list[list[str]]]], console: Console) -> None:
    summary = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in lines:
        summary.add_row(f"[bold]{name}[/bold]", value)
    console.print(summary)
    for header, rows in tables:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for number, column in enumerate(header):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print("")
        console.print(table)


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest entry, two spaces apart; no trailing blanks."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
