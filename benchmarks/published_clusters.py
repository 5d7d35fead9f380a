"""Clusters of published measurements: topologies of this package, and what a system adds to them.

The constants that are fitted (`published_fit.py`) are those of the package's topologies, and four
of the publications themselves: networks that they don't tell, and shares that older systems reach.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from published_rows import NotExpressible, Row

from autoshard.passes.planner.per_unit import by_bytes, per_unit
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.simulate import Timeline
from autoshard.passes.planner.topology import NETWORK_SHARE, Topology
from autoshard.tools.plan.estimate import Configuration

FITTED = ("h100", "a100")
"""Kinds of GPU of which there are rows to fit, by the topology of each."""
OF_A_KIND = (
    "efficiency",
    "tile_depth",
    "attention_efficiency",
    "memory_efficiency",
    "node_gb_per_s",
    "contention",
)
"""Fields of a topology that are fitted for each kind of GPU."""
OF_ALL = ("attention_ramp", "attention_backward", "node_alpha_us", "step_alpha_us")
"""Fields of a topology that are fitted once."""
UNTOLD_GB_PER_S = {"h100": 17.5, "a100": 9.04}
"""A rank's share of a network that a publication doesn't tell; fitted."""
FSDP1_SHARE = 0.799
"""Share of YaFSDP's rate between nodes that FSDP1 has in the same cluster; fitted."""
EARLY_ATTENTION_SHARE = 0.781
"""Share of the rate of attention in systems of 2023, with the first FlashAttention; fitted."""


@dataclass(frozen=True)
class Constants:
    """Constants that are fitted, by name: "attention_ramp", or "h100.efficiency" of a kind of GPU.

    change: what is done to each topology after all.
    """

    values: Mapping[str, float]
    change: Callable[[Topology], Topology] = lambda topology: topology

    @staticmethod
    def shipped() -> Constants:
        """Return those of the package's topologies and of this file."""
        found = {
            f"{kind}.{name}": getattr(Topology.load(kind), name)
            for kind in FITTED
            for name in OF_A_KIND
        }
        found |= {name: getattr(Topology.load("h100"), name) for name in OF_ALL}
        found |= {f"{kind}.untold_gb_per_s": rate for kind, rate in UNTOLD_GB_PER_S.items()}
        found |= {
            "network_share": NETWORK_SHARE,
            "fsdp1_share": FSDP1_SHARE,
            "early_attention_share": EARLY_ATTENTION_SHARE,
        }
        return Constants(found)

    def topology(self, row: Row) -> Topology:
        """Return the cluster of `row`. Raises NotExpressible for an unknown GPU."""
        name = topology_name(row.gpu)
        kind = kind_of(name)
        found = dataclasses.replace(Topology.load(name), ranks_per_node=row.per_node)
        if kind in FITTED:
            fields = {each: self.values[f"{kind}.{each}"] for each in OF_A_KIND}
            fields |= {each: self.values[each] for each in OF_ALL}
            fields["network_gb_per_s"] = self.values[f"{kind}.untold_gb_per_s"]
            if name != kind:  # a variant has its own rates
                base = Topology.load(kind)
                shipped = Topology.load(name)
                fields["efficiency"] *= shipped.efficiency / base.efficiency
                fields["node_gb_per_s"] *= shipped.node_gb_per_s / base.node_gb_per_s
            found = dataclasses.replace(found, **fields)
        told = network_gb_per_s(row.network, row.per_node)
        if told is not None:
            share = told * self.values["network_share"]
            found = dataclasses.replace(found, network_gb_per_s=share)
        if is_fsdp1(row):
            share = found.network_gb_per_s * self.values["fsdp1_share"]
            found = dataclasses.replace(found, network_gb_per_s=share)
        if is_early(row):
            share = found.attention_efficiency * self.values["early_attention_share"]
            found = dataclasses.replace(found, attention_efficiency=share)
        return self.change(found)


def cluster_key(row: Row) -> object:
    """All that `Constants.topology` looks at in a row."""
    return row.gpu, row.per_node, row.network, is_fsdp1(row), is_early(row)


def topology_name(gpu: str) -> str:
    """Name of the package's topology for a GPU as publications write it: "h100_80gb".

    Raises NotExpressible for an unknown one.
    """
    words = set(re.split(r"[^A-Z0-9]+", gpu.upper().replace("80GB", "").replace("-", " ")))
    for name, wanted in NAMES:
        if wanted <= words:
            return name
    raise NotExpressible(f"no topology is known of {gpu!r}")


NAMES: tuple[tuple[str, set[str]], ...] = (
    ("a100-efa", {"A100", "40GB"}),
    ("a100", {"A100"}),
    ("h100-hbm2e", {"H100", "96GB"}),
    ("h100-pcie", {"H100", "PCIE"}),
    ("h100", {"H100"}),
    ("h200", {"H200"}),
    ("b200-nvl72", {"GB200"}),
    ("gb300-nvl72", {"GB300"}),
    ("b200", {"B200"}),
    ("l40s", {"L40S"}),
)
"""Topologies by words of a GPU's name, the more special first."""


def kind_of(topology: str) -> str:
    """Name of the topology of which a topology is a variant: "a100" of "a100-efa"."""
    return topology.partition("-")[0]


def network_gb_per_s(text: str, per_node: int) -> float | None:
    """Read a device's share of a network from text such as "800 Gb/s RDMA per node".

    A rate is of a node, unless it is said to be of a GPU. None if there is none.
    """
    found = re.search(r"([\d.]+)\s*([GT])(b|B)(?:it|yte)?(?:/s|ps)?", text)
    if found is None:
        return None
    rate = float(found[1]) * (1000 if found[2] == "T" else 1) / (8 if found[3] == "b" else 1)
    is_a_gpu = re.search(r"(per|a|/)\s*(gpu|device|rank|nic)", text.lower()) is not None
    return rate if is_a_gpu else rate / per_node


def is_fsdp1(row: Row) -> bool:
    return "fsdp1" in row.system.lower()


def is_early(row: Row) -> bool:
    """Tell whether attention is that of 2023: MosaicML's tables."""
    return "mosaic" in row.source.lower()


def configuration(row: Row) -> Configuration:
    """Return the way in which `row` was trained; checkpointing is that of a workload."""
    return Configuration(
        replicas=row.replicas,
        shards=row.shards,
        reshards=row.strategy not in ("shard_grad_op", "zero2", "hybrid_shard_zero2"),
        micro_batch=row.workload.micro_batch,
        checkpointing=row.workload.checkpointing,
        accumulate=row.accumulate,
        shards_states=row.strategy == "zero1",
    )


def is_flat(row: Row) -> bool:
    """Tell whether parameters and gradients lie in buffers that are sent as they are."""
    system = row.system.lower()
    return row.shards == 1 or any(each in system for each in ("fsdp1", "yafsdp", "ddp"))


def schedule(row: Row, problem: Problem) -> Timeline:
    """Simulate `problem` as the system of `row` has its collectives."""
    costs = dataclasses.replace(problem.costs, is_flat=is_flat(row))
    placed = dataclasses.replace(problem, costs=costs)
    return by_bytes(placed) if row.shards == 1 else per_unit(placed)
