"""Find the best configurations of a model on a cluster: `autoshard plan`.

A configuration is a strategy, a mesh, a microbatch and whether activations are recomputed. All
configurations that the caller leaves open are estimated with one bucket a unit; buckets are
searched for in the best few.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan.estimate import Configuration, Estimate, StepGraphs, estimate
from autoshard.tools.plan.front import Tried
from autoshard.tools.plan.speed import Work, forward_flops
from autoshard.tools.plan.splice import checkpointed, first_blocks, read_way, spliced
from autoshard.tools.plan.steps import PlannedModel as PlannedModel
from autoshard.tools.plan.steps import traced_steps
from autoshard.tools.plan.ways import BY_VALUES, CHECKPOINTING, STEP, TRACED, VALUES

MICRO_BATCHES = (1, 2, 4)  # tried where the caller names none
SHOWN = 3  # configurations in which buckets are searched for


@dataclass(frozen=True)
class Choices:
    """Settings of configurations; None where the caller leaves one open.

    mesh: (replicas, shards).
    strategy: "zero1" is tried only where it is named.
    checkpointing: one of `CHECKPOINTING`, a way that `splice.read_way` reads, or "values": value by
        value, at several shares of what can be computed again.
    accumulate: microbatches of a step.
    budget_bytes: of a device, in place of its memory. What doesn't fit in has as few values
        computed again as it takes, if `checkpointing` leaves that open.
    states_on_host: whether the optimizer's states live there; if that is open, it is tried where
        the budget is too small for them.
    """

    mesh: tuple[int, int] | None = None
    strategy: str | None = None
    micro_batches: tuple[int, ...] | None = None
    checkpointing: str | None = None
    accumulate: int = 1
    budget_bytes: int | None = None
    states_on_host: bool | None = None


@dataclass(frozen=True)
class PlanReport:
    """Result of `plan`.

    topology: with the budget for its memory, if there is one.
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
    budget_bytes: int | None = None

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
    Raises ValueError for a mesh that doesn't hold `gpus`, a strategy that no mesh has, or states on
    a host that a cluster has not; RuntimeError for a model whose forward is not one graph, and in a
    process that has a process group.
    """
    began = time.perf_counter()
    if choices.checkpointing not in (None, VALUES, *CHECKPOINTING):
        read_way(choices.checkpointing)  # what is wrong is said before anything is traced
    if choices.budget_bytes is not None:
        topology = dataclasses.replace(topology, memory_bytes=choices.budget_bytes)
    if choices.states_on_host and topology.host_link is None:
        raise ValueError(f"{topology.name} has no host memory beside its own for states to live in")
    configurations = list(_configurations(topology, gpus, choices))
    if not configurations:
        raise ValueError(f"strategy {choices.strategy!r} has no mesh of {gpus} ranks")
    by_values = choices.budget_bytes is not None and choices.checkpointing in (None, VALUES)
    wanted = {each.checkpointing for each in configurations}
    ways = set().union(*map(_traced_for, wanted), TRACED[:1] + BY_VALUES if by_values else ())
    traces = traced_steps(planned, {each.micro_batch for each in configurations}, ways, topology)
    steps = _Steps(traces)

    def estimated(found: Configuration, *, searched: bool) -> Estimate:
        traced = steps.of(found.micro_batch, found.checkpointing)
        return estimate(traced, found, topology, searched=searched)

    def rank(found: Estimate) -> tuple[int, float]:
        over = found.memory.peak_bytes - topology.memory_bytes
        return (over, 0.0) if over > 0 else (0, found.sample_us)

    def is_over(found: Configuration) -> bool:
        return rank(estimated(found, searched=False))[0] > 0

    if choices.states_on_host is None and choices.budget_bytes is not None and topology.host_link:
        configurations += [
            dataclasses.replace(each, states_on_host=True)
            for each in configurations
            if is_over(each)
        ]
    if by_values:
        configurations += [
            _least_values(each, is_over)
            for each in configurations
            if each.checkpointing == "none" and is_over(each)
        ]
    rough = sorted((estimated(each, searched=False) for each in configurations), key=rank)
    best = [estimated(each.configuration, searched=True) for each in rough[:SHOWN]]
    best.sort(key=rank)
    searched = {each.configuration: each for each in best}
    all_tried = [searched.get(each.configuration, each) for each in rough]
    first = configurations[0]
    traced = steps.of(first.micro_batch, first.checkpointing)
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
        choices.budget_bytes,
    )


def _least_values(found: Configuration, is_over: Callable[[Configuration], bool]) -> Configuration:
    """Return `found` with the fewest values computed again with which it fits; with all, if none.

    is_over: whether a configuration needs more memory than there is.
    """

    def way(percent: int) -> Configuration:
        return dataclasses.replace(found, checkpointing=f"{VALUES}:{percent}")

    percents = range(1, 101)
    at = bisect.bisect_left(percents, True, key=lambda percent: not is_over(way(percent)))
    return way(percents[min(at, len(percents) - 1)])


class _Steps:
    """Graphs of a training step by microbatch and way of checkpointing, as traced or spliced."""

    def __init__(self, traced: Mapping[tuple[int, str], StepGraphs]) -> None:
        self._known = dict(traced)

    def of(self, micro_batch: int, way: str) -> StepGraphs:
        """Return those for any way; blocks that are checkpointed otherwise are spliced in."""
        key = micro_batch, way
        if key not in self._known:
            kind, number = read_way(way)
            less, more = (self.of(micro_batch, each) for each in _spliced_of(way))
            forward = less.graphs["forward"]
            if kind == VALUES:
                chosen = first_blocks(number % STEP / STEP, forward)
            else:
                chosen = checkpointed(way, forward)
            try:
                graphs = {
                    kind: spliced(graph, more.graphs[kind], chosen)
                    for kind, graph in less.graphs.items()
                }
            except ValueError:  # the two have blocks in another order
                if kind != VALUES:
                    raise
                graphs = dict(more.graphs)
            self._known[key] = dataclasses.replace(less, graphs=graphs)
        return self._known[key]


def _traced_for(way: str) -> tuple[str, ...]:
    """List the ways of which graphs are traced, to have those of `way`."""
    return (way,) if way in TRACED else _spliced_of(way)


def _spliced_of(way: str) -> tuple[str, str]:
    """Return the two traced ways, of less and of more checkpoints, that `way` is spliced of."""
    kind, number = read_way(way)
    if kind != VALUES:
        return "none", "full"
    less = number - number % STEP
    return (f"{VALUES}:{less}" if less else "none"), f"{VALUES}:{less + STEP}"


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
    if choices.checkpointing == VALUES:
        recomputes = ["none"] if choices.budget_bytes is not None else ["none", *BY_VALUES]
    batches = choices.micro_batches or MICRO_BATCHES
    for micro_batch, recompute in itertools.product(batches, recomputes):
        for (replicas, shards), reshards in itertools.product(meshes, (True, False)):
            found = Configuration(
                *(replicas, shards, reshards, micro_batch, recompute),
                accumulate=choices.accumulate,
                shards_states=shards == 1 and choices.strategy == "zero1",
                states_on_host=bool(choices.states_on_host),
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
