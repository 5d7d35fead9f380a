"""The backend's options: one flat dataclass, checked at the door."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.passes.planner.topology import Topology, default_topology, is_known, names
from autoshard.runtime.shard import ARGUMENT_CHECKS, STRATEGIES
from autoshard.runtime.unit_policies import MixedPrecisionPolicy, OffloadPolicy

LOWERINGS = ("inductor", "eager")
BUCKETINGS = ("auto", "per_unit", "none")


@dataclass(frozen=True)
class CompileOptions:
    """What `options=` of `torch.compile(model, backend="autoshard", options=...)` may hold.

    lowering:  "inductor", or "eager": FX's own code, bit for bit the eager runtime.
    bucketing: "auto"; "per_unit", one bucket a unit; "none", one a parameter; or a list
               of module names or of lists of them, one bucket an entry.
    memory_budget: bytes, or a fraction of the device's memory (a float up to 1), that a plan with
               "auto" keeps to: a graph's memory with its inputs, and with gradients and two
               optimizer states for its parameters' shards. Where the model is one graph, there
               is room, and backward would wait for gathers, whole parameters are kept for it,
               the last ones first, as if their units did not reshard: decided for the first
               shapes that are trained with. None: what "per_unit" needs. A graph whose plan does
               not keep to it has a warning.
    topology:  what plans reckon with: the name of one ("h100", "gloo", ...) or a file of
               `autoshard bench calibrate`; None for the one of the GPU at hand. Where that is
               not known by its name, or is a CPU, and there is no budget either, "auto" is
               "per_unit", and plans have no figures. Ranks need the same one. Predicted times
               follow the shapes that are compiled for first; where ranks' batches differ, the
               first rank's. Later shapes keep that plan.
    dump:      a folder; every graph is written there as text after every pass.
    strict:    raise where tracing, a pass or the lowering fails, rather than run the
               frame on the eager runtime with a warning.

    For the one-line form, the arguments of `shard()`, from `mesh` on.
    """

    lowering: str = "inductor"
    bucketing: str | list[str | list[str]] = "auto"
    memory_budget: int | float | None = None
    topology: str | None = None
    dump: str | None = None
    strict: bool = False
    mesh: DeviceMesh | None = None
    policy: Any = None
    strategy: str = "full_shard"
    mp_policy: MixedPrecisionPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_params: Iterable[nn.Parameter] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = True
    forward_prefetch: bool | int = True
    backward_prefetch: str | int | None = "pre"
    limit_all_gathers: bool = True
    strict_order: bool = True

    def topology_for(self, device: torch.device) -> Topology | None:
        """What plans for `device` reckon with: the same on every rank of a uniform cluster. On a
        CPU, about which little is known, only what is searched for reckons with anything.
        """
        if self.topology is not None:
            return Topology.load(self.topology)
        is_gpu = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_gpu else device.type
        is_enough = is_known(name) if is_gpu else self.bucketing == "auto"
        if not is_enough and self.memory_budget is None:
            return None
        found = Topology.load(default_topology(name))
        if not is_gpu:
            return found
        told = os.environ.get("LOCAL_WORLD_SIZE", "")  # by torchrun
        per_node = int(told) if told.isdigit() else torch.cuda.device_count()
        return dataclasses.replace(found, ranks_per_node=max(1, per_node))

    def searches_for(self, device: torch.device) -> bool:
        """Whether plans for `device` are found by predicted times."""
        return self.bucketing == "auto" and self.topology_for(device) is not None

    def __post_init__(self) -> None:
        _expect(self, "lowering", self.lowering in LOWERINGS, f"one of {list(LOWERINGS)}")
        _expect(
            self,
            "bucketing",
            self.bucketing in BUCKETINGS
            if isinstance(self.bucketing, str)
            else _is_names(self.bucketing),
            f"one of {list(BUCKETINGS)} or a list of module names or of lists of them",
        )
        budget = self.memory_budget
        _expect(
            self,
            "memory_budget",
            budget is None
            or (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0)
            or (isinstance(budget, float) and 0 < budget <= 1),
            "a number of bytes, or a fraction of the device's memory, over 0 and up to 1.0",
        )
        if self.topology is not None:
            is_name = isinstance(self.topology, str)
            _expect(self, "topology", is_name, f"one of {names()} or a JSON file's path")
            try:
                Topology.load(self.topology)
            except ValueError as error:
                raise ValueError(f"option 'topology' for backend 'autoshard': {error}") from None
        _expect(self, "dump", self.dump is None or isinstance(self.dump, str), "a folder's path")
        _expect(self, "strict", isinstance(self.strict, bool), "True or False")
        _expect(
            self, "mesh", self.mesh is None or isinstance(self.mesh, DeviceMesh), "a DeviceMesh"
        )
        _expect(
            self,
            "policy",
            self.policy is None or callable(self.policy),
            "a ModuleWrapPolicy or a function of a module that returns a bool",
        )
        _expect(self, "strategy", self.strategy in list(STRATEGIES), f"one of {list(STRATEGIES)}")
        for name in ("sync_module_states", "limit_all_gathers", "strict_order"):
            _expect(self, name, isinstance(getattr(self, name), bool), "True or False")
        init = self.param_init_fn
        _expect(self, "param_init_fn", init is None or callable(init), "a function of a module")
        for name, check in ARGUMENT_CHECKS.items():
            try:
                check(getattr(self, name))
            except (TypeError, ValueError) as error:
                raise ValueError(f"option {name!r} for backend 'autoshard': {error}") from None

    @staticmethod
    def read(options: Mapping[str, Any] | None) -> CompileOptions:
        """Options from the dict that torch.compile passes.

        Raises ValueError for an unknown key, listing the valid ones, or for a value of
        the wrong type, saying what is expected.
        """
        options = dict(options or {})
        valid = [field.name for field in dataclasses.fields(CompileOptions)]
        unknown = sorted(set(options) - set(valid), key=str)
        if unknown:
            raise ValueError(
                f"unknown option {', '.join(map(repr, unknown))} for backend 'autoshard'; "
                f"valid options: {', '.join(valid)}"
            )
        return CompileOptions(**options)

    def told(self, device: torch.device | None) -> str:
        """What ranks must have in common to compile alike, for people.

        A budget in bytes may differ, as GPUs' free memory does: ranks follow the first one's plan.
        """
        topology = self.topology_for(device) if device is not None else None
        has_budget = self.memory_budget is not None
        return (
            f"lowering={self.lowering!r}, bucketing={self.bucketing!r}, "
            f"{'a' if has_budget else 'no'} memory_budget, "
            f"topology={topology.name if topology else None!r}"
        )

    def shard_arguments(self) -> dict[str, Any]:
        """What goes to `shard()` in the one-line form."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names[names.index("mesh") :]}


def _expect(options: CompileOptions, name: str, holds: bool, expected: str) -> None:
    if not holds:
        value = getattr(options, name)
        raise ValueError(
            f"option {name!r} for backend 'autoshard' is {value!r}; expected {expected}"
        )


def _is_names(value: object) -> bool:
    if not isinstance(value, (list, tuple)):
        return False
    return all(
        isinstance(entry, str)
        or (isinstance(entry, (list, tuple)) and all(isinstance(name, str) for name in entry))
        for entry in value
    )
