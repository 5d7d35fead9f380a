"""Find the best configurations of a model on a cluster: `autoshard plan`.

A configuration is a strategy, a mesh, a microbatch and whether activations are recomputed. All
configurations that the caller leaves open are estimated with one bucket a unit; buckets are
searched for in the best few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan.estimate import Configuration, Estimate, StepGraphs, estimate
from autoshard.tools.plan.front import Tried
from autoshard.tools.plan.speed import Work, forward_flops
from autoshard.tools.plan.splice import checkpointed, read_way, spliced
from autoshard.tools.plan.steps import PlannedModel as PlannedModel
from autoshard.tools.plan.steps import traced_steps
from autoshard.tools.plan.ways import CHECKPOINTING

MICRO_BATCHES = (1, 2, 4)  # tried where the caller names none
SHOWN = 3  # configurations in which buckets are searched for


@dataclass(frozen=True)
class Choices:
    """Settings of configurations; None where the caller leaves one open.

    mesh: (replicas, shards).
    strategy: "zero1" is tried only where it is named.
    accumulate: microbatches of a step.
    """

    mesh: tuple[int, int] | None = None
    strategy: str | None = None
    micro_batches: tuple[int, ...] | None = None
    checkpointing: str | None = None
    accumulate: int = 1


@dataclass(frozen=True)
class PlanReport:
    """Result of `plan`.

    work: of one sample.
    tried: all configurations that were estimated, the best first.
    estimates: at most three that fit, the best first; if none fits, the one that needs least.
    """

    model: PlannedModel
    topology: Topology
    gpus: int
    num_parameters: int
    work: Work
    tried: tuple[Tried, ...]
    estimates: tuple[Estimate, ...]
    planning_s: float

    @property
    def overflow(self) -> str | None:
        """Category of memory with which the best estimate doesn't fit; None if it does."""
        return self.estimates[0].memory.first_beyond(self.topology.memory_bytes)

    @property
    def num_configurations(self) -> int:
        """Number of configurations that were estimated."""
        return len(self.tried)

    def __str__(self) -> str:
        """Return the tables that `autoshard plan` prints."""
        from autoshard.tools.plan.report import text  # which reads reports, as `page` does

        return text(self)

    def _repr_html_(self) -> str:
        """Return the content of `autoshard plan --html`, for notebooks."""
        from autoshard.tools.plan.page import content

        return content(self)


def plan(planned: PlannedModel, topology: Topology, gpus: int, choices: Choices) -> PlanReport:
    """Estimate all configurations that `choices` leaves open, the best three with a search.

    The model is traced as `traced_steps` does it, for which this process becomes one of ranks that
    are not there, and what torch has compiled is reset. Fewer bytes beyond a device's memory are
    better, then less time for a sequence.
    Raises ValueError for a mesh that doesn't hold `gpus`, or a strategy that no mesh has;
    RuntimeError for a model whose forward is not one graph, and in a process that has a process
    group.
    """
    began = time.perf_counter()
    if choices.checkpointing not in (None, *CHECKPOINTING):
        read_way(choices.checkpointing)  # what is wrong is said before anything is traced
    configurations = list(_configurations(topology, gpus, choices))
    if not configurations:
        raise ValueError(f"strategy {choices.strategy!r} has no mesh of {gpus} ranks")

    wanted = {each.checkpointing for each in configurations}
    ways = wanted if wanted <= {*CHECKPOINTING} else {"none", "full"}
    steps = traced_steps(planned, {each.micro_batch for each in configurations}, ways)

    @functools.cache
    def step(micro_batch: int, recompute: str) -> StepGraphs:
        if recompute in CHECKPOINTING:
            return steps[micro_batch, recompute]
        none, full = (step(micro_batch, each) for each in ("none", "full"))
        chosen = checkpointed(recompute, none.graphs["forward"])
        graphs = {
            kind: spliced(graph, full.graphs[kind], chosen) for kind, graph in none.graphs.items()
        }
        return dataclasses.replace(none, graphs=graphs)

    def estimated(found: Configuration, *, searched: bool) -> Estimate:
        traced = step(found.micro_batch, found.checkpointing)
        return estimate(traced, found, topology, searched=searched)

    def rank(found: Estimate) -> tuple[int, float]:
        over = found.memory.peak_bytes - topology.memory_bytes
        return (over, 0.0) if over > 0 else (0, found.sample_us)

    rough = sorted((estimated(each, searched=False) for each in configurations), key=rank)
    best = [estimated(each.configuration, searched=True) for each in rough[:SHOWN]]
    best.sort(key=rank)
    searched = {each.configuration: each for each in best}
    all_tried = [searched.get(each.configuration, each) for each in rough]
    first = configurations[0]
    traced = step(first.micro_batch, first.checkpointing)
    members = traced.parameters.members
    flops = 3 * forward_flops(traced.graphs["forward"]) / first.micro_batch
    return PlanReport(
        planned,
        topology,
        gpus,
        sum(math.prod(member.size) for member in members),
        Work(traced.tokens, flops),
        tuple(map(Tried.of, sorted(all_tried, key=rank))),
        tuple(each for each in best if rank(each)[0] == rank(best[0])[0] == 0) or (best[0],),
        time.perf_counter() - began,
    )


def _configurations(topology: Topology, gpus: int, choices: Choices) -> Iterator[Configuration]:
    """Yield all configurations that `choices` leaves open, each once.

    With one shard there is nothing to reshard, so that `reshards` is True alone.
    Raises ValueError for a mesh that doesn't hold `gpus`.
    """
    meshes = [choices.mesh] if choices.mesh else _meshes(topology, gpus)
    for replicas, shards in meshes:
        if replicas * shards != gpus:
            raise ValueError(f"mesh {replicas}x{shards} has {replicas * shards} ranks, not {gpus}")
    recomputes = ["none", "full"] if choices.checkpointing is None else [choices.checkpointing]
    batches = choices.micro_batches or MICRO_BATCHES
    for micro_batch, recompute in itertools.product(batches, recomputes):
        for (replicas, shards), reshards in itertools.product(meshes, (True, False)):
            found = Configuration(
                *(replicas, shards, reshards, micro_batch, recompute),
                accumulate=choices.accumulate,
                shards_states=shards == 1 and choices.strategy == "zero1",
            )
            is_same = shards == 1 and not reshards  # as with it
            if not is_same and choices.strategy in (None, found.strategy):
                yield found


def _meshes(topology: Topology, gpus: int) -> list[tuple[int, int]]:
    """List meshes to try, (replicas, shards), those of few shards first.

    Shards are over all ranks; over one node, two, four and so on, as long as that divides `gpus`;
    and over one rank, with replicas alone.
    """
    shards = {1, gpus}
    number = min(topology.ranks_per_node, gpus)
    while number < gpus and gpus % number == 0:
        shards.add(number)
        number *= 2
    return [(gpus // each, each) for each in sorted(shards)]
