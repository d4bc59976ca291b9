"""A line plot as SVG text: no library, and it can be shown anywhere."""

from collections.abc import Sequence
from math import log2

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 330, 50, 170, 34, 40
COLOURS = ("#1f6fb4", "#d1495b", "#3a8f4d", "#8a5cb8", "#c77f1d", "#5a6570")
Line = Sequence[tuple[float, float]]


def lines(title: str, x_label: str, series: dict[str, Line], *, log_x: bool = False, level: float | None = None) -> str:
    """Each series by name, as points (x, y). `level` draws a rule across at that y."""
    points = [point for line in series.values() for point in line]
    xs = sorted({x for x, _ in points})
    ys = [y for _, y in points] + ([level] if level is not None else [])
    low, high = min(0.0, *ys), max(ys) * 1.08 or 1.0

    def across(x: float) -> float:
        first, last, value = (log2(v) if log_x else v for v in (xs[0], xs[-1], x))
        return LEFT + (WIDTH - LEFT - RIGHT) * ((value - first) / (last - first) if last > first else 0.5)

    def down(y: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)

    parts = [_text(LEFT, 20, title, 14), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, 12, "middle")]
    for x in xs:
        parts.append(_text(across(x), HEIGHT - BOTTOM + 16, f"{x:g}", 11, "middle"))
    for i in range(5):
        y = low + (high - low) * i / 4
        parts.append(_rule(LEFT, down(y), WIDTH - RIGHT, down(y), "#ddd"))
        parts.append(_text(LEFT - 6, down(y) + 4, f"{y:.2f}", 11, "end"))
    if level is not None:
        parts.append(_rule(LEFT, down(level), WIDTH - RIGHT, down(level), "#333"))
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        parts.append(_text(WIDTH - RIGHT + 12, TOP + 16 + 18 * number, name, 12, colour=colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", colour: str = "#222") -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{safe}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
