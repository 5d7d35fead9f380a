"""Pictures as SVG: lanes of bars, stacked areas and points, with a text for each to hover over.

The text is a `title` element, which browsers show without any script. Colors are classes of
`markup.STYLE`. All text is escaped.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

WIDTH, LEFT, RIGHT = 1072, 132, 16  # of a picture, and of what is beside its axis, in pixels
LANE, BAR = 25, 19  # heights
AREAS = 210  # height
LEAST = 0.6  # width of the shortest bar
NARROW = 640  # pixels below which a window scrolls a picture, in place of making it smaller


@dataclass(frozen=True)
class Bar:
    """Span of a lane.

    color: a class of `markup.STYLE`, "gather" for instance.
    title: shown where the mouse is over it.
    text: written inside, if there is room.
    """

    begin: float
    end: float
    color: str
    title: str
    text: str = ""


@dataclass(frozen=True)
class Lane:
    """Bars in one row, with the row's name."""

    name: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Point:
    """Dot in a plane; see `Bar`."""

    x: float
    y: float
    color: str
    title: str


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, on pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Pixel of a value."""
        span = self.high - self.low
        return self.begin + (self.end - self.begin) * ((value - self.low) / span if span else 0.0)


def ticks(low: float, high: float, most: int = 9) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 875, 5), ticks(0.2, 1.1, 3)
    ([0.0, 200.0, 400.0, 600.0, 800.0], [0.5, 1.0])
    """
    if not 0 < high - low < math.inf:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = (each * power for each in (1, 2, 5, 10))
    step = next((each for each in steps if (high - low) / each <= most), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def lanes(rows: Sequence[Lane], end: float, unit: str) -> str:
    """Draw lanes above each other, over an axis from 0 to `end`.

    unit: of the axis, "ms" for instance.
    """
    across = Axis(0, end, LEFT, WIDTH - RIGHT)
    height = LANE * len(rows) + 4
    parts = list(_upright(across, 0, height, unit))
    for number, row in enumerate(rows):
        top = LANE * number + (LANE - BAR) / 2
        parts.append(_text(LEFT - 8, top + BAR - 5, row.name, "name"))
        for bar in row.bars:
            x = across.at(bar.begin)
            width = max(LEAST, across.at(bar.end) - x)
            parts.append(_rect(x, top, width, BAR, bar.color, bar.title))
            if bar.text and width > 7 * len(bar.text):
                parts.append(_text(x + 5, top + BAR - 5, bar.text, "inside"))
    return _picture(parts, height + 20)


def areas(
    columns: Sequence[tuple[float, Mapping[str, float]]],
    end: float,
    units: tuple[str, str],
    *,
    most: float,
    line: tuple[float, str] | None,
    title: Callable[[float, Mapping[str, float]], str],
) -> str:
    """Draw values over an axis from 0 to `end`, stacked in the order of the first column.

    columns: (begin, values by their colors); each lasts until the next begins, the last to `end`.
    units: of both axes.
    most: value at the upper edge.
    line: a value that is marked, and its name.
    title: of a column, from its begin and values.
    """
    across, up = Axis(0, end, LEFT, WIDTH - RIGHT), Axis(0, most, AREAS, 8)
    parts = [*_level(up, units[1]), *_upright(across, 8, AREAS, units[0])]
    begins = [across.at(begin) for begin, _ in columns]
    spans = list(itertools.pairwise([*begins, across.at(end)]))
    stacks = [list(itertools.accumulate(values.values(), initial=0.0)) for _, values in columns]
    for number, color in enumerate(columns[0][1]):
        edges = [(up.at(stack[number]), up.at(stack[number + 1])) for stack in stacks]
        parts.append(f'<path class="{color}" d="{_steps(spans, edges)}"/>')
    for (begin, values), (x, after) in zip(columns, spans, strict=True):
        words = title(begin, values)
        parts.append(_rect(x, 8, max(LEAST, after - x), AREAS - 8, "column", words))
    if line is not None:
        y = up.at(line[0])
        parts.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(WIDTH - RIGHT - 4, y - 4, line[1], "name halo"))
    return _picture(parts, AREAS + 20)


def points(
    dots: Sequence[Point],
    front: Sequence[Point],
    units: tuple[str, str],
    line: tuple[float, str] | None,
) -> str:
    """Draw dots in a plane, and a line through those of the `front`, in their order.

    units: of both axes.
    line: an upright one at this x, with a name; left out where no dot is near.
    """
    right, height = 560, 300
    xs, ys = [each.x for each in dots], [each.y for each in dots]
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low) or 0.1 * high or 1.0
    across = Axis(0, 1.05 * max(xs), LEFT, right)
    up = Axis(max(0.0, low - margin), high + margin, height, 22)
    parts = [*_level(up, "", right), *_upright(across, 22, height, units[0], 6)]
    parts.append(_text(LEFT, 12, units[1], "start"))
    if line is not None and line[0] < across.high:
        x = across.at(line[0])
        parts.append(f'<path class="limit" d="M{x:.1f} 22V{height}"/>')
        parts.append(_text(x + 4, 32, line[1], "halo"))
    if front:
        way = "L".join(f"{across.at(each.x):.1f} {up.at(each.y):.1f}" for each in front)
        parts.append(f'<path class="way" d="M{way}"/>')
    for each in [*(each for each in dots if each not in front), *front]:
        parts.append(
            f'<circle class="{each.color}" cx="{across.at(each.x):.1f}" cy="{up.at(each.y):.1f}" '
            f'r="4.5"><title>{html.escape(each.title)}</title></circle>'
        )
    return _picture(parts, height + 20, right + RIGHT)


def _steps(spans: Iterable[tuple[float, float]], edges: Sequence[tuple[float, float]]) -> str:
    """Outline of an area of columns: along the upper edges, and back along the lower ones."""
    spans = list(spans)
    there = [f"V{high:.1f}H{x:.1f}" for (_, x), (_, high) in zip(spans, edges, strict=True)]
    back = [f"V{low:.1f}H{x:.1f}" for (x, _), (low, _) in zip(spans, edges, strict=True)]
    return f"M{spans[0][0]:.1f} {edges[0][0]:.1f}{''.join(there)}{''.join(reversed(back))}Z"


def _upright(across: Axis, top: float, bottom: float, unit: str, most: int = 9) -> Iterator[str]:
    """Yield the lines and numbers of an axis from left to right, the last number with its unit."""
    found = ticks(across.low, across.high, most)
    for value in found:
        x = across.at(value)
        yield f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>'
        words = f"{value:g} {unit}" if value == found[-1] else f"{value:g}"
        yield _text(x, bottom + 15, words, "middle")


def _level(up: Axis, unit: str, right: float = WIDTH - RIGHT) -> Iterator[str]:
    """Yield the lines and numbers of an axis that goes up, the last number with its unit."""
    found = ticks(up.low, up.high, 5)
    for value in found:
        y = up.at(value)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>'
        words = f"{value:g} {unit}".rstrip() if value == found[-1] else f"{value:g}"
        yield _text(LEFT - 8, y + 4, words, "name")


def _rect(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return (
        f'<rect class="{color}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}">'
        f"<title>{html.escape(title)}</title></rect>"
    )


def _text(x: float, y: float, words: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{html.escape(words)}</text>'


def _picture(parts: Iterable[str], height: float, width: float = WIDTH) -> str:
    inner = "\n".join(parts)
    sizes = f"min-width:{min(width, NARROW):g}px;max-width:{width:g}px"
    return (
        f'<div class="wide"><svg viewBox="0 0 {width:g} {height:g}" style="{sizes}">'
        f"{inner}</svg></div>"
    )
