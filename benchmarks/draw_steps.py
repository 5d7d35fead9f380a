"""A picture of what `autoshard bench step --out FILE` has measured: a bar a contestant.

python benchmarks/draw_steps.py steps.json docs/steps.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from plot import Bar, Lane, timeline

COLORS = {"forward and backward": "#4878a8", "optimizer": "#b8b8b8"}


def lanes_of(results: list[dict[str, Any]]) -> list[Lane]:
    """Make a lane for each model and contestant: forward and backward, then the optimizer.

    Bars are medians in milliseconds, one behind the other. results: as read from the JSON file.
    """
    lanes = []
    for result in results:
        for name, entry in result["entries"].items():
            backward = statistics.median(entry["backward_ms"])
            whole = backward + statistics.median(entry["optimizer_ms"])
            first, second = COLORS.values()
            bars = [Bar(0.0, backward, first), Bar(backward, whole, second)]
            lanes.append(Lane(f"{result['name']}: {name}, {whole:.0f} ms", bars))
    return lanes


def main() -> None:
    """Read the measurements, and draw them to an SVG file; both are named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured")
    parser.add_argument("picture")
    options = parser.parse_args()
    results = json.loads(Path(options.measured).read_text())
    timeline(lanes_of(results), COLORS, Path(options.picture), unit="ms")


if __name__ == "__main__":
    main()
