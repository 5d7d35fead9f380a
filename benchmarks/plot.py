"""Line charts and timelines, for pictures in the documentation, by matplotlib.

    picture([Chart("loss", [Line("eager", values, "#1f77b4")])], path)
    timeline([Lane("compute", [Bar(0.0, 2.5, "#b8b8b8")])], {"compute": "#b8b8b8"}, path, unit="ms")

A picture is charts, or lanes, below each other over one axis. The same numbers write the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

WIDTH = 7.6  # inches
LANE = 0.34  # inches of height
FAINT = "#e3e3e3"
STYLE = {"svg.hashsalt": "autoshard", "svg.fonttype": "none", "font.size": 9}


@dataclass(frozen=True)
class Line:
    """Line of a chart.

    name: for the legend, None for no entry.
    values: one a step, NaN where there is none.
    dashes: lengths of dash and gap, in points; none for a solid line.
    """

    name: str | None
    values: Sequence[float]
    color: str
    width: float = 1.5
    dashes: tuple[float, float] | None = None


@dataclass(frozen=True)
class Chart:
    """Lines over one axis. height: in inches."""

    title: str
    lines: Sequence[Line]
    height: float = 2.4
    from_zero: bool = False


@dataclass(frozen=True)
class Bar:
    """Something that goes on from `begin` to `end`."""

    begin: float
    end: float
    color: str


@dataclass(frozen=True)
class Lane:
    """Bars that follow one another in one queue."""

    name: str
    bars: Sequence[Bar]


def picture(charts: Sequence[Chart], path: Path, *, steps: str = "step") -> None:
    """Draw `charts` below each other, and write them to `path` as SVG.

    steps: label of their axis, which counts from 1.
    """
    heights = [chart.height for chart in charts]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights) + len(charts)), layout="constrained")
        axes = figure.subplots(len(charts), height_ratios=heights, squeeze=False)[:, 0]
        for chart, axis in zip(charts, axes, strict=True):
            _draw(chart, axis)
        axes[-1].set_xlabel(steps)
        _save(figure, path)


def _draw(chart: Chart, axis: Any) -> None:
    """Plot the lines of `chart` into `axis`, with title, grid and legend."""
    for line in chart.lines:
        look = "-" if line.dashes is None else (0, line.dashes)
        numbers = range(1, len(line.values) + 1)
        label = {} if line.name is None else {"label": line.name}
        axis.plot(
            numbers, line.values, color=line.color, linewidth=line.width, linestyle=look, **label
        )
    axis.set_title(chart.title, loc="left", fontsize=9, fontweight="bold")
    axis.grid(axis="y", color=FAINT)
    axis.spines[["top", "right"]].set_visible(False)
    if chart.from_zero:
        axis.set_ylim(bottom=0)
    axis.legend(frameon=False)


def timeline(lanes: Sequence[Lane], legend: Mapping[str, str], path: Path, *, unit: str) -> None:
    """Draw `lanes` below each other, the first on top, and write them to `path` as SVG.

    legend: colors, by what they stand for.
    unit: of the bars' begin and end, as a label.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, LANE * len(lanes) + 1.0), layout="constrained")
        axis: Any = figure.subplots()
        for row, lane in enumerate(lanes):
            spans = [(bar.begin, bar.end - bar.begin) for bar in lane.bars]
            colors = [bar.color for bar in lane.bars]
            axis.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors, edgecolor="white", lw=0.5)
        axis.set_yticks(range(len(lanes)), [lane.name for lane in lanes])
        axis.invert_yaxis()
        axis.set_xlabel(unit)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0)
        figure.legend(
            handles=[Patch(color=color, label=name) for name, color in legend.items()],
            loc="outside upper left",
            ncols=len(legend),
            frameon=False,
        )
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})
