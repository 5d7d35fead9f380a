"""Unsharded parameters of one unit: launched, gathered, dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.passes.ir.layout import Member, part_of
from autoshard.runtime.comm import collectives, transport
from autoshard.runtime.comm.flights import GroupedFlight, InFlight
from autoshard.runtime.comm.limiter import limiter
from autoshard.runtime.comm.mesh import Axes
from autoshard.runtime.comm.packing import bucket_layout
from autoshard.runtime.unit import extensions
from autoshard.runtime.unit.extensions import Sent
from autoshard.runtime.unit.param import ShardedParam, stamps_of
from autoshard.runtime.unit.unit import Unit

Tensors = dict[ShardedParam, Tensor]
"""Tensor for each of some parameters."""


@dataclass(frozen=True)
class Parts:
    """Parts of a unit on this rank, cut over fewer ranks than its shards: backward gathers them."""

    axes: Axes
    tensors: dict[ShardedParam, Tensor]


_Piece = tuple[ShardedParam, int]
"""One tensor that is gathered for a parameter: (parameter, number of the tensor).

Numbers are 0 but for extended parameters, which may send several."""


class Unsharded:
    """Gather of `unit`, launched when this is made, up to the drop of the unsharded parameters.

    Where parameters are not cut (a world of one, or replicas), nothing is launched.
    parts: what to gather instead of the shards, over fewer ranks.
    Raises as `Unit.make_ready` (RuntimeError for parameters on the meta device) and
    `extensions.before_gather`.
    """

    def __init__(self, unit: Unit, parts: Parts | None = None) -> None:
        """Launch a gather for each dtype that is sent, and note which values the shards have.

        Parameters follow what was done to them first (`Unit.make_ready`). The host may wait for
        `limiter`. The dtypes are those of the latest forward (`Unit.gathered_member`). Extensions
        are asked what to send. Where parameters are not cut nothing is launched: the shards
        themselves, cast, are what has arrived.
        parts: what to gather instead of the shards, over fewer ranks.
        Raises as `Unit.make_ready` and `extensions.before_gather`.
        """
        self.unit = unit
        unit.make_ready()
        self._stamps = stamps_of(unit.params)
        self._in_full_precision = unit.computes_in_full_precision
        self._extended: dict[ShardedParam, Sent] = {}
        self._flights: list[tuple[list[_Piece], InFlight | GroupedFlight]] = []
        self._arrived: dict[_Piece, Tensor] = {}
        self._sources: dict[ShardedParam, tuple[Tensor, ...]] = {}
        self._tensors: dict[ShardedParam, Tensor] | None = None
        self._versions: list[int] = []  # of the tensors, when they were made
        by_dtype: dict[torch.dtype, list[tuple[_Piece, Member, Tensor]]] = {}
        for param in unit.params:
            for index, (member, tensor) in enumerate(self._to_send(param, parts)):
                by_dtype.setdefault(member.dtype, []).append(((param, index), member, tensor))
        if unit.settings.is_limited and unit.world > 1:
            limiter.wait()
        for bucket in by_dtype.values():  # one gather carries one dtype
            pieces, members, tensors = zip(*bucket, strict=True)
            if unit.world == 1:
                for piece, member, tensor in bucket:
                    self._arrived[piece] = tensor.detach().to(member.dtype)
                continue
            axes = parts.axes if parts else unit.axes
            group = axes.shard_group
            launch: Callable[..., InFlight | GroupedFlight] = collectives.launch_gather
            if unit.settings.all_gather is not None:
                launch = functools.partial(launch, comm=unit.settings.all_gather)
            elif transport.sends_members(group, tensors[0].device):
                launch = collectives.launch_grouped_gather
            layout = bucket_layout(members, axes.shard_world, axes.shard_rank)
            flight = launch(list(tensors), layout, group)
            self._flights.append((list(pieces), flight))

    def _to_send(self, param: ShardedParam, parts: Parts | None) -> list[tuple[Member, Tensor]]:
        """List what this rank sends of `param`: its shard, its part, or what an extension makes.

        A shard that lives elsewhere is copied to the device first. An extension's
        `fsdp_pre_all_gather` is called, and what it gave is kept for the wait; not with `parts`.
        """
        member = self.unit.gathered_member(param)
        if parts is not None:
            return [(member, parts.tensors[param])]
        shard = _on_device(param)
        if not param.is_extended:
            return [(member, shard)]
        sent = self._extended[param] = extensions.before_gather(param, self.unit, shard)
        return sent.pieces(self.unit.world)

    @property
    def is_stale(self) -> bool:
        """Tell whether a shard was written to since the gather was launched, as by an optimizer.

        True also if the unit computes in another precision since.
        """
        return (
            stamps_of(self.unit.params) != self._stamps
            or self.unit.computes_in_full_precision != self._in_full_precision
        )

    @property
    def is_here(self) -> bool:
        """Tell whether `tensors` has waited for the gather; True, too, after `drop`."""
        return self._tensors is not None

    def tensors(self) -> dict[ShardedParam, Tensor]:
        """Return the unsharded parameters; the first call waits for the gather and makes them.

        It calls `fsdp_post_all_gather` of extensions, and notes versions for `check_unwritten`.
        After `drop` the dict is empty.
        """
        if self._tensors is None:
            for pieces, flight in self._flights:
                self._arrived.update(zip(pieces, collectives.wait_gather(flight), strict=True))
            self._tensors = {param: self._put_together(param) for param in self.unit.params}
            self._flights, self._arrived, self._extended = [], {}, {}
            if not torch.is_inference_mode_enabled():  # its tensors count no versions
                self._versions = [tensor._version for tensor in self._tensors.values()]
        return self._tensors

    def _put_together(self, param: ShardedParam) -> Tensor:
        """Return the unsharded `param` from what has arrived, and note its sources.

        With an extension, its `fsdp_post_all_gather` makes it.
        """
        sent = self._extended.get(param)
        if sent is None:
            whole = self._arrived[param, 0]
            self._sources[param] = (whole,)
            return whole
        arrived = [self._arrived[param, index] for index in range(len(sent.inputs))]
        dtype = self.unit.gathered_member(param).dtype
        whole, self._sources[param] = extensions.after_gather(param, sent, arrived, dtype)
        return whole

    def sources(self) -> dict[ShardedParam, tuple[Tensor, ...]]:
        """Return the tensors that hold the memory of each unsharded parameter; mostly just itself.

        Waits as `tensors` does.
        """
        self.tensors()
        return self._sources

    def cut(self, axes: Axes) -> Parts:
        """Copy this rank's parts of the unsharded parameters, cut over the shard axis of `axes`.

        Waits as `tensors` does.
        """
        world, rank = axes.shard_world, axes.shard_rank
        whole = self.tensors().items()
        return Parts(axes, {p: part_of(tensor, p.member, world, rank) for p, tensor in whole})

    def check_unwritten(self) -> None:
        """Raise RuntimeError if an unsharded parameter was written to, which would be lost.

        Does nothing before `tensors` was called, after `drop`, or if the call of `tensors` was in
        inference mode.
        """
        written = _written(self._tensors or {}, self._versions)
        if written:
            raise RuntimeError(
                f"parameters {written} were written to in forward, where they are gathered copies: "
                "write to the module's parameter outside of forward, before the call or after the "
                "optimizer's step (for Embedding(max_norm=...), renormalise there)"
            )

    def drop(self) -> None:
        """Drop the unsharded parameters, waiting for gathers that are still in flight.

        Tensors that others hold stay. If the unit's gathers are limited, `limiter` is told.
        """
        for _, flight in self._flights:
            flight.wait()
        whole = self._tensors
        self._flights, self._arrived, self._tensors, self._sources = [], {}, {}, {}
        if whole and self.unit.settings.is_limited and self.unit.world > 1:
            limiter.dropped(next(iter(whole.values())).device)


def is_kept(unit: Unit) -> bool:
    """Tell whether `unit` keeps unsharded parameters, of the values that its shards have."""
    return unit.kept is not None and not unit.kept.is_stale


def keep(unit: Unit) -> Unsharded:
    """Have `unit` keep its unsharded parameters, and return them.

    If it keeps none, or stale ones, which are then let go, a gather is launched, and not waited
    for; the host may wait for `limiter`. Raises as the constructor of `Unsharded`.
    """
    if unit.kept is None or unit.kept.is_stale:
        unit.kept = Unsharded(unit)
    return unit.kept


class Lent:
    """Unsharded parameters of a unit that stay between forward and backward, to be read."""

    def __init__(self, whole: Unsharded) -> None:
        """Hold the tensors of `whole`, waiting for its gather, and the versions they had there."""
        self.tensors = dict(whole.tensors())
        self._versions = list(whole._versions)

    def check_unwritten(self) -> None:
        """Raise RuntimeError if one of them was written to, which would be lost."""
        written = _written(self.tensors, self._versions)
        if written:
            raise RuntimeError(
                f"parameters {written} were written to between forward and backward, where their "
                "unit keeps gathered copies: step the optimizer, and write to parameters, after "
                "backward"
            )


def _written(tensors: dict[ShardedParam, Tensor], versions: list[int]) -> list[str]:
    """Names of the parameters whose tensors were written to since they had `versions`.

    A tensor that is the shard itself, where there is one and no cast, is not among them.

    versions: in the order of `tensors`; where the list ends, nothing is compared.
    """
    return [
        param.name
        for (param, tensor), version in zip(tensors.items(), versions, strict=False)
        if tensor._version != version and tensor.data_ptr() != param.shard.data_ptr()
    ]


def _on_device(param: ShardedParam) -> Tensor:
    """Return the shard of `param` on the device where it is gathered.

    That is a copy if the shard lives elsewhere; from pinned memory the host does not wait for it.
    """
    return param.shard.to(param.device, non_blocking=True)
