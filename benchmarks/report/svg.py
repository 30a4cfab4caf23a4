"""Plots as SVG text, small enough to be read on a phone; colours follow the page's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 440
COLORS = ("#8a8f98", "#2f6fde", "#d9822b", "#2e9e6b", "#b04fc4", "#d64550", "#0f9bb4", "#8c6d3f")
"""Grey is for the baseline."""
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line and its marks. points: (x, y); labels: beside marks; steps: y holds until the next x."""

    name: str
    points: Sequence[Point]
    color: str
    labels: Sequence[str] = field(default=())
    marks: bool = True
    steps: bool = False


@dataclass(frozen=True)
class Bar:
    """value with its spread low..high."""

    label: str
    value: float
    low: float
    high: float
    color: str


def text(
    x: float, y: float, words: str, anchor: str = "start", size: float = 12, more: str = ""
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" {more}>'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, css: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}" {more}/>'


def picture(height: float, parts: Sequence[str], title: str, style: str = "") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif">{style}'
        + "".join(parts)
        + "</svg>"
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high."""
    span = max(high - low, 1e-9)
    step = 10 ** math.floor(math.log10(span / about))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= about)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def bars(title: str, sections: Sequence[tuple[str, Sequence[Bar]]], style: str = "") -> str:
    """Horizontal bars by section, a line at 1, and whiskers where there is a spread."""
    left, right, row = 138, 48, 20
    highest = max([bar.high for _, each in sections for bar in each] + [1.1])
    scale = (WIDTH - left - right) / highest
    parts: list[str] = []
    values: list[str] = []
    y = 6.0
    for name, each in sections:
        if name:
            parts.append(text(2, y + 11, name, size=12.5, more='font-weight="600"'))
            y += 18
        for bar in each:
            middle = y + row / 2
            parts.append(text(left - 6, middle + 4, bar.label, "end"))
            parts.append(
                f'<rect x="{left}" y="{y + 3:.1f}" width="{max(bar.value * scale, 0.5):.1f}" '
                f'height="{row - 6}" rx="2" fill="{bar.color}"/>'
            )
            if bar.high - bar.low > 1e-9:
                a, b = left + bar.low * scale, left + bar.high * scale
                parts.append(line(a, middle, b, middle, "whisker"))
                parts += [line(x, middle - 4, x, middle + 4, "whisker") for x in (a, b)]
            end = left + max(bar.value, bar.high) * scale
            values.append(text(end + 5, middle + 4, f"{bar.value:.2f}x", more='class="halo"'))
            y += row
        y += 8
    one = left + scale
    parts.append(line(one, 2, one, y - 4, "one"))
    return picture(y, [*parts, *values], title, style)


def lines(
    title: str,
    x_name: str,
    y_name: str,
    series: Sequence[Series],
    *,
    from_zero: bool = True,
    percent: bool = False,
    spikes: Sequence[Point] = (),
    spikes_name: str = "",
) -> str:
    """Lines with marks and a legend; `spikes` are bars behind them, as a share of their highest."""
    points = [point for each in series for point in each.points]
    if not points:
        return ""
    left, right, top, plot = 46, 12, 26, 210
    xs, ys = [x for x, _ in points] + [x for x, _ in spikes], [y for _, y in points]
    x0, x1 = min(xs), max(xs)
    y0, y1 = (0.0 if from_zero else min(ys)), max(ys) * 1.06
    if x1 == x0:
        x0, x1 = x0 - 1, x1 + 1
    pad = 0.04 * (x1 - x0)
    x0, x1 = x0 - pad, x1 + pad
    y1 = y1 if y1 > y0 else y0 + 1.0

    def px(x: float) -> float:
        return left + (x - x0) / (x1 - x0) * (WIDTH - left - right)

    def py(y: float) -> float:
        return top + plot - (y - y0) / (y1 - y0) * plot

    parts: list[str] = []
    for tick in ticks(y0, y1):
        label = f"{100 * tick:.0f}%" if percent else f"{tick:g}"
        parts.append(line(left, py(tick), WIDTH - right, py(tick), "grid"))
        parts.append(text(left - 5, py(tick) + 4, label, "end"))
    for tick in ticks(max(x0, min(xs)), x1, 7):
        parts.append(text(px(tick), top + plot + 15, f"{tick:g}", "middle"))
    highest = max([y for _, y in spikes], default=1.0) or 1.0
    for x, y in spikes:
        height = 0.45 * plot * y / highest
        parts.append(
            f'<rect x="{px(x) - 4:.1f}" y="{top + plot - height:.1f}" width="8" height="{height:.1f}" class="spike"/>'
        )
    for each in series:
        path: list[str] = []
        for i, (x, y) in enumerate(each.points):
            if i and each.steps:
                path.append(f"H{px(x):.1f}")
            path.append(f"{'L' if i else 'M'}{px(x):.1f} {py(y):.1f}")
        parts.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{each.color}" stroke-width="2"/>'
        )
        for i, (x, y) in enumerate(each.points if each.marks else ()):
            parts.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="3" fill="{each.color}"/>')
            if i < len(each.labels):
                parts.append(text(px(x) + 5, py(y) - 5, each.labels[i], size=10))
    y = top + plot + 32
    parts.append(text(WIDTH - right, y, x_name, "end"))
    parts.append(text(2, 12, y_name))
    y += 18
    x = 2.0
    named = [(each.name, each.color) for each in series]
    if spikes:
        named.append((spikes_name, "#9aa0a8"))
    for name, color in named:
        width = 26 + 7.3 * len(name)
        if x + width > WIDTH and x > 2:
            x, y = 2.0, y + 17
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="{color}"/>'
        )
        parts.append(text(x + 14, y, name))
        x += width
    return picture(y + 8, parts, title)
