"""Estimate time and memory, by category, of a training step on a cluster that is not there.

A step's graphs (`dry_run.py`) don't depend on ranks. A configuration determines their costs: which
ranks share a parameter and which have replicas of it, whether unsharded parameters are kept from
forward to backward, and what stays in memory from step to step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from autoshard.passes.ir.layout import Member
from autoshard.passes.planner.costs import Costs
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.problem import Item, Problem
from autoshard.passes.planner.search import Decision, search_beside
from autoshard.passes.planner.simulate import Peak, Timeline, usage
from autoshard.passes.planner.topology import Topology
from autoshard.passes.planner.update import buckets_of, most_on_device, update_from_host
from autoshard.runtime.sharding.placements import dim_of
from autoshard.runtime.unit.policies import OptimizerOffloadPolicy
from autoshard.runtime.unit.unit import ROOT_NAME
from autoshard.tools.plan.graphs import Graph


@dataclass(frozen=True)
class Optimizer:
    """States that an optimizer keeps for each parameter.

    states: how many, each as large as the parameter.
    is_f32: whether they are float32 whatever the parameter's dtype, as copies of weights are that
        low-precision parameters are rounded from.
    """

    states: int
    is_f32: bool = False

    def state_bytes(self, member: Member, shards: int) -> int:
        """Bytes of the states of one of `shards` parts of a parameter."""
        kept = replace(member, dtype=torch.float32) if self.is_f32 else member
        return self.states * _chunk_bytes(kept, shards)


OPTIMIZERS = {
    "adamw": Optimizer(2),
    "adam": Optimizer(2),
    "adamw-f32": Optimizer(3, is_f32=True),
    "sgd-momentum": Optimizer(1),
    "sgd": Optimizer(0),
}


@dataclass(frozen=True)
class Configuration:
    """Way to train a model on `replicas` times `shards` ranks.

    reshards: whether unsharded parameters are freed after forward.
    micro_batch: sequences, or samples, of one forward on one rank.
    checkpointing: what backward computes again, one of `ways.CHECKPOINTING`, or "layers:2" or
        "first:10": full, of every second unit of a list, or of its first ten.
    accumulate: microbatches of one step. Sharded gradients are reduced after each, those of
        replicas after the last.
    shards_states: whether each replica has its part of the optimizer's states, and sends others the
        parameters that it steps: ZeRO-1. Only with one shard.
    states_on_host: whether the optimizer's states live on the host between steps.
    """

    replicas: int
    shards: int
    reshards: bool
    micro_batch: int
    checkpointing: str
    accumulate: int = 1
    shards_states: bool = False
    states_on_host: bool = False

    @property
    def strategy(self) -> str:
        """Name of the strategy, as `shard()` takes it; or "zero1"."""
        if self.shards == 1:
            return "zero1" if self.shards_states else "no_shard"
        if self.replicas == 1:
            return "full_shard" if self.reshards else "shard_grad_op"
        return "hybrid_shard" if self.reshards else "hybrid_shard_zero2"

    @property
    def mesh(self) -> str:
        """Mesh as text: "replicas x shards", "8x64", or the number of shards alone."""
        return f"{self.replicas}x{self.shards}" if self.replicas > 1 else str(self.shards)


RESERVED = 1.2
"""Ratio of what torch's allocator reserves, where memory is left, to what is allocated, at peaks.

Fitted by `benchmarks/published.py` on 30 rows that tell what was reserved.
"""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak, on the rank that needs most, by category.

    parameters:  shards.
    gradients:   shards of reduced gradients.
    optimizer:   states of the optimizer.
    gathered:    unsharded parameters, gathered ahead or kept, and copies of them.
    unreduced:   unsharded gradients that wait to be reduced, or are being reduced, and copies.
    activations: values that forward keeps for backward.
    temporaries: the rest; buffers and the user's inputs, too.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int
    activations: int
    temporaries: int

    @property
    def peak_bytes(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator is likely to reserve at the peak, where memory is left."""
        return round(RESERVED * self.peak_bytes)

    def first_beyond(self, limit: int) -> str | None:
        """First category, in the order of fields, whose sum with those before it is over `limit`.

        None if all of them together are not.
        """
        sums = itertools.accumulate(dataclasses.astuple(self))
        return next(
            (
                field.name
                for field, total in zip(dataclasses.fields(self), sums, strict=True)
                if total > limit
            ),
            None,
        )


@dataclass(frozen=True)
class Parameters:
    """Parameters of a model, which lie in memory from step to step.

    Methods give bytes of shards, on the rank that has most, if there are `shards` of each.
    members: sizes and dtypes; of tied parameters, one.
    trained: the members that have a gradient.
    """

    members: tuple[Member, ...]
    trained: tuple[Member, ...]

    def shard_bytes(self, shards: int) -> int:
        return _chunks_bytes(self._kinds, shards)

    def trained_bytes(self, shards: int) -> int:
        return _chunks_bytes(self._trained_kinds, shards)

    @property
    def trained_numel(self) -> int:
        """Number of elements of all that is trained, unsharded."""
        return sum(math.prod(member.size) for member in self.trained)

    def largest_trained_bytes(self, shards: int) -> int:
        return max(map(_chunk_bytes, self._trained_kinds, itertools.repeat(shards)))

    def states_bytes(self, optimizer: Optimizer, shards: int) -> int:
        """Bytes of the states of `optimizer`."""
        return sum(
            count * optimizer.state_bytes(member, shards)
            for member, count in self._trained_kinds.items()
        )

    def state_buckets(self, optimizer: Optimizer, shards: int) -> list[int]:
        """Bytes of the buckets in which states of `optimizer` are copied from and to the host."""
        sizes = functools.cache(lambda member: optimizer.state_bytes(member, shards))
        return buckets_of(list(map(sizes, self.trained)), OptimizerOffloadPolicy().bucket_bytes)

    @functools.cached_property
    def _kinds(self) -> Counter[Member]:
        """How many parameters there are of each size and dtype: blocks have the same."""
        return Counter(self.members)

    @functools.cached_property
    def _trained_kinds(self) -> Counter[Member]:
        return Counter(self.trained)


def _chunks_bytes(members: Counter[Member], shards: int) -> int:
    return sum(count * _chunk_bytes(member, shards) for member, count in members.items())


def _chunk_bytes(member: Member, shards: int) -> int:
    placed = replace(member, dim=dim_of(member.size, shards))
    return placed.chunk_numel(shards) * member.dtype.itemsize


@dataclass(frozen=True)
class StepGraphs:
    """Training step of a model: graphs for a microbatch, and what lies in memory meanwhile.

    graphs: "forward" and "backward".
    optimizer: one of `OPTIMIZERS`.
    casts: whether parameters are computed with in another dtype.
    reduce_bytes: of an element of an unsharded gradient while it is added up and reduced.
    tokens: of a sample; None if it is not made of tokens.
    """

    graphs: Mapping[str, Graph]
    parameters: Parameters
    optimizer: str
    casts: bool
    reduce_bytes: int
    tokens: int | None = None

    def added_bytes(self, shards: int) -> int:
        """Bytes of the gradients that microbatches add up: of shards, or as they are reduced."""
        if shards > 1:
            return self.parameters.trained_bytes(shards)
        return self.parameters.trained_numel * self.reduce_bytes

    def kept_bytes(self, shards: int) -> int:
        """Bytes of all gradients where microbatches add them up: sums, and what is added to them.

        Unsharded gradients in the dtype of sums are added to where they are.
        """
        added, fresh = self.added_bytes(shards), self.parameters.trained_bytes(1)
        return added if shards > 1 or fresh == added else added + fresh


class Outside(NamedTuple):
    """Microseconds of a step outside its graphs.

    optimizer_us: of the optimizer's step.
    between_us: of what accumulation adds up after a microbatch, but for the first.
    spread_us: of parameters that are sent to replicas after the optimizer's step.
    """

    optimizer_us: float
    between_us: float
    spread_us: float


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step reads, writes and sends outside its graphs; see `Outside`.

    messages: in which parameters are sent to replicas, one each; 0 if none are.
    states: of buckets of optimizer states that live on the host.
    """

    stepped: int
    added: int
    spread: int
    messages: int
    states: tuple[int, ...] = ()

    def outside(self, configuration: Configuration, topology: Topology) -> Outside:
        """Return how long it takes on a cluster; one with host memory, if `states` are there."""
        rate, spread_us = topology.memory_bytes_per_us, 0.0
        stepped_us = self.stepped / rate
        if self.states and topology.host_link is not None:
            share = stepped_us / sum(self.states)
            each_us = [num_bytes * share for num_bytes in self.states]
            stepped_us = update_from_host(self.states, each_us, topology.host_link).time_us
        if self.messages:
            ranks = configuration.replicas
            link = topology.link("gather", ranks, min(ranks, topology.ranks_per_node))
            spread_us = self.messages * link.alpha_us + self.spread * link.us_per_byte
        return Outside(stepped_us, self.added / rate, spread_us)


def traffic(step: StepGraphs, configuration: Configuration) -> Traffic:
    """Count what `step` moves outside its graphs, each tensor read and written once."""
    params, shards = step.parameters, configuration.shards
    state_shards = configuration.replicas if configuration.shards_states else shards
    optimizer = OPTIMIZERS[step.optimizer]
    states, is_spread = params.states_bytes(optimizer, state_shards), configuration.shards_states
    on_host = configuration.states_on_host and states
    return Traffic(
        stepped=3 * params.trained_bytes(state_shards) + 2 * states,
        added=3 * step.added_bytes(shards),
        spread=params.trained_bytes(1) if is_spread else 0,
        messages=len(params.trained) if is_spread else 0,
        states=tuple(params.state_buckets(optimizer, state_shards)) if on_host else (),
    )


@dataclass(frozen=True)
class Estimate:
    """Configuration with its predicted time and memory.

    timelines: by graph, of the last microbatch, with the buckets that were found, or those of
        `schedule` without a search.
    earlier: those of the microbatches before it; the same if gradients are reduced after each.
    decisions: by graph; empty without a search.
    host_bytes: of values that forward saves on the host, until backward reads them.
    host_state_bytes: of optimizer states on the host.
    usage: by graph, and "optimizer", from its start: (us, the most in memory until the next entry);
        empty without a search.
    """

    configuration: Configuration
    memory: MemoryEstimate
    outside: Outside
    timelines: Mapping[str, Timeline]
    earlier: Mapping[str, Timeline]
    decisions: Mapping[str, Decision]
    host_bytes: int = 0
    host_state_bytes: int = 0
    usage: Mapping[str, tuple[tuple[float, MemoryEstimate], ...]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def step_time_us(self) -> float:
        others, out = self.configuration.accumulate - 1, self.outside
        last, before = (
            sum(each.time_us for each in timelines.values())
            for timelines in (self.timelines, self.earlier)
        )
        return last + others * (before + out.between_us) + out.optimizer_us + out.spread_us

    @property
    def exposed_us(self) -> float:
        last, before = (
            sum(each.exposed_us for each in timelines.values())
            for timelines in (self.timelines, self.earlier)
        )
        return last + (self.configuration.accumulate - 1) * before + self.outside.spread_us

    @property
    def sample_us(self) -> float:
        """Microseconds for each sequence, or sample, of a rank."""
        return self.step_time_us / (self.configuration.micro_batch * self.configuration.accumulate)


def estimate(
    step: StepGraphs,
    configuration: Configuration,
    topology: Topology,
    *,
    searched: bool,
    schedule: Callable[[Problem], Timeline] = per_unit,
) -> Estimate:
    """Estimate time and memory of one step: forwards, backwards and the optimizer's.

    Memory is that of whichever of the three needs most. The optimizer takes as long as memory takes
    to read gradients, and to read and write its states and parameters; it needs gradients of all
    trained shards, and twice the largest such shard. States that live on the host are copied
    meanwhile, if the cluster has host memory. Nothing is raised if memory does not suffice.
    searched: whether buckets are searched for, as a compilation does, or are those of `schedule`,
        which is much sooner done.
    """
    params, shards, optimizer = step.parameters, configuration.shards, OPTIMIZERS[step.optimizer]
    state_shards = configuration.replicas if configuration.shards_states else shards
    states = params.states_bytes(optimizer, state_shards)
    moved = states if configuration.states_on_host else 0
    lasting = {"parameters": params.shard_bytes(shards), "optimizer": states - moved}
    budget = topology.memory_bytes - sum(lasting.values())
    placed = {
        kind: Placed(graph, step, configuration, topology) for kind, graph in step.graphs.items()
    }
    decisions: dict[str, Decision] = {}
    timelines: dict[str, Timeline] = {}
    for kind, each in placed.items():
        timelines[kind] = known = schedule(each.problem)
        if searched:
            # No more memory than one bucket a unit needs, nor than the device has: a compilation
            # without a budget does the same. What is found may need more if nothing fits.
            found = search_beside(
                each.problem,
                known,
                budget_bytes=min(known.peak_bytes, budget),
                errors=topology.residuals,
            )
            decisions[kind], timelines[kind] = found, found.timeline
    problems, earlier = {kind: each.problem for kind, each in placed.items()}, timelines
    if shards == 1:
        silent = {k: dataclasses.replace(problem, reduces=()) for k, problem in problems.items()}
        earlier = {kind: schedule(problem) for kind, problem in silent.items()}
    added = step.added_bytes(shards)
    is_added = configuration.accumulate > 1 or (shards == 1 and optimizer.is_f32)
    kept = step.kept_bytes(shards) if is_added else 0
    during = timelines
    if is_added and shards == 1:  # gradients are counted as sums, and not as what is reduced
        during, problems = earlier, silent
    peaks = [
        MemoryEstimate(**lasting, **each.parts(during[kind].peak, kept))
        for kind, each in placed.items()
    ]
    stepped = dict(lasting)
    if moved:
        stepped["optimizer"] = most_on_device(params.state_buckets(optimizer, state_shards))
    # The optimizer takes parameters one by one, as it does where they are DTensors.
    peaks.append(
        MemoryEstimate(
            **stepped,
            gradients=added,
            gathered=0,
            unreduced=0,
            activations=0,
            temporaries=2 * params.largest_trained_bytes(state_shards),
        )
    )
    return Estimate(
        configuration,
        max(peaks, key=lambda memory: memory.peak_bytes),
        traffic(step, configuration).outside(configuration, topology),
        timelines=timelines,
        earlier=earlier,
        decisions=decisions,
        host_bytes=step.graphs["forward"].host_bytes,
        host_state_bytes=moved,
        usage={
            **{
                kind: tuple(
                    (time_us, MemoryEstimate(**lasting, **each.parts(peak, kept)))
                    for time_us, peak in usage(problems[kind], during[kind])
                )
                for kind, each in placed.items()
            },
            "optimizer": ((0.0, peaks[-1]),),
        }
        if searched
        else {},
    )


class Placed:
    """Graph on a cluster: its problem, at the costs of a configuration.

    Parameters that the configuration keeps unsharded from forward to backward are freed by no
    forward, and gathered by no backward.
    kept: bytes of these parameters at each op of backward, until they are freed; 0 in forward.
    """

    def __init__(
        self, graph: Graph, step: StepGraphs, configuration: Configuration, topology: Topology
    ) -> None:
        """Make the problem of `graph` with the gathers, memory and link costs of `configuration`.

        Kept from forward to backward are the root's parameters, and all others too if the
        configuration doesn't reshard, or has one shard; forward frees them only if backward has no
        use for them. With one shard and no cast, nothing is gathered.
        """
        problem = graph.problem
        others = step.graphs["backward" if problem.graph == "forward" else "forward"].problem
        self.activations = graph.activations
        kept = [
            item
            for item in problem.gathers
            if item.unit == ROOT_NAME or not configuration.reshards or configuration.shards == 1
        ]
        self.kept = (0,) * problem.num_ops
        gathers: Iterable[Item] = problem.gathers
        if configuration.shards == 1 and not step.casts:
            gathers = ()  # parameters are whole
        elif problem.graph == "forward":
            again = {item.name for item in others.gathers}
            until = {id(item) for item in kept if item.name in again}
            gathers = (
                dataclasses.replace(item, freed=problem.num_ops) if id(item) in until else item
                for item in problem.gathers
            )
        else:
            gathers = _without(problem.gathers, kept)
            self.kept = _until_freed(kept, problem.num_ops)
        self.problem = dataclasses.replace(
            problem,
            gathers=tuple(gathers),
            op_us=graph.op_us(topology),
            live_bytes=tuple(map(sum, zip(problem.live_bytes, self.kept, strict=True))),
            costs=costs_of(problem, configuration, topology),
        )

    def parts(self, peak: Peak, added: int) -> dict[str, int]:
        """Bytes at `peak`, of this graph, by category, but for parameters and optimizer states.

        added: of gradients of microbatches before.
        """
        at = min(peak.position, self.problem.num_ops - 1)
        live = self.problem.live_bytes[at]
        assert peak.live in (0, live)
        activations, kept = (self.activations[at], self.kept[at]) if peak.live else (0, 0)
        return {
            "gradients": max(peak.reduced, added),
            "gathered": peak.gathered + kept,
            "unreduced": peak.unreduced,
            "activations": activations,
            "temporaries": peak.live - activations - kept,
        }


def _without(items: Iterable[Item], others: Iterable[Item]) -> Iterable[Item]:
    unmanaged = {item.name for item in others}
    return (item for item in items if item.name not in unmanaged)


def _until_freed(items: Iterable[Item], num_ops: int) -> tuple[int, ...]:
    """Bytes that `items` take at each op, if they are there from the start until they are freed."""
    change = [0] * (num_ops + 1)
    for item in items:
        change[0] += item.num_bytes
        change[min(item.freed, num_ops)] -= item.num_bytes
    return tuple(itertools.accumulate(change))[:num_ops]


def costs_of(problem: Problem, configuration: Configuration, topology: Topology) -> Costs:
    """Costs on the cluster: shards are on neighbouring ranks, replicas `shards` ranks apart."""
    shards, replicas = configuration.shards, configuration.replicas
    per_node = topology.ranks_per_node
    near = (shards, min(shards, per_node))
    far = (replicas, min(replicas, max(1, per_node // shards)))
    kinds = {item.bucket_class: "gather" for item in problem.gathers}
    kinds |= {item.bucket_class: "reduce" for item in problem.reduces}
    return topology.costs(
        {bucket_class: topology.links(kind, near, far) for bucket_class, kind in kinds.items()},
        dict.fromkeys(kinds, shards),
    )
