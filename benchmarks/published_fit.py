"""Constants fitted on published measurements: least squares of logarithms, within known bounds.

    rows -> traced steps -> one number an op between collectives -> simulated steps -> residuals

A step is simulated as `autoshard plan` does it, but its graphs are cut to the positions at which
something is launched or waited for, so that new constants need no trace. Bounds are what data
sheets and papers allow; a constant that rows don't determine is drawn to its start.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from published_clusters import (
    Constants,
    cluster_key,
    configuration,
    is_flat,
    kind_of,
    schedule,
    topology_name,
)
from published_rows import Row, Workload

from autoshard.passes.planner.kernels import Kernel, in_float8, kernel_us
from autoshard.passes.planner.per_unit import filled, unit_buckets
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan.estimate import (
    Configuration,
    Placed,
    StepGraphs,
    Traffic,
    costs_of,
    traffic,
)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """Start and bounds of a constant, and where they are from."""

    start: float
    low: float
    high: float
    unit: str
    source: str


SHARE, GB = "of the peak", "GB/s"
BOUNDS: Mapping[str, Bound] = {
    "a100.efficiency": Bound(0.85, 0.7, 0.95, SHARE, "cuBLAS, products of 8192 cubed: 0.8 to 0.9"),
    "a100.tile_depth": Bound(100, 10, 400, "elements", "a tile's start and end, some us"),
    "a100.attention_efficiency": Bound(0.6, 0.5, 0.75, SHARE, "FlashAttention-2, figures 4 to 6"),
    "a100.memory_efficiency": Bound(0.85, 0.7, 0.95, SHARE, "copies: 0.85 to 0.93"),
    "a100.node_gb_per_s": Bound(230, 150, 280, GB, "NCCL's bus bandwidth in a node; links: 300"),
    "a100.contention": Bound(1.1, 1.0, 1.5, "times", "NCCL issue 1428: up to 1.76"),
    "a100.untold_gb_per_s": Bound(12, 4, 25, GB, "50 to 200 Gb/s a device"),
    "h100.efficiency": Bound(0.75, 0.55, 0.85, SHARE, "cuBLAS, by the power limit: 0.6 to 0.8"),
    "h100.tile_depth": Bound(100, 10, 600, "elements", "a tile's start and end, some us"),
    "h100.attention_efficiency": Bound(0.4, 0.3, 0.6, SHARE, "FlashAttention-2 0.35, 3 0.75"),
    "h100.memory_efficiency": Bound(0.85, 0.7, 0.95, SHARE, "copies: 0.85 to 0.93"),
    "h100.node_gb_per_s": Bound(350, 200, 430, GB, "NCCL's bus bandwidth in a node; links: 450"),
    "h100.contention": Bound(1.1, 1.0, 1.5, "times", "as of A100s"),
    "h100.untold_gb_per_s": Bound(30, 8, 50, GB, "100 to 400 Gb/s a device"),
    "attention_ramp": Bound(400, 100, 1500, "tokens", "FlashAttention-2, figures 4 to 6"),
    "attention_backward": Bound(0.8, 0.7, 1.0, "of forward", "FlashAttention-2, figures 5 and 6"),
    "node_alpha_us": Bound(20, 2, 60, "us", "nccl-tests in a node"),
    "step_alpha_us": Bound(2, 0.3, 20, "us a rank", "nccl-tests, by ranks"),
    "network_share": Bound(0.6, 0.2, 0.95, "of the rate", "nccl-tests between nodes"),
    "fsdp1_share": Bound(0.85, 0.5, 1.0, "of the rate", "YaFSDP's README, side by side"),
    "early_attention_share": Bound(0.7, 0.4, 1.0, "of the rate", "FlashAttention-2, figure 4"),
}
PULL = 0.15  # of a constant to its start, in logarithms, beside a residual
ROBUST = 0.06  # of a residual, from which on it counts less
LARGE = 40  # rows of a source, from which on each counts less


@dataclass(frozen=True)
class Cut:
    """Graph cut to positions that matter, whose ops are sums of `kernels`, by their numbers."""

    problem: Problem
    kernels: NDArray[np.int64]
    positions: NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """Row to fit, with its cut graphs: (share of layers, forward and backward)."""

    row: Row
    configuration: Configuration
    kind: str
    parts: tuple[tuple[float, Traffic, Mapping[str, Cut]], ...]
    measured_s: float


class Fit:
    """Rows to fit, with all kernels of their graphs, each once."""

    def __init__(self, rows: Iterable[Row], traces: Mapping[Workload, StepGraphs]) -> None:
        """Cut the graphs of `rows`, which are measured."""
        self.kernels: dict[Kernel | None, int] = {}
        self._cuts: dict[object, Mapping[str, Cut]] = {}
        self.cases = [self._case(row, traces) for row in rows]

    def _case(self, row: Row, traces: Mapping[Workload, StepGraphs]) -> Case:
        chosen = configuration(row)
        parts = tuple(
            (share, traffic(traces[each], chosen), self._cut(row, chosen, each, traces[each]))
            for share, each in row.workloads
        )
        assert row.measured_s is not None
        return Case(row, chosen, kind_of(topology_name(row.gpu)), parts, row.measured_s)

    def _cut(
        self, row: Row, chosen: Configuration, workload: Workload, step: StepGraphs
    ) -> Mapping[str, Cut]:
        is_whole = chosen.shards == 1
        key = (workload, chosen.reshards, is_whole, is_flat(row), row.is_fp8)
        if key not in self._cuts:
            self._cuts[key] = {
                kind: self._cut_graph(row, chosen, kind, step) for kind in step.graphs
            }
        return self._cuts[key]

    def _cut_graph(self, row: Row, chosen: Configuration, kind: str, step: StepGraphs) -> Cut:
        graph = step.graphs[kind]
        known = [_plain(each, row) for each in graph.kernels]
        numbers = [self.kernels.setdefault(each, len(self.kernels)) for each in known]
        ops = np.array(numbers)[np.array(graph.problem.op_us, dtype=np.int64)]
        placed = Placed(graph, step, chosen, Topology.load("h100"))
        problem, positions = cut(placed.problem, by_bytes=chosen.shards == 1, flat=is_flat(row))
        return Cut(problem, ops, positions)

    def seconds(self, constants: Constants, cases: Sequence[Case] | None = None) -> Array:
        """Predict the seconds of a step of each case."""
        clusters: dict[object, tuple[Topology, Array]] = {}
        found = []
        for case in self.cases if cases is None else cases:
            key = cluster_key(case.row)
            if key not in clusters:
                topology = constants.topology(case.row)
                times = [kernel_us(each, topology) for each in self.kernels]
                clusters[key] = topology, np.array(times)
            found.append(_seconds(case, *clusters[key]))
        return np.array(found)


def _seconds(case: Case, topology: Topology, kernel_times: Array) -> float:
    """Predict the seconds of a step, whose kernels take `kernel_times`, in microseconds."""
    whole, others = 0.0, case.configuration.accumulate - 1
    for share, moved, cuts in case.parts:
        out = moved.outside(case.configuration, topology)
        last = before = 0.0
        for each in cuts.values():
            sums = np.add.reduceat(np.append(kernel_times[each.kernels], 0.0), each.positions[:-1])
            problem = dataclasses.replace(
                each.problem,
                op_us=tuple(sums.tolist()),
                costs=costs_of(each.problem, case.configuration, topology),
            )
            last += schedule(case.row, problem).time_us
            before += sum(problem.op_us)
        if case.configuration.shards > 1:
            before = last
        time_us = last + others * (before + out.between_us) + out.optimizer_us + out.spread_us
        whole += share * time_us
    return whole / 1e6


def _plain(kernel: Kernel | None, row: Row) -> Kernel | None:
    """Return `kernel` without its key, and in float8 where `row` is."""
    if kernel is None:
        return None
    if row.is_fp8:
        kernel = in_float8(kernel, row.workload.shape.vocabulary)
    return dataclasses.replace(kernel, key="")


def cut(problem: Problem, *, by_bytes: bool, flat: bool) -> tuple[Problem, NDArray[np.int64]]:
    """Merge the items of each bucket, and the ops between positions of buckets.

    by_bytes: whether buckets of gradients are DDP's, not one a unit.
    flat: whether nothing is copied, whatever the bucket.
    Returns the problem, without times and memory, and the positions between which its ops lie.
    """
    gathers, reduces = (
        [list(bucket.items) for bucket in buckets] for buckets in unit_buckets(problem)
    )
    if by_bytes:
        reduces = filled(problem.reduces)
    items = [
        [_merged(each, n, copies=not flat) for n, each in enumerate(group)]
        for group in (gathers, reduces)
    ]
    end = problem.num_ops
    places = {0, end} | {
        min(place, end)
        for group in items
        for item in group
        for place in (item.ready, item.used, item.freed)
    }
    positions = sorted(places)
    number = {place: at for at, place in enumerate(positions)}

    def moved(item: Item) -> Item:
        ready, used, freed = (
            number[min(place, end)] + (place > end) for place in (item.ready, item.used, item.freed)
        )
        return dataclasses.replace(item, ready=ready, used=used, freed=freed)

    count = len(positions) - 1
    found = dataclasses.replace(
        problem,
        op_us=(0.0,) * count,
        live_bytes=(0,) * count,
        gathers=tuple(map(moved, items[0])),
        reduces=tuple(map(moved, items[1])),
    )
    return found, np.array(positions)


def _merged(items: Sequence[Item], number: int, *, copies: bool) -> Item:
    is_copied = copies and len(items) > 1
    return Item(
        items[0].name,
        f"{items[0].unit} {number}",
        items[0].bucket_class,
        sum(item.num_bytes for item in items),
        max(item.ready for item in items),
        min(item.used for item in items),
        max(item.freed for item in items),
        is_copied_in=is_copied or any(item.is_copied_in for item in items),
        is_copied_out=is_copied or any(item.is_copied_out for item in items),
        source_bytes=sum(item.moved_bytes - item.num_bytes for item in items),
    )


# ---- least squares


def fitted(
    fit: Fit,
    cases: Sequence[Case],
    *,
    without: Sequence[str] = (),
    change: Callable[[Topology], Topology] = lambda topology: topology,
) -> Constants:
    """Fit constants on `cases`; those called `without` keep their start.

    change: what is done to each topology after all.
    """
    from scipy.optimize import least_squares  # not needed to predict

    names = [name for name in BOUNDS if name.rpartition(".")[2] not in without]
    shipped = {name: bound.start for name, bound in BOUNDS.items()}
    start, low, high = (
        np.log([getattr(BOUNDS[name], which) for name in names])
        for which in ("start", "low", "high")
    )
    counts = Counter(case.row.source for case in cases)
    weights = np.array(
        [
            min(1.0, (LARGE / counts[case.row.source]) ** 0.5) * (0.5 if case.row.is_chart else 1.0)
            for case in cases
        ]
    )
    measured = np.log([case.measured_s for case in cases])

    def constants(values: Array) -> Constants:
        found = dict(zip(names, np.exp(values).tolist(), strict=True))
        return Constants({**shipped, **found}, change)

    def residuals(values: Array) -> Array:
        return weights * (np.log(fit.seconds(constants(values), cases)) - measured)

    def slopes(values: Array) -> Array:
        base = residuals(values)
        found = np.zeros((len(cases) + len(names), len(names)))
        for group in _together(names):
            change = np.zeros(len(names))
            for at in group:
                change[at] = STEP if values[at] + STEP <= high[at] else -STEP
            moved = residuals(values + change) - base
            for at in group:
                kind = names[at].partition(".")[0] if "." in names[at] else ""
                mine = np.array([kind in ("", case.kind) for case in cases])
                found[: len(cases), at] = np.where(mine, moved / change[at], 0.0)
        found[len(cases) :] = PULL * np.eye(len(names))
        return found

    result = least_squares(
        lambda values: np.concatenate([residuals(values), PULL * (values - start)]),
        np.clip(start, low + 1e-3, high - 1e-3),
        jac=slopes,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=ROBUST,
        max_nfev=STEPS,
    )
    return constants(result.x)


STEPS = 8
STEP = 0.02  # of a logarithm, for slopes


def _together(names: Sequence[str]) -> list[list[int]]:
    """Group constants that no row depends on together: the same one of several kinds of GPU."""
    groups: dict[str, list[int]] = {}
    for at, name in enumerate(names):
        groups.setdefault(name.rpartition(".")[2], []).append(at)
    return list(groups.values())


def errors(fit: Fit, constants: Constants, cases: Sequence[Case]) -> Array:
    """Predicted over measured seconds, less 1."""
    measured = np.array([case.measured_s for case in cases])
    return np.asarray(fit.seconds(constants, cases) / measured - 1.0)


# ---- what each part is worth


@dataclass(frozen=True)
class Ablation:
    """Part that is left out: constants that are not fitted, and what topologies have instead."""

    without: tuple[str, ...]
    change: Callable[[Topology], Topology]


def _with(**fields: float) -> Callable[[Topology], Topology]:
    return lambda topology: dataclasses.replace(topology, **fields)  # type: ignore[arg-type]  # of any field


def _attention_as_products(topology: Topology) -> Topology:
    return dataclasses.replace(
        topology,
        attention_efficiency=topology.efficiency,
        attention_ramp=0.0,
        attention_backward=1.0,
    )


ABLATIONS: Mapping[str, Ablation] = {
    "attention's own rate": Ablation(
        ("attention_efficiency", "attention_ramp", "attention_backward", "early_attention_share"),
        _attention_as_products,
    ),
    "sizes of products": Ablation(("tile_depth",), _with(processors=0)),
    "sustained rate": Ablation(("efficiency",), _with(efficiency=1.0)),
    "share of memory's rate": Ablation(("memory_efficiency",), _with(memory_efficiency=1.0)),
    "least time of a kernel": Ablation((), _with(op_us=0.0)),
    "contention": Ablation(("contention",), _with(contention=1.0)),
    "start-ups": Ablation(
        ("node_alpha_us", "step_alpha_us"), _with(node_alpha_us=0.0, step_alpha_us=0.0)
    ),
    "networks": Ablation(
        ("network_share", "fsdp1_share", "untold_gb_per_s"), _with(network_gb_per_s=1e6)
    ),
}
"""What each part of the model is worth, by the error without it."""
