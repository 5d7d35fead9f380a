"""Line charts and timelines as SVG, for pictures in the documentation.

    picture([Chart("loss", [Line("eager", values, "#1f77b4")])])
    timeline([Lane("compute", [Bar(0.0, 2.5, "#b8b8b8")])], {"compute": "#b8b8b8"}, unit="ms")

A picture is charts, or lanes, below each other over one axis. Only numbers that come in
decide what is drawn, so that the same run writes the same file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT = 760, 48, 16
ROW, BELOW = 18, 44  # heights: of a line of text; of what stands below an axis
FONT = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
INK, FAINT = "#333333", "#e3e3e3"


@dataclass(frozen=True)
class Line:
    """values: one a step, NaN where there is none. name: for the legend, None for no entry."""

    name: str | None
    values: Sequence[float]
    color: str
    width: float = 1.5
    dashes: str = ""


@dataclass(frozen=True)
class Chart:
    """title: of the vertical axis, and the legend's head. height: of the area with the lines."""

    title: str
    lines: Sequence[Line]
    height: int = 240
    from_zero: bool = False

    @property
    def named(self) -> list[Line]:
        return [line for line in self.lines if line.name is not None]


def picture(charts: Sequence[Chart], *, steps: str = "step") -> str:
    """The text of an SVG file."""
    parts: list[str] = []
    top = 0
    for chart in charts:
        top += ROW * (len(chart.named) + 2)
        parts += _draw(chart, top)
        top += chart.height + BELOW
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, top - 8, steps, anchor="middle"))
    return _svg(parts, top)


@dataclass(frozen=True)
class Bar:
    """Something that goes on from `begin` to `end`."""

    begin: float
    end: float
    color: str


@dataclass(frozen=True)
class Lane:
    """What goes on in one queue."""

    name: str
    bars: Sequence[Bar]


def timeline(lanes: Sequence[Lane], legend: Mapping[str, str], *, unit: str) -> str:
    """The text of an SVG file. legend: what each color stands for."""
    end = max(bar.end for lane in lanes for bar in lane.bars)
    right, thick = WIDTH - RIGHT, 16
    parts: list[str] = []
    x = float(LEFT)
    for name, color in legend.items():
        parts.append(f'<rect x="{x:.1f}" y="10" width="12" height="12" fill="{color}"/>')
        parts.append(_text(x + 18, 20, name))
        x += 40 + 7 * len(name)
    y = 30
    for lane in lanes:
        y += ROW
        parts.append(_text(LEFT, y, lane.name))
        y += 6
        for bar in lane.bars:
            begin = LEFT + (right - LEFT) * bar.begin / end
            width = (right - LEFT) * (bar.end - bar.begin) / end
            parts.append(
                f'<rect x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{thick}" '
                f'fill="{bar.color}" stroke="white" stroke-width="0.5"/>'
            )
        y += thick + 4
    parts.append(f'<path d="M{LEFT} {y + 4}H{right}" stroke="{INK}"/>')
    for value in ticks(0, end):
        parts.append(
            _text(LEFT + (right - LEFT) * value / end, y + 20, f"{value:g}", anchor="middle")
        )
    parts.append(_text((LEFT + right) / 2, y + 38, unit, anchor="middle"))
    return _svg(parts, y + 46)


def _svg(parts: Sequence[str], height: int) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>'
    paper = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return "\n".join([head, paper, *parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Round numbers between `low` and `high`.

    >>> ticks(0.0, 200.0)
    [0.0, 50.0, 100.0, 150.0, 200.0]
    >>> ticks(2.3, 4.2)
    [2.5, 3.0, 3.5, 4.0]
    """
    raw = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(raw))
    step = min((unit * factor for factor in (1, 2, 5, 10)), key=lambda step: abs(step - raw))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _draw(chart: Chart, top: int) -> Iterator[str]:
    num_steps = max(len(line.values) for line in chart.lines)
    known = [value for line in chart.lines for value in line.values if not math.isnan(value)]
    low, high = (0.0 if chart.from_zero else min(known)), max(known)
    bottom, right = top + chart.height, WIDTH - RIGHT

    def x_of(step: float) -> float:
        return LEFT + (right - LEFT) * step / num_steps

    def y_of(value: float) -> float:
        return bottom - chart.height * (value - low) / (high - low)

    first_row = top - ROW * len(chart.named) - 8
    yield _text(LEFT, first_row, chart.title, weight="bold")
    for number, line in enumerate(chart.named, 1):
        y = first_row + ROW * number
        yield f'<path d="M{LEFT} {y - 4}h28" fill="none" {_stroke(line)}/>'
        yield _text(LEFT + 36, y, line.name or "")
    for value in ticks(low, high):
        y = y_of(value)
        yield f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{FAINT}"/>'
        yield _text(LEFT - 8, y + 4, f"{value:g}", anchor="end")
    yield f'<path d="M{LEFT} {bottom}H{right}" stroke="{INK}"/>'
    for step in ticks(0, num_steps):
        yield _text(x_of(step), bottom + 18, f"{step:g}", anchor="middle")
    for line in chart.lines:
        points = [
            f"{x_of(step):.1f},{y_of(value):.1f}"
            for step, value in enumerate(line.values, 1)
            if not math.isnan(value)
        ]
        yield f'<polyline points="{" ".join(points)}" fill="none" {_stroke(line)}/>'


def _stroke(line: Line) -> str:
    dashes = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    return f'stroke="{line.color}" stroke-width="{line.width:g}"{dashes}'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    look = f'text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
