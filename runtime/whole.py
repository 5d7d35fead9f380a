"""Whole parameters of one unit: launched, gathered, dropped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.passes.layout import first_row
from autoshard.runtime import collectives
from autoshard.runtime.collectives import InFlight
from autoshard.runtime.limiter import limiter
from autoshard.runtime.mesh import Axes
from autoshard.runtime.param import ShardedParam
from autoshard.runtime.unit import Unit


@dataclass(frozen=True)
class Parts:
    """This rank's parts of a unit, cut over fewer ranks than its shards: backward gathers them."""

    axes: Axes
    tensors: dict[ShardedParam, Tensor]


class Whole:
    """A gather of `unit`, from its launch to the drop of what came of it.

    Where parameters are not cut (a world of one, or replicas), nothing is launched.
    parts: what to gather instead of the shards.
    """

    def __init__(self, unit: Unit, parts: Parts | None = None) -> None:
        self.unit = unit
        unit.make_ready()
        self._stamps = [param.stamp for param in unit.params]
        self._in_full_precision = unit.computes_in_full_precision
        self._flights: list[tuple[list[ShardedParam], InFlight]] = []
        self._tensors: dict[ShardedParam, Tensor] | None = None
        self._versions: list[int] = []  # of the tensors, when they were made
        if unit.world > 1:
            if unit.limits_gathers:
                limiter.wait()
            for params, members in unit.gather_buckets():
                shards = [parts.tensors[p] if parts else _on_device(p) for p in params]
                group = parts.axes.shard_group if parts else params[0].group
                flight = collectives.launch_gather(shards, members, group)
                self._flights.append((params, flight))

    @property
    def is_stale(self) -> bool:
        """Whether a parameter was written to since it was gathered, as by an optimizer, or
        forward is to compute in another dtype."""
        stamps = [param.stamp for param in self.unit.params]
        return (
            stamps != self._stamps
            or self.unit.computes_in_full_precision != self._in_full_precision
        )

    @property
    def is_here(self) -> bool:
        """Whether it has been waited for."""
        return self._tensors is not None

    def tensors(self) -> dict[ShardedParam, Tensor]:
        """Its whole parameters, waiting for them if need be."""
        if self._tensors is None:
            if self.unit.world == 1:
                self._tensors = {
                    param: _on_device(param).detach().to(self.unit.gathered_member(param).dtype)
                    for param in self.unit.params
                }
            else:
                self._tensors = {
                    param: tensor
                    for params, flight in self._flights
                    for param, tensor in zip(params, collectives.wait_gather(flight), strict=True)
                }
                self._flights = []
            if not torch.is_inference_mode_enabled():  # its tensors count no versions
                self._versions = [tensor._version for tensor in self._tensors.values()]
        return self._tensors

    def cut(self, axes: Axes) -> Parts:
        """This rank's parts of what was gathered, over the shard axis of `axes`."""
        world, rank = axes.shard_world, axes.shard_rank
        tensors = {}
        for param, tensor in self.tensors().items():
            member = param.member
            start = first_row(member.rows, world, rank)
            piece = tensor.narrow(member.dim, start, member.local_rows(world, rank))
            tensors[param] = piece.clone(memory_format=torch.contiguous_format)
        return Parts(axes, tensors)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if a whole parameter was written to, which would be lost."""
        if self.unit.world == 1 or self._tensors is None:
            return
        written = [
            param.name
            for (param, tensor), version in zip(self._tensors.items(), self._versions, strict=False)
            if tensor._version != version
        ]
        if written:
            raise RuntimeError(
                f"parameters {written} were written to in forward, where they are gathered copies: "
                "write to the module's parameter outside of forward, before the call or after the "
                "optimizer's step (for Embedding(max_norm=...), renormalise there)"
            )

    def drop(self) -> None:
        """Let go, waiting for what is still on its way."""
        for _, flight in self._flights:
            flight.wait()
        whole = self._tensors
        self._flights, self._tensors = [], {}
        if whole and self.unit.world > 1 and self.unit.limits_gathers:
            limiter.dropped(next(iter(whole.values())).device)


def _on_device(param: ShardedParam) -> Tensor:
    """Its shard where it is gathered: a copy, from pinned memory an asynchronous one, if that is
    not where it lives."""
    return param.shard.to(param.device, non_blocking=True)
