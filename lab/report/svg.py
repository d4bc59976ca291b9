"""Two kinds of plots as SVG text, which a browser shows without a library or a network. Torch-free."""

import math
from collections.abc import Sequence
from html import escape

from lab.metrics.summary import percentile

WIDTH, BAR, AXIS = 720, 22, 34  # pixels
LABELS = 220  # for the names at the left of bars
COLOURS = ("#1f77b4", "#d95f02", "#2ca02c", "#c51b8a", "#7b4fa3", "#8c6d31", "#17a2a2", "#666666")
DASHES = ("", "6 3", "2 2")  # for lines beyond the last colour
POINTS = 200  # of a line
PLOT_HEIGHT = 240


def bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """A bar for each (name, value), from zero."""
    top = max(value for _, value in values)
    per_pixel = (WIDTH - LABELS - 70) / top if top > 0 else 0.0
    parts = []
    for i, (name, value) in enumerate(values):
        y, width = AXIS + i * BAR, value * per_pixel
        parts += [
            _text(LABELS - 8, y + 14, _short(name), "end"),
            f'<rect x="{LABELS}" y="{y + 2}" width="{width:.1f}" height="{BAR - 5}" fill="{COLOURS[i % len(COLOURS)]}"/>',
            _text(LABELS + width + 6, y + 14, short_number(value)),
        ]
    return _svg(title, AXIS + len(values) * BAR + 6, parts)


def distributions(title: str, samples: Sequence[tuple[str, Sequence[float]]]) -> str:
    """For each (name, samples) the share of samples up to each value, over an axis that is logarithmic when values spread."""
    lines = [(name, _quantiles(sorted(values))) for name, values in samples if len(values)]
    low = min(line[0][0] for _, line in lines)
    high = max(line[-1][0] for _, line in lines)
    is_log = low > 0 and high > 20 * low
    ticks = _log_ticks(low, high) if is_log else _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    height = PLOT_HEIGHT

    def x_of(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)
        return 50 + share * (WIDTH - 80)

    def y_of(share: float) -> float:
        return AXIS + (1 - share) * height

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts += [_rule(50, y_of(share), WIDTH - 30, y_of(share)), _text(44, y_of(share) + 4, f"{share:.0%}", "end")]
    for tick in ticks:
        x = x_of(tick)
        parts += [_rule(x, AXIS, x, AXIS + height), _text(x, AXIS + height + 16, short_number(tick), "middle")]
    legend_y = AXIS + height + 26
    for i, (name, line) in enumerate(lines):
        style = f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-dasharray="{DASHES[i // len(COLOURS) % len(DASHES)]}"'
        points = " ".join(f"{x_of(value):.1f},{y_of(share):.1f}" for value, share in line)
        y = legend_y + i * 16
        parts += [
            f'<polyline points="{points}" fill="none" stroke-width="2" {style}/>',
            f'<line x1="50" y1="{y + 6}" x2="80" y2="{y + 6}" stroke-width="2" {style}/>',
            _text(88, y + 10, name),
        ]
    return _svg(title, legend_y + len(lines) * 16 + 6, parts)


def short_number(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _quantiles(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """(value, share of samples up to it), at so many points that a line through them looks whole."""
    count = min(POINTS, 4 * len(ordered))
    return [(percentile(ordered, i / count), i / count) for i in range(count + 1)]


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers around low .. high."""
    spread = (high - low) or abs(high) or 1.0
    step = 10.0 ** math.floor(math.log10(spread))
    step *= next(factor for factor in (0.2, 0.5, 1.0, 2.0) if spread / (step * factor) <= 6)
    return [i * step for i in range(math.floor(low / step), math.floor(low / step) + 12) if (i - 1) * step <= high]


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten around low .. high; the powers alone where that is many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    of_each = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [digit * 10.0**power for power in powers for digit in of_each]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = next((i for i, tick in enumerate(ticks) if tick >= high), len(ticks) - 1)
    return ticks[first : last + 1]


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">'
    style = 'font-family="sans-serif" font-size="12" fill="#222"'
    heading = f'<text x="0" y="18" font-size="14" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<g {style}>", heading, *parts, "</g></svg>"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _short(name: str, most: int = 34) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."
