"""Tables in Markdown of what `autoshard bench step --out FILE` has measured.

python benchmarks/tabulate_steps.py steps.json           # models beside each other
python benchmarks/tabulate_steps.py steps.json --long    # a line a contestant
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autoshard.tools.bench.contestants import RIVALS
from autoshard.tools.bench.peak_memory import Memory
from autoshard.tools.bench.step import OURS, Entry, StepTimes

AGAINST = {OURS: RIVALS, "autoshard, kept": (*RIVALS, "FSDP2, kept")}
"""With which rivals each form of ours is compared: one that takes more memory, with such, too."""

LONG = (
    "model",
    "contestant",
    "ms",
    "middle half",
    "all",
    "beyond unsharded, ms",
    "tokens/s a rank",
    "MB at the peak",
    "first step, s",
)


def read(measured: list[dict[str, Any]]) -> list[StepTimes]:
    """Make results of what `autoshard bench step` has written, parsed from JSON."""
    results = []
    for result in measured:
        entries = {}
        for name, entry in result["entries"].items():
            memory = {key: Memory(**entry[key]) for key in ("kept", "peak")}
            entries[name] = Entry(**{**entry, **memory})
        results.append(StepTimes(**{**result, "entries": entries}))
    return results


def median_ms(result: StepTimes, name: str) -> float:
    return statistics.median(result.entries[name].step_ms)


def of_fastest(result: StepTimes, name: str) -> float:
    """Ratio of the median step of `name`, a key of `AGAINST`, to that of its fastest rival."""
    return median_ms(result, name) / min(median_ms(result, rival) for rival in AGAINST[name])


def short(results: list[StepTimes]) -> Iterator[str]:
    """Yield the lines of two tables with a column a model: milliseconds and ratios; then memory.

    All results must have the contestants of the first, among them those of `AGAINST` and their
    rivals.
    """
    yield row(["ms", *(result.name for result in results)])
    yield rule(len(results) + 1)
    names = list(results[0].entries)
    for name in names:
        cells = []
        for result in results:
            steps = result.entries[name].step_ms
            cells.append(f"{statistics.median(steps):.0f} ({min(steps):.0f} to {max(steps):.0f})")
        yield row([name, *cells])
    for name in AGAINST:
        ratios = [f"**{of_fastest(result, name):.2f}**" for result in results]
        yield row([f"{name}, of the fastest rival", *ratios])
    bounds = [f"{result.of_bound():.2f}" for result in results]
    yield row([f"{OURS}: forward and backward, of computation and collectives alone", *bounds])
    yield ""
    yield row(["MB at the peak", *(result.name for result in results)])
    yield rule(len(results) + 1)
    for name in names:
        peaks = [result.entries[name].peak.allocated / 1e6 for result in results]
        yield row([name, *(f"{peak:.0f}" for peak in peaks)])


def long(results: list[StepTimes]) -> Iterator[str]:
    """Yield the lines of a table with a line for each model and contestant, with quartiles."""
    yield row(LONG)
    yield rule(len(LONG))
    for result in results:
        for name, entry in result.entries.items():
            steps = entry.step_ms
            lower, median, upper = statistics.quantiles(steps, n=4)
            yield row(
                [
                    result.name,
                    name,
                    f"{median:.0f}",
                    f"{lower:.0f} to {upper:.0f}",
                    f"{min(steps):.0f} to {max(steps):.0f}",
                    f"{result.beyond_ms(name):.0f}",
                    f"{result.tokens / median * 1e3:.0f}",
                    f"{entry.peak.allocated / 1e6:.0f}",
                    f"{entry.first_s:.0f}",
                ]
            )


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    return "|" + "---|" * columns


def main() -> None:
    """Print the tables of the file that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured")
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    results = read(json.loads(Path(options.measured).read_text()))
    print("\n".join(long(results) if options.long else short(results)))


if __name__ == "__main__":
    main()
