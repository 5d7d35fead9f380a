"""How near the lower bound plans come: Llama-3 8B, 70B and 405B in three regimes, simulated.

    python benchmarks/planner.py              # all of it; --models 8b for one
    python benchmarks/planner.py --inductor   # with Inductor's own scheduler beside, torch 2.13
    python benchmarks/planner.py --growth     # how long planning takes, by layers

Each row is one graph of layer shapes: matrix products at 600 TFLOP/s and 4 us each, and one link
whose collectives divide sums, which those of graphs do not yet do.
Time over lower bound, for one bucket a parameter, one bucket a unit launched a unit ahead, and the
planner's: all buckets packed; all grouped, also reduces, which no graph has yet; and "auto", each
gather as is best and each reduce packed. All with the same costs, and the planner's with no more
memory than one bucket a unit needs (`per_unit`), or with what `--budget-layers` says. Inductor
keeps to limits of its own; its peak is beside its time.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass

from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.costs import GROUPED, LAYOUTS, PACKED, Costs, Link
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.search import search
from autoshard.passes.planner.simulate import Timeline, make_bucket, simulate

TFLOPS, OP_US = 600.0, 4.0
COPY_US_PER_BYTE = 1e6 / 2.5e12
MEMBER_US = 3.0
NO_BUDGET = float("inf")


@dataclass(frozen=True)
class Model:
    """Widths of a Llama: hidden, of the two products inward in an MLP, of keys and values."""

    hidden: int
    inner: int
    keys: int
    layers: int

    def weights(self) -> list[tuple[str, tuple[int, ...]]]:
        """List names and sizes of one layer's parameters, in order of use."""
        h, i, k = self.hidden, self.inner, self.keys
        return [
            ("norm1", (h,)),
            ("q", (h, h)),
            ("k", (h, k)),
            ("v", (h, k)),
            ("o", (h, h)),
            ("norm2", (h,)),
            ("gate", (h, i)),
            ("up", (h, i)),
            ("down", (i, h)),
        ]


MODELS = {
    "8b": Model(4096, 14336, 1024, 32),
    "70b": Model(8192, 28672, 1024, 80),
    "405b": Model(16384, 53248, 1024, 126),
}


@dataclass(frozen=True)
class Regime:
    """Tokens a rank, ranks, and the link's bandwidth and start-up."""

    tokens: int
    ranks: int
    gb_per_s: float
    alpha_us: float


REGIMES = {
    "compute-bound": Regime(4096, 8, 300, 40),
    "balanced": Regime(1536, 8, 300, 40),
    "link-bound": Regime(8192, 64, 45, 120),
}


def make_problem(model: Model, regime: Regime, graph: str, *, layers: int | None = None) -> Problem:
    """Make the problem of one graph of a Llama in a regime, with bf16 parameters.

    Forward has an op for each parameter; backward, in reverse, two, after which its gradient is
    ready to be reduced. Norms take the start-up of an op alone. Only gathered and reduced bytes
    count as memory.
    graph: "forward" or "backward".
    layers: as many; None for those of the model.
    """
    uses = [
        (f"layers.{layer}.{name}", f"layers.{layer}", math.prod(size))
        for layer in range(model.layers if layers is None else layers)
        for name, size in model.weights()
    ]
    op_us: list[float] = []
    gathers, reduces = [], []
    if graph == "backward":
        uses.reverse()
    for name, unit, numel in uses:
        flops = 2 * regime.tokens * numel if numel > model.hidden else 0
        at, each = len(op_us), flops / (TFLOPS * 1e6) + OP_US
        op_us += [each] * (2 if graph == "backward" else 1)
        gathers.append(Item(name, unit, "gather", 2 * numel, 0, at, at + 1))
        if graph == "backward":
            end = 2 * len(uses)
            reduces.append(Item(name, unit, "reduce", 2 * numel, at + 2, end, end))
    link = Link("node", regime.alpha_us, 1 / (regime.gb_per_s * 1e3), MEMBER_US)
    bucket_classes = ("gather", "reduce")
    costs = Costs(
        dict.fromkeys(bucket_classes, (link,)),
        dict.fromkeys(bucket_classes, regime.ranks),
        COPY_US_PER_BYTE,
        divides=True,
    )
    return Problem(graph, tuple(op_us), (0,) * len(op_us), tuple(gathers), tuple(reduces), costs)


def only(layout: str) -> dict[str, tuple[str, ...]]:
    """Return layouts for `search` that have all buckets in `layout`."""
    return {"gather": (layout,), "reduce": (layout,)}


def alone(problem: Problem, budget: float) -> Timeline:
    """Simulate one packed bucket a parameter, launched and waited for as the planner does.

    budget: in bytes.
    """
    gathers = [make_bucket(problem, "gather", [item], PACKED) for item in problem.gathers]
    reduces = [make_bucket(problem, "reduce", [item], PACKED) for item in problem.reduces]
    return simulate(problem, gathers, reduces, budget_bytes=budget)


def main() -> None:
    """Print the table, or with `--growth` how long planning takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--budget-layers", type=float, help="gathered and in flight, in layers")
    parser.add_argument("--inductor", action="store_true", help="its scheduler beside")
    parser.add_argument("--growth", action="store_true", help="times of planning instead")
    options = parser.parse_args()
    if options.growth:
        print_growth()
        return
    print("time / lower bound; budget and peak in GiB beyond the gradients' shards; planning in s")
    columns = ["none", "per_unit", "packed", "grouped", "auto", "budget", "peak", "planning"]
    columns += ["Inductor", "its peak", "planning"] if options.inductor else []
    print(f"{'':35}" + "".join(f"{name:>10}" for name in columns) + "  bound by")
    for model in options.models:
        for regime in REGIMES:
            for graph in ("forward", "backward"):
                line = row(model, regime, graph, options.budget_layers, inductor=options.inductor)
                print(line, flush=True)


def print_growth() -> None:
    """Print the seconds that planning takes, packed, for more and more of 70B's layers."""
    print("layers  forward s  backward s  together s  a layer ms")
    for layers in (40, 80, 160, 320):
        times = []
        for graph in ("forward", "backward"):
            problem = make_problem(MODELS["70b"], REGIMES["balanced"], graph, layers=layers)
            began = time.perf_counter()
            search(problem, budget_bytes=per_unit(problem).peak_bytes, layouts=only(PACKED))
            times.append(time.perf_counter() - began)
        cells = [*times, sum(times), 1e3 * sum(times) / layers]
        print(f"{layers:6}" + "".join(f"{cell:11.2f}" for cell in cells), flush=True)


def row(model: str, regime: str, graph: str, budget_layers: float | None, *, inductor: bool) -> str:
    """Plan one graph in each way; return the line of the table, with times over the lower bound.

    budget_layers: memory beyond the gradients' shards, in layers; None for what a bucket a unit
        needs.
    inductor: whether Inductor's own scheduler is added.
    """
    problem = make_problem(MODELS[model], REGIMES[regime], graph)
    bound = lower_bound(problem)
    shards = sum(item.num_bytes for item in problem.reduces) // REGIMES[regime].ranks
    unit = per_unit(problem)
    budget: float = unit.peak_bytes
    if budget_layers is not None:
        layer = sum(math.prod(size) for _, size in MODELS[model].weights())
        budget = shards + budget_layers * 2 * layer
    times = [alone(problem, budget).time_us, unit.time_us]
    peak, began = 0, time.perf_counter()
    for layouts in (only(PACKED), only(GROUPED), LAYOUTS):
        found = search(problem, budget_bytes=budget, layouts=layouts).timeline
        assert found.peak_bytes <= budget
        times.append(found.time_us)
        peak = max(peak, found.peak_bytes)
    planning_s = (time.perf_counter() - began) / 3
    cells = [f"{time_us / bound.time_us:10.4f}" for time_us in times]
    cells += [f"{(each - shards) / 2**30:10.2f}" for each in (budget, peak)]
    cells.append(f"{planning_s:10.2f}")
    if inductor:
        began = time.perf_counter()
        theirs = scheduled_by_inductor(MODELS[model], REGIMES[regime], problem)
        cells.append(f"{theirs.time_us / bound.time_us:10.4f}")
        cells.append(f"{(theirs.peak_bytes - shards) / 2**30:10.2f}")
        cells.append(f"{time.perf_counter() - began:10.2f}")
    return f"{model:5} {regime:14} {graph:14}" + "".join(cells) + f"  {bound.binding}"


def scheduled_by_inductor(model: Model, regime: Regime, problem: Problem) -> Timeline:
    """Return the timeline of what Inductor's own scheduler makes of `problem`.

    model, regime: those that `problem` was made of, with all layers.
    """
    from inductor_scheduler import Weight, inductor

    weights = [Weight(size) for _ in range(model.layers) for _, size in model.weights()]
    if problem.reduces:
        weights.reverse()
    return inductor(problem, weights, regime.tokens, regime.ranks)


if __name__ == "__main__":
    main()
