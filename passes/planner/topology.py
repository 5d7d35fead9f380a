"""Topology of a cluster: its devices, the links between them, and the costs of collectives there.

A topology is a JSON file: one of this package, by its name, or one that `autoshard bench calibrate`
has written. It has devices in nodes: links inside a node, and a network between nodes.

    a group of `ranks` ranks, `per_node` of them on each node
    one node:  alpha, and a step's for each rank, + B * (ranks - 1) / ranks / node bandwidth
    several:   the same, and a start-up of the network once more for each doubling of nodes,
               + B * (nodes - 1) / nodes / (per_node * a rank's share of the network)
               or what the links inside a node take for the whole group, if that is more

B is the unsharded payload, in bytes; an all-reduce sends twice as much as a gather or a reduce. All
ranks of a node use the network at once, each its share. Source: the costs of ring algorithms
(Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005),
over the narrower of two levels. Messages of a ring go through all ranks, so that its start-up grows
with them; NCCL has no tree for gathers of several ranks a node.

A calibrated topology has measured times instead, for collectives of groups of one size (`measured`)
and for ops that were timed one by one (`ops`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoshard.passes.planner.costs import Costs, HostLink, Link
from autoshard.passes.planner.schema import read_as

FOLDER = Path(__file__).resolve().parent / "topologies"
KINDS = ("gather", "reduce", "all_reduce")
NETWORK_SHARE = 0.588
"""Share of a network's rate that collectives reach; fitted by `benchmarks/published.py` on 143 rows
that tell their network."""


@dataclass(frozen=True)
class Residuals:
    """Published runs that a topology's constants are fitted on, and how well.

    runs: how many. like: what they have in common. most_gpus: of one of them.
    low, high: measured over predicted time of a step, between which nine of ten runs lie.
    """

    runs: int
    like: str
    most_gpus: int
    low: float
    high: float


@dataclass(frozen=True)
class Topology:
    """Speeds and sizes of a cluster's parts. GB are 1e9 bytes, TFLOP/s 1e12 operations.

    memory_bytes:     of one device.
    tflops:           peak of matrix products by dtype, "bf16"; "" stands for any other dtype.
    efficiency:       the share of that peak that large products reach.
    processors:       of a device, one for each tile of a product; 0 where times don't go by tiles.
    tile_depth:       elements along the depth of a product that a tile's start and end cost.
    attention_efficiency:  the share of the peak that attention reaches, with long sequences.
    attention_ramp:   length of sequences at which it reaches half of that.
    attention_backward:    the rate of its backward, as a share of forward's.
    memory_gb_per_s:  of device memory, read or written.
    memory_efficiency:     the share of that which kernels reach.
    copy_gb_per_s:    the same while collectives' buffers are packed.
    op_us:            time of the smallest kernel.
    ranks_per_node:   devices of a node.
    node_alpha_us, node_gb_per_s:        of collectives inside a node, for a rank.
    network_alpha_us, network_gb_per_s:  what each doubling of nodes adds; a rank's share.
    host_gb_per_s:    of copies between a device and its host, in one direction, while other devices
        copy, too; 0 where there is no host memory beside a device's.
    host_alpha_us:    start-up of such a copy.
    step_alpha_us:    of each step of a ring, of which there are as many as ranks.
    member_us:        time of one more member of a grouped bucket.
    together_bytes:   of a parameter, below which it is sent together with others of its bucket, as
        where ranks send messages.
    call_us:          how long compute stands still for one more collective itself.
    averages:         whether collectives divide sums themselves, as NCCL's do.
    contention:       factor by which compute takes longer while a collective runs.
    measured:         "gather 2": (alpha_us, us_per_byte), by kind and ranks, used in place of the
        formula where there is an entry.
    ops:              measured microseconds, by `roofline.op_key`, used in place of the roofline.
    sources:          where each number comes from, by its name.
    residuals:        None if constants are fitted on no run.
    """

    name: str
    title: str
    memory_bytes: int
    tflops: Mapping[str, float]
    efficiency: float
    memory_gb_per_s: float
    copy_gb_per_s: float
    op_us: float
    ranks_per_node: int
    node_alpha_us: float
    node_gb_per_s: float
    network_alpha_us: float
    network_gb_per_s: float
    member_us: float
    call_us: float
    contention: float
    sources: Mapping[str, str]
    processors: int = 0
    tile_depth: float = 0.0
    attention_efficiency: float = 0.5
    attention_ramp: float = 0.0
    attention_backward: float = 0.7
    memory_efficiency: float = 1.0
    host_gb_per_s: float = 0.0
    host_alpha_us: float = 0.0
    step_alpha_us: float = 0.0
    averages: bool = False
    together_bytes: int = 0
    residuals: Residuals | None = None
    measured: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    ops: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @staticmethod
    def load(name: str) -> Topology:
        """Load the topology of this package that is called `name`, or the JSON file at that path.

        A file is read once in a process. Raises ValueError, with the valid names if there is
        neither, or with what is wrong in the file.
        """
        return _load(name)

    def link(self, kind: str, ranks: int, per_node: int) -> Link:
        """Cost of a collective over one group: what was measured, else what a formula gives.

        A measurement counts for its kind and number of ranks, however they lie on nodes. Without
        one, one rank costs nothing. The formula: the start-up in a node, one of the network for
        each doubling of nodes, and a ring's time a byte, in a node or between nodes, whichever is
        more; an all-reduce takes twice all that. The link is called "network" if the group is on
        several nodes, else "node".

        kind: "gather", "reduce" or "all_reduce"; not checked.
        ranks: number of ranks in the group.
        per_node: how many of them are on one node.
        """
        found = self.measured.get(f"{kind} {ranks}")
        name = "network" if ranks > per_node else "node"
        if found is not None:
            return Link(name, *found, self.member_us)
        if ranks == 1:
            return Link(name, 0.0, 0.0, 0.0)
        nodes = -(-ranks // per_node)
        us_per_byte = _us_per_byte((ranks - 1) / ranks, self.node_gb_per_s)
        alpha_us = self.node_alpha_us + ranks * self.step_alpha_us
        if nodes > 1:
            shared = per_node * self.network_gb_per_s
            us_per_byte = max(us_per_byte, _us_per_byte((nodes - 1) / nodes, shared))
            alpha_us += self.network_alpha_us * math.log2(nodes)
        if kind == "all_reduce":
            us_per_byte, alpha_us = 2 * us_per_byte, 2 * alpha_us
        return Link(name, alpha_us, us_per_byte, self.member_us)

    def links(
        self, kind: str, shards: tuple[int, int], copies: tuple[int, int]
    ) -> tuple[Link, ...]:
        """List the costs of a bucket's collectives, in the order in which they run.

        A reduce over replicas has a second one, the all-reduce of shards. Its `us_per_byte` is for
        a byte of the unsharded bucket, too.

        kind: "gather" or "reduce".
        shards: number of ranks that parameters are sharded over, and how many are on one node.
        copies: number of ranks that hold the same shard, and how many are on one node.
        """
        first = self.link(kind, *shards)
        if kind == "gather" or copies[0] == 1:
            return (first,)
        second = self.link("all_reduce", *copies)  # of shards; a bucket's bytes are the whole's
        return first, dataclasses.replace(second, us_per_byte=second.us_per_byte / shards[0])

    def with_network(self, gbit_per_s: float) -> Topology:
        """Return this topology with a network of `gbit_per_s` for all adapters of a node."""
        share = gbit_per_s / 8 / self.ranks_per_node * NETWORK_SHARE
        title = f"{self.title}, but a network of {gbit_per_s:g} Gb/s a node"
        return dataclasses.replace(self, title=title, network_gb_per_s=share)

    def costs(self, links: Mapping[str, tuple[Link, ...]], shards: Mapping[str, int]) -> Costs:
        """Costs of a graph's collectives and copies. A contention below 1 counts as 1.

        links: of each bucket class.
        shards: ranks that parameters of each class are sharded over.
        """
        return Costs(
            links,
            shards,
            copy_us_per_byte=self.copy_us_per_byte,
            contention=max(1.0, self.contention),
            divides=self.averages,
            call_us=self.call_us,
            together_bytes=self.together_bytes,
        )

    @property
    def host_link(self) -> HostLink | None:
        """Costs of copies between a device and its host; None if there is no such memory."""
        if not self.host_gb_per_s:
            return None
        return HostLink(self.host_alpha_us, _us_per_byte(1.0, self.host_gb_per_s), self.call_us)

    def flops_per_us(self, dtype: str) -> float:
        """Operations a microsecond that large matrix products of `dtype` reach."""
        return self.peak_flops_per_us(dtype) * self.efficiency

    def peak_flops_per_us(self, dtype: str) -> float:
        """Operations a microsecond of `dtype`, at the peak."""
        return self.tflops.get(dtype, self.tflops[""]) * 1e6

    @property
    def memory_bytes_per_us(self) -> float:
        return self.memory_gb_per_s * self.memory_efficiency * 1e3

    @property
    def copy_us_per_byte(self) -> float:
        return _us_per_byte(1.0, self.copy_gb_per_s)

    def to_json(self) -> str:
        """Serialize the topology as JSON; `load` reads it back from a file."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"


def names() -> list[str]:
    """Names of the topologies of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


GPUS = {
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
    "GB200": "b200-nvl72",
    "GB300": "gb300-nvl72",
    "B200": "b200",
    "L40S": "l40s",
}
"""The named topology of a GPU, by a word of its name. An A100 has 80 GB unless it says "40GB"."""

VARIANTS = {("A100", "40GB"): "a100-efa", ("H100", "PCIE"): "h100-pcie"}
"""Named topologies of GPUs whose name has a second word that tells them apart."""


def is_known(device: str) -> bool:
    """Tell whether this package has the topology of a GPU that torch calls `device`.

    False for "cpu".
    """
    return _named(device) is not None


def default_topology(device: str) -> str:
    """Name of the topology for a device: "gloo" for "cpu", else by a word in a GPU's name.

    An unknown device counts as an H100.

    device: "cpu", or the name that torch gives a GPU, "NVIDIA H100 80GB HBM3".
    """
    if device == "cpu":
        return "gloo"
    return _named(device) or "h100"


def _named(device: str) -> str | None:
    words = re.split(r"[^A-Z0-9]+", device.upper())
    variants = (name for both, name in VARIANTS.items() if set(both) <= set(words))
    return next(variants, None) or next((GPUS[word] for word in words if word in GPUS), None)


def _us_per_byte(share: float, gb_per_s: float) -> float:
    return share / (gb_per_s * 1e3)


@functools.lru_cache(maxsize=32)
def _load(name: str) -> Topology:
    """Load the topology called `name`, or the JSON file at that path, and cache it by `name`.

    Raises ValueError if there is neither, or if it can't be read or is no valid topology.
    """
    path = FOLDER / f"{name}.json" if name in names() else Path(name)
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(
            f"there is no topology {name!r}; expected one of {names()} or the path of a JSON file"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"topology {path} can't be read: {error}") from None
    try:
        return _checked(read_as(Topology, data, "topology"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(topology: Topology) -> Topology:
    """Return `topology`, if its numbers make sense.

    Raises ValueError if a number is negative or not finite, or if `tflops` has no entry for other
    dtypes.
    """
    for field in dataclasses.fields(topology):
        value = getattr(topology, field.name)
        for number in _numbers(value):
            if not 0 <= number < math.inf:
                has = "is" if value is number else "has"
                raise ValueError(f"topology.{field.name} {has} {number!r}; expected from 0 on")
    if "" not in topology.tflops:
        raise ValueError('topology.tflops has no entry "", for any other dtype')
    return topology


def _numbers(value: object) -> Iterator[float]:
    """Yield the numbers in `value`: itself, or those in a tuple or in a mapping's values.

    Tuples and mappings in them are looked into. Other values are skipped.
    """
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, (int, float)):
        yield value
