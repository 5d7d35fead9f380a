"""Hybrid sharding on 32 A100: the iteration times that PyTorch measured, and what is predicted.

    python benchmarks/hsdp.py [--svg docs/hsdp.svg]

Six encoder and six decoder layers of width 8192 on four nodes of eight, in half precision. Of each
row the table of PyTorch's pull request 106080 tells what one collective of an encoder and of a
decoder layer takes, and what an iteration does. The former is given; what is computed is not told,
and is the one unknown, found from `--fit`. A layer's share of it is that of its bytes; backward
computes twice as long.

The first row can't tell it: its collectives alone, on one network, take 1136 of 1160 ms, each known
to half a millisecond. So it is found from the second, and the others are predicted.

Queues: sharded over all, everything is on the network. Within a node, gathers and reduce-scatters
are not; sums over copies are. In the second row the next reduce-scatter waits for such a sum, and
is in its queue.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from plot import Bar, Lane, timeline

from autoshard.passes.planner.costs import PACKED, Costs, Link
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.simulate import Timeline, make_bucket, simulate

LAYERS = ("encoder",) * 6 + ("decoder",) * 6
PARAMETERS = {
    "encoder": 4 * 8192**2 + 2 * 8192 * 2048,  # an attention, an MLP of torch's default width
    "decoder": 8 * 8192**2 + 2 * 8192 * 2048,
}
BYTES = {layer: 2 * count for layer, count in PARAMETERS.items()}
"""24.46 GiB/s for 23 ms, and 26.5 GiB/s for 40 ms, say the same within 0.3 %."""

ADAM_BYTES = 28  # read and written of each parameter: itself, two states, and a gradient read
MEMORY_BYTES_PER_MS = 1.555e9  # A100 40 GB, NVIDIA's data sheet


@dataclass(frozen=True)
class Row:
    """Configuration that was measured, with times of its collectives in milliseconds.

    Times are of an encoder and of a decoder layer.
    shards: ranks that share a parameter.
    gather: its queue, and its times.
    sums: reduce-scatter and perhaps all-reduce, likewise.
    """

    name: str
    measured_ms: float
    shards: int
    gather: tuple[str, float, float]  # its queue, and its times
    sums: tuple[tuple[str, float, float], ...]  # reduce-scatter and all-reduce


NODE, NETWORK = "within a node", "network"
ROWS = (
    Row("sharded over all 32", 1160, 32, (NETWORK, 23, 40), ((NETWORK, 23, 40),)),
    Row(
        "8 shards, sums beside gathers",
        665,
        8,
        (NODE, 3, 5),
        ((NETWORK, 3, 5), (NETWORK, 30, 55)),
    ),
    # 49 ms is an all-reduce of a decoder layer with nothing beside it; with something, 100 ms.
    Row(
        "and beside reduce-scatters",
        597,
        8,
        (NODE, 3, 6.2),
        ((NODE, 3, 6.2), (NETWORK, 23, 49)),
    ),
    # Not told but that nothing slows all-reduces down: the same times.
    Row(
        "and with NCCL_CROSS_NIC=1",
        556,
        8,
        (NODE, 3, 6.2),
        ((NODE, 3, 6.2), (NETWORK, 23, 49)),
    ),
)


def step(row: Row, compute_ms: float) -> tuple[Timeline, Timeline]:
    """Simulate forward and backward of a row, with a bucket for each layer and no limit to memory.

    compute_ms: of both together.
    """
    links = {"gather": (_link(*row.gather),), "reduce": tuple(_link(*each) for each in row.sums)}
    costs = Costs(links, dict.fromkeys(links, row.shards), copy_us_per_byte=0.0)
    us_per_byte = 1e3 * compute_ms / 3 / sum(BYTES[layer] for layer in LAYERS)
    forward = _graph("forward", LAYERS, us_per_byte, costs)
    return forward, _graph("backward", LAYERS[::-1], 2 * us_per_byte, costs)


def _link(name: str, encoder_ms: float, decoder_ms: float) -> Link:
    """Make a link on which the two layers take these times, with a start-up and a time a byte."""
    slope = 1e3 * (decoder_ms - encoder_ms) / (BYTES["decoder"] - BYTES["encoder"])
    return Link(name, 1e3 * encoder_ms - slope * BYTES["encoder"], slope, member_us=0.0)


def _graph(graph: str, layers: tuple[str, ...], us_per_byte: float, costs: Costs) -> Timeline:
    """Simulate one graph: an op, a gather and, in backward, a reduce for each of `layers`.

    us_per_byte: time of an op for each byte of its layer's parameters.
    """
    end = len(layers)
    gathers = tuple(
        Item(layer, layer, "gather", BYTES[layer], ready=0, used=at, freed=at + 1)
        for at, layer in enumerate(layers)
    )
    reduces = tuple(
        Item(layer, layer, "reduce", BYTES[layer], ready=at + 1, used=end, freed=end)
        for at, layer in enumerate(layers)
        if graph == "backward"
    )
    op_us = tuple(us_per_byte * BYTES[layer] for layer in layers)
    problem = Problem(graph, op_us, (0,) * end, gathers, reduces, costs)
    return simulate(
        problem,
        [make_bucket(problem, "gather", [item], PACKED) for item in gathers],
        [make_bucket(problem, "reduce", [item], PACKED) for item in reduces],
        budget_bytes=float("inf"),
    )


def step_ms(row: Row, compute_ms: float) -> float:
    """Milliseconds of a whole iteration: forward, backward, and Adam on the shards."""
    of_shards = sum(PARAMETERS[layer] for layer in LAYERS) / row.shards
    adam_ms = ADAM_BYTES * of_shards / MEMORY_BYTES_PER_MS
    return sum(each.time_us for each in step(row, compute_ms)) / 1e3 + adam_ms


def fitted_compute_ms(row: Row) -> float:
    """Find the milliseconds of computation with which `row` takes what was measured.

    They are between 0 and the time that was measured, found by bisection to a microsecond.
    """
    low, high = 0.0, row.measured_ms
    while high - low > 1e-3:
        middle = (low + high) / 2
        if step_ms(row, middle) < row.measured_ms:
            low = middle
        else:
            high = middle
    return low


def draw(rows: dict[str, Row], compute_ms: float, path: Path) -> None:
    """Draw the rows' backwards, one below the other, compute and both queues, as SVG to `path`.

    rows: by the names that lanes get.
    """
    colors = {"gather": "#7aa6d8", "reduce": "#8fc28b", "all_reduce": "#e0a458", "": "#b8b8b8"}
    lanes = []
    for name, row in rows.items():
        _, backward = step(row, compute_ms)
        queues: dict[str, list[Bar]] = {NODE: [], NETWORK: []}
        for run in backward.runs:
            kinds = (run.bucket.kind, "all_reduce")
            for kind, (queue, begin, end) in zip(kinds, run.turns, strict=False):
                queues[queue].append(Bar(begin / 1e3, end / 1e3, colors[kind]))
        computed = [Bar(begin / 1e3, end / 1e3, colors[""]) for begin, end, *_ in backward.compute]
        lanes.append(Lane(f"{name}: compute", computed))
        lanes += [Lane(queue, bars) for queue, bars in queues.items()]
    names = {"": "compute", "gather": "gather", "reduce": "reduce-scatter"}
    legend = {names.get(kind, "all-reduce"): color for kind, color in colors.items()}
    timeline(lanes, legend, path, unit="ms of backward")


def main() -> None:
    """Print measured and predicted times of all rows, and draw two of them if `--svg` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", type=int, default=2, help="the row that compute is found from")
    parser.add_argument("--svg", type=Path, help="where to draw the second and the third row")
    options = parser.parse_args()
    compute_ms = fitted_compute_ms(ROWS[options.fit - 1])
    print(f"compute, found from row {options.fit}: {compute_ms:.0f} ms")
    for row in ROWS:
        ms = step_ms(row, compute_ms)
        error = ms / row.measured_ms - 1
        print(
            f"{row.name:32} measured {row.measured_ms:5.0f} ms  predicted {ms:5.0f}  {error:+.1%}"
        )
    if options.svg:
        draw({"one queue": ROWS[1], "two": ROWS[2]}, compute_ms, options.svg)


if __name__ == "__main__":
    main()
