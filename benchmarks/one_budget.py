"""Time of a step under a memory budget, beside checkpoints by hand, simulated on a named cluster.

    python benchmarks/one_budget.py                     # Llama-3 8B on 8 H100s
    python benchmarks/one_budget.py --model 70b --gpus 64 --topology h200
    python benchmarks/one_budget.py --layers 8          # of the model's, all of which take minutes
    python benchmarks/one_budget.py --budgets full      # one row

A joint graph is traced once, and parted as each way says, all with the same costs and one bucket a
unit, by hand each gathered one ahead: without checkpoints; with one around each block, or around
each second; with products and attention saved ("ops"); by torch's partitioner with
`activation_memory_budget`, the largest that fits; and by the integer programme of
`torch.distributed._tools` with our values and times (which takes pulp; "-" without it). The budget
of a row is what one of the ways by hand needs at its peak. "planned" is what `memory_budget`
decides with it, once with values on the host, and once without. The bound is that of
`deciding.bound_us`. "states, too" is with optimizer states on the host, where that is faster: what
they leave is for values then, and the update takes longer. Seconds are of the search, and of each
time that torch's partitioner ran for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from published_models import Shape
from torch import fx

from autoshard import deciding
from autoshard.compilation import DryCompilation, Partition
from autoshard.handed import KINDS, Handed, Parts, Run
from autoshard.options import CompileOptions
from autoshard.passes.pipeline import copied
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.save import Choice
from autoshard.passes.planner.topology import Topology
from autoshard.passes.planner.update import HostStates, moved_states
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues
from autoshard.runtime.compiled.frame import Frame
from autoshard.runtime.sharding.find_units import find_units
from autoshard.runtime.unit.policies import OptimizerOffloadPolicy
from autoshard.tools.plan import dry_run
from autoshard.tools.plan.steps import PlannedModel, on_meta, policy_of, step_of
from autoshard.tools.plan.ways import mark_regions, tagged

MODELS = {
    "8b": Shape("llama", 4096, 14336, 32, 8, 32, 128_256, False, "plain"),
    "70b": Shape("llama", 8192, 28672, 64, 8, 80, 128_256, False, "plain"),
    "405b": Shape("llama", 16384, 53248, 128, 8, 126, 128_256, False, "plain"),
}
BUDGETS = ("full", "layers:2", "ops")
BY_HAND = ("none", *BUDGETS)
STEPS = 5  # of activation_memory_budget, from 0 to 1
ASKED = 8  # times, at most, that the programme is asked for less memory
HAS_PULP = importlib.util.find_spec("pulp") is not None


class Planned(NamedTuple):
    """What a budget decides, and how a step runs with it.

    time_us: with what its update takes longer. budget_bytes: for its graphs.
    parting_s, search_s: seconds of each time that the graph was parted, and of the rest.
    """

    decided: Handed
    step: Run
    time_us: float
    budget_bytes: int
    parting_s: list[float]
    search_s: float

    def cell(self, best_us: float) -> str:
        """Ratio to the best by hand, how far it is beyond its budget, and seconds."""
        share = self.step.peak_bytes / self.budget_bytes
        over = f", {share:.2f} of it" if share > 1 else ""
        return f"{self.time_us / best_us:.3f}{over}"


class Ways:
    """Parts of one joint graph by way of checkpointing, as a cluster runs them."""

    def __init__(
        self,
        compilation: DryCompilation,
        joint: fx.GraphModule,
        partition: Partition,
        prices: Prices,
    ) -> None:
        self.compilation, self.joint = compilation, joint
        self.partition, self.prices = partition, prices

    def by_hand(self, way: str) -> Parts:
        """Part it with checkpoints around blocks."""
        if way != "layers:2":
            return self._parts(tagged(self.joint, way))
        gm = tagged(self.joint, "full")
        for node in gm.graph.nodes:
            if node.meta.get("ac_graph_id", 0) % 2 == 0:
                node.meta.pop("recompute", None)
                node.meta.pop("ac_graph_id", None)
        return self._parts(gm)

    def by_torch(self, budget: float) -> Parts:
        """Part it with `activation_memory_budget`."""
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return self._parts(tagged(self.joint, "none"))

    def planned(
        self, budget_bytes: int, topology: Topology, states: HostStates | None = None
    ) -> Planned:
        """Part it as `memory_budget` says.

        states: that may live on the host, so that others have their room.
        """
        prices = dataclasses.replace(self.prices, topology=topology, budget_bytes=budget_bytes)
        self.compilation.prices = prices
        parting_s: list[float] = []

        def parts(decided: Handed) -> Parts:
            began = time.perf_counter()
            self.compilation.handed = decided
            found = self.compilation.priced_parts(copied(self.joint), self.partition, prices)
            parting_s.append(time.perf_counter() - began)
            return found

        began = time.perf_counter()
        decided = deciding.decide(parts, prices, states)
        search_s = time.perf_counter() - began - sum(parting_s)
        budget_bytes += states.num_bytes if states and decided.has_host_states else 0
        step = Run.of(parts(decided).problems, budget_bytes)
        more_us = states.more_us if states and decided.has_host_states else 0.0
        return Planned(decided, step, step.time_us + more_us, budget_bytes, parting_s, search_s)

    def by_programme(self, without: Parts, budget_bytes: int) -> Run | None:
        """Part it as torch's integer programme says; None if it finds nothing that fits.

        It is asked for less and less memory until the simulated step keeps to the budget.

        without: parts without a decision.
        """
        values = SavedValues(without.joint, without.saved, self.prices, without.table)
        most = one_ahead(without).peak_bytes
        asked = float(budget_bytes)
        for _ in range(ASKED):
            taken = discarded(values, most, asked)
            if taken is None:
                return None
            self.compilation.handed = Handed.of(values, taken)
            found = one_ahead(
                self.compilation.priced_parts(copied(self.joint), self.partition, self.prices)
            )
            if found.peak_bytes <= budget_bytes:
                return found
            asked -= found.peak_bytes - budget_bytes
        return None

    def _parts(self, gm: fx.GraphModule) -> Parts:
        self.compilation.handed = Handed()
        return self.compilation.priced_parts(gm, self.partition, self.prices)


def discarded(values: SavedValues, most: float, budget_bytes: float) -> list[int] | None:
    """Return a choice for each block, as the programme decides; None if nothing fits.

    A block is a module there, without others in it. It discards a share of what it saves, and
    takes a share of its time for it, between the choices that it has.

    most: bytes at the peak without a decision.
    """
    from torch.distributed._tools.ilp_utils import Graph
    from torch.distributed._tools.sac_ilp import sac_milp

    sizes = [curve[0].num_bytes for curve in values.curves]
    saved = list(itertools.accumulate(sizes))
    graph = Graph(len(sizes))
    names = [f"block{number}" for number in range(len(sizes))]
    graph.fw_post_order = names
    for number, curve in enumerate(values.curves):
        curve_s = {1 - each.num_bytes / max(sizes[number], 1): each.again_us for each in curve}
        longest = max(curve_s.values())
        lines = _hull(sorted((share, us / (longest or 1)) for share, us in curve_s.items()))
        node: Any = {
            "fqn": names[number],
            "index": number,
            "pos_fw_post_order": number,
            "is_leaf": longest == 0,
            "sac_runtime": longest / 1000,
            "sac_memory": sizes[number],
            "act_fw_per_module": sizes[number],
            "act_total": saved[number],
            "act_grad_per_module": most - saved[-1],
            "param_per_module": 0,
            "grad_total": 0,
            "n_segments": len(lines),
            "slopes": [slope for slope, _ in lines],
            "intercepts": [at for _, at in lines],
        }
        graph.add_node(node)
    shares, _, peak_bytes = sac_milp(graph, budget_bytes / 2**30)
    if peak_bytes < 0:
        return None
    return [
        _nearest(curve, 1 - shares.get(name, 0.0))
        for name, curve in zip(names, values.curves, strict=True)
    ]


def _hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lines (slope, value at 0) of the convex hull below points in order."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        while len(hull) > 1:
            (x1, y1), (x2, y2) = hull[-2:]
            if (y2 - y1) * (x - x1) < (y - y1) * (x2 - x1):
                break
            hull.pop()
        hull.append((x, y))
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.pairwise(hull)]
    return [(slope, y - slope * x) for slope, (x, y) in zip(slopes, hull, strict=False)]


def _nearest(curve: Sequence[Choice], share: float) -> int:
    """Return the number of the choice that saves most, of those that save at most `share`."""
    most = curve[0].num_bytes * share + 1
    fit = [number for number, each in enumerate(curve) if each.num_bytes <= most]
    return max(fit, key=lambda number: curve[number].num_bytes, default=len(curve) - 1)


def one_ahead(parts: Parts) -> Run:
    """Simulate parts with each unit gathered one ahead, as by hand."""
    timelines = [per_unit(problem) for problem in parts.problems]
    peaks = {
        kind: (timeline.peak.position, timeline.peak_bytes)
        for kind, timeline in zip(KINDS, timelines, strict=True)
    }
    return Run(peaks, sum(timeline.time_us for timeline in timelines))


def show(ways: Ways, topology: Topology, states: HostStates | None, budgets: Sequence[str]) -> None:
    """Print the table, with a row for what each of the ways `budgets` needs."""
    hand = {way: ways.by_hand(way) for way in BY_HAND}
    steps = {way: one_ahead(parts) for way, parts in hand.items()}
    shares = [number / STEPS for number in range(STEPS + 1)]
    torchs = [one_ahead(ways.by_torch(share)) for share in shares]
    for way, step in steps.items():
        print(f"{way}: {step.time_us / 1000:.1f} ms, {step.peak_bytes / 2**30:.2f} GiB", flush=True)
    print(
        "| budget | best by hand | torch's | its programme | planned, no host | planned "
        "| over bound | on host | states, too | search s | parting s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    without = dataclasses.replace(topology, host_gb_per_s=0.0)
    for way in budgets:
        budget = int(steps[way].peak_bytes)
        best = min(each.time_us for each in steps.values() if each.peak_bytes <= budget)
        fit = [each.time_us for each in torchs if each.peak_bytes <= budget]
        rivals = min(fit, default=math.inf)
        programme = ways.by_programme(hand["none"], budget) if HAS_PULP else None
        found_by_it = "-" if programme is None else f"{programme.time_us / best:.3f}"
        found = ways.planned(budget, without), ways.planned(budget, topology)
        cells = [each.cell(best) for each in found]
        with_states = ways.planned(budget, topology, states)
        parting = " + ".join(f"{seconds:.1f}" for seconds in found[1].parting_s)
        prices = dataclasses.replace(ways.prices, topology=topology, budget_bytes=budget)
        bound = deciding.bound_us(hand["none"], prices)
        on_host = sum(block.host_bytes for block in found[1].decided.blocks) / 2**30
        print(
            f"| {way}'s, {budget / 2**30:.2f} GiB | {best / 1000:.1f} ms | {rivals / best:.3f} "
            f"| {found_by_it} | {' | '.join(cells)} | {found[1].time_us / bound:.3f} "
            f"| {on_host:.1f} GiB "
            f"| {with_states.cell(best)}{'' if with_states.decided.has_host_states else ', stay'} "
            f"| {found[1].search_s:.1f} | {parting} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--topology", default="h100")
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS)
    options = parser.parse_args()
    shape, topology = MODELS[options.model], Topology.load(options.topology)
    if options.layers:
        shape = dataclasses.replace(shape, layers=options.layers)

    def build() -> torch.nn.Module:
        return shape.build(options.seq)

    planned = PlannedModel(
        options.model, build, None, options.seq, "bf16", "f32", "adamw", "inductor"
    )
    dry_run.pretend_ranks(options.gpus)
    model = on_meta(planned)
    call = step_of(planned, model, options.micro_batch)
    mark_regions(find_units(model, None))
    dry_run.shard_without_weights(model, mp_policy=policy_of(planned), reshard_after_forward=True)
    settings = CompileOptions(lowering="inductor").resolve(torch.device("cpu"))

    def compile_frame(frame: Frame) -> None:
        compilation = DryCompilation(frame, settings)
        prices = Prices(topology, is_fused=True)
        shards = [param.shard.nbytes for param in frame.params]
        states = moved_states(shards, OptimizerOffloadPolicy().bucket_bytes, topology)
        print(f"{options.model}, {shape.layers} layers, {options.gpus} of {topology.title}")
        compilation.partition(
            lambda joint, partition: show(
                Ways(compilation, joint, partition, prices), topology, states, options.budgets
            )
        )

    dry_run.compile_only(model, call, compile_frame)


if __name__ == "__main__":
    main()
