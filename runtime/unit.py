"""A unit: the parameters that are gathered, and whose gradients are reduced, together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.runtime.agreement import Order
from autoshard.runtime.param import ShardedParam

if TYPE_CHECKING:
    from autoshard.runtime.step import Step

ROOT_NAME = "root"


class _Local(threading.local):
    """Counts units by thread, as ranks may be threads of one process."""

    def __init__(self) -> None:
        self._counter = itertools.count()

    def next(self) -> int:
        return next(self._counter)


_local = _Local()


@dataclass(eq=False)
class Unit:
    """One or more modules whose parameters, less those of nested units, travel together.

    name:    of its first module, from the outermost sharded module; "root" for that one.
    is_root: no other unit's module contains this one's; told by the enclosing call.
    reshard_after_forward: True frees whole parameters after forward and gathers them
        again in backward; False keeps them; None means True except for the root,
        whose parameters backward would want right away.
    """

    modules: tuple[nn.Module, ...]
    mesh: DeviceMesh
    reshard_after_forward: bool | None
    name: str = ROOT_NAME
    is_root: bool = True
    params: list[ShardedParam] = field(default_factory=list)
    number: int = field(default_factory=lambda: _local.next())  # the same on every rank
    last_step: Step | None = None  # the latest step that gathered it
    last_order: tuple[Unit, ...] = ()  # what the latest step that it owned gathered, in order
    orders: dict[str, Order] = field(default_factory=dict)  # phase -> of the steps that it owns

    @property
    def reshards(self) -> bool:
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    @property
    def world(self) -> int:
        return self.mesh.size()

    def order(self, phase: str) -> Order:
        """The collectives of one phase ("forward", "backward") of the steps that it owns."""
        if phase not in self.orders:
            key, topic = f"{self.number}/{phase}", f"the {phase} of {self.name}"
            self.orders[phase] = Order(key, topic, self.mesh)
        return self.orders[phase]

    def take(self, param: ShardedParam) -> None:
        """Make `param` a member, moving it here if it is another unit's."""
        previous = getattr(param, "unit", None)
        if previous is not None:
            previous.params.remove(param)
        param.unit = self
        self.params.append(param)

    def buckets(self) -> Iterator[list[ShardedParam]]:
        """Its parameters, split by what one collective can carry: a dtype."""
        by_dtype: dict[torch.dtype, list[ShardedParam]] = {}
        for param in self.params:
            by_dtype.setdefault(param.member.dtype, []).append(param)
        yield from by_dtype.values()

    def make_ready(self) -> None:
        """Before a gather: follow what was done to the parameters since the last.

        Raises RuntimeError, naming them, if some are still on the meta device.
        """
        for param in self.params:
            param.refresh()
        meta = [param.name for param in self.params if param.shard.is_meta]
        if meta:
            raise RuntimeError(
                f"parameters {meta} of unit {self.name!r} are still on the meta device: call "
                "model.to_empty(device=...) and initialise them before the first forward"
            )
