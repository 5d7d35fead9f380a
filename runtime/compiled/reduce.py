"""Reduces of compiled graphs, with the user's settings of units.

Compiled code launches a bucket, goes on to its all-reduce, and waits for it, as
planned. Mostly that is one collective, and there is no setting to follow. If a unit of the
bucket has hooks, a number to divide by, or gradients that wait, each unit's gradients are a
`Reduction` as in the eager runtime, taken through the same three steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir import ops
from autoshard.passes.ir.layout import Member, read_members
from autoshard.runtime.unit import reduce, uses
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.reduce import Reduction
from autoshard.runtime.unit.unit import Unit


def is_plain(owners: Sequence[ShardedParam]) -> bool:
    """Tell whether gradients of `owners`, a bucket's, are all reduced now, together, to their mean.

    They are not if a setting of the user's says otherwise for one of their units, if sums of one
    wait for a later all-reduce, or if a gradient has to wait for another use of its parameter in
    this backward.
    """
    units = {owner.unit for owner in owners}
    if not all(unit.reducer.is_plain for unit in units):
        return False
    return not (any(map(uses.may_repeat, units)) and any(map(_comes_again, owners)))


def _comes_again(owner: ShardedParam) -> bool:
    """Tell whether another use of `owner` than the one whose code runs now is still to come.

    That is, whether the running backward will bring a further gradient of `owner`.
    """
    return uses.num_to_come(owner) > 1


def add_pending(owners: Sequence[ShardedParam], grads: list[Tensor], dtype: torch.dtype) -> None:
    """Add to each of `grads` those of its owner that came before: the list is changed.

    They are taken out of the owner: those of this backward (`arriving`), and of earlier ones
    (`pending`). The latter are only added to a gradient that goes to `.grad`, and dropped if that
    was emptied or zeroed since. What a broken-off backward has left in `arriving` is dropped, too.

    owners: the parameter of each gradient; empty: nothing is added. dtype: in which sums are made.
    Raises RuntimeError if `.grad` was written to otherwise since a gradient began to wait.
    """
    for index, owner in enumerate(owners):
        if owner.arriving is not None:
            joined = reduce.take_arrived(owner, grads[index], dtype)
            assert joined is not None
            grads[index] = joined
        if owner.pending is not None and _is_accumulated(owner):
            total = reduce.take_pending(owner, grads[index], dtype)
            assert total is not None
            grads[index] = total


def hold(
    owner: ShardedParam, grad: Tensor | None, members: str, group: str, *, like: Tensor
) -> Tensor:
    """Let `grad` of `owner` wait for a later backward. Returns a shard of zeros in its place.

    Sets `is_withheld` of `owner`, so that these zeros don't go to `.grad`; if that is empty, others
    are put there, to stand for the gradient that waits. If `torch.autograd.grad` asks for it, it
    does not wait: it is reduced, which is waited for, and its shard returned. A gradient that the
    running backward is not to accumulate is dropped.

    grad: unsharded; None if this rank has none.
    members, group: as of the op `hold_grad`.
    like: a tensor on the device of gradients.
    Raises NotImplementedError for `torch.autograd.grad` with `strict_order=False`; RuntimeError if
    a gradient is to wait, with `strict_order=True`, and a parameter of the unit has a
    post-accumulate-grad hook, or if `.grad` was written to since one began to wait.
    """
    (member,) = read_members(members)
    if _is_handed_out(owner):
        owner.unit.check_may_return()
        reductions = UnitReductions([grad], [owner], member.dtype)
        return reductions.wait(like, members, group)[0]
    if _is_accumulated(owner):
        if not owner.unit.is_unordered:  # else it waits for the end of this backward alone
            owner.unit.check_may_wait()
        _hold(owner, grad, member.dtype)
    owner.is_withheld = True
    return ops.nothing(like, members, group)[0]


def _hold(owner: ShardedParam, grad: Tensor | None, dtype: torch.dtype) -> None:
    """Let `grad` wait for a later backward, or for further gradients of `owner` in this one.

    It is copied, or added to those that wait already, in `dtype`. None adds nothing; but with the
    last of this backward, those that came before in it go on to wait for a later one. An empty
    `.grad` gets zeros for one that waits for a later backward; if `.grad` was emptied or zeroed
    since others began to wait, they are dropped. Raises RuntimeError for other writes to `.grad`.
    """
    if _comes_again(owner):
        if grad is not None:
            reduce.arrive(owner, grad, dtype, is_borrowed=True)
        return
    has_arrived = owner.arriving is not None
    grad = reduce.take_arrived(owner, grad, dtype)
    if grad is not None:
        reduce.hold(owner, grad, dtype, is_borrowed=not has_arrived)


@dataclass(frozen=True)
class Flags:
    """Flags of a bucket: which gradients this rank really has, of those that some backwards lack.

    They travel as the bucket's last member, a number each, summed like the rest; see
    [Note: gradients that are not there] in unit/reduce.py.

    owners:   parameters that have a flag: those whose gradient comes from some outputs only.
    has_grad: whether this rank has a gradient of each.
    """

    owners: tuple[ShardedParam, ...]
    has_grad: tuple[bool, ...]

    @staticmethod
    def of(
        owners: Sequence[ShardedParam], sources: Sequence[Collection[int]], has: Sequence[bool]
    ) -> Flags:
        """Make flags for those `owners` whose gradient comes from some of forward's outputs only.

        sources: for each owner, numbers of these outputs; empty if it comes from all.
        has: for each owner, whether the running backward has a gradient of one of them. A gradient
            that waits counts, too.
        """
        pairs = [
            (owner, is_there or _has_before(owner))
            for owner, each, is_there in zip(owners, sources, has, strict=True)
            if each
        ]
        return Flags(tuple(owner for owner, _ in pairs), tuple(is_there for _, is_there in pairs))

    def member(self, dtype: torch.dtype, shards: int) -> Member:
        """Member for all flags, once for each of the `shards` ranks that sums go to."""
        return Member(dtype, (len(self.owners) * shards,))

    def tensor(self, dtype: torch.dtype, device: torch.device, shards: int) -> Tensor:
        return reduce.flags_of(self.has_grad, dtype, device, shards)

    def withhold(self, sums: Tensor) -> None:
        """Set `is_withheld` of each owner: whether no rank has a gradient for it.

        sums: the flags, summed over ranks. They are read only where this rank has no gradient
            itself: otherwise the host need not wait for a device.
        """
        for owner, is_there, anywhere in zip(
            self.owners, self.has_grad, sums.unbind(), strict=True
        ):
            owner.is_withheld = not is_there and anywhere.item() == 0


def _has_before(owner: ShardedParam) -> bool:
    """Tell whether a gradient of `owner` waits, of this backward or of one that reduced nothing."""
    return reduce.arrived(owner) is not None or reduce.pending_of(owner) is not None


class UnitReductions:
    """Reductions of one bucket's gradients, unit by unit, launched as this is made.

    Gradients that are not to be reduced now are kept to wait instead, or dropped if the running
    backward is not to accumulate them. Making this raises RuntimeError if a unit lets gradients
    wait that has post-accumulate-grad hooks.

    grads:  unsharded, None where this rank has none.
    owners: the parameter of each.
    dtype:  in which they are summed.
    """

    def __init__(
        self,
        grads: Sequence[Tensor | None],
        owners: Sequence[ShardedParam],
        dtype: torch.dtype,
    ) -> None:
        """Launch the reduces of `grads`, one a unit, as the user's settings and this backward ask.

        Gradients that came before and wait are added. Where the unit doesn't sync, or another use
        of the parameter is still to bring a gradient, nothing is launched: gradients are kept to
        wait (`_hold`), or dropped if the backward is not to accumulate them. Gradients that
        `torch.autograd.grad` asks for are reduced in any case, by themselves. A user's `comm_hook`
        runs to its end here; where parameters are not cut, the all-reduce is launched, too.
        Raises RuntimeError if a unit lets gradients wait and has post-accumulate-grad hooks, or if
        `.grad` was written to since a gradient began to wait.
        """
        self._owners = owners
        self._reductions: list[Reduction] = []
        by_unit: dict[tuple[Unit, bool], dict[ShardedParam, Tensor | None]] = {}
        for owner, grad in zip(owners, grads, strict=True):
            by_unit.setdefault((owner.unit, _is_handed_out(owner)), {})[owner] = grad
        for (unit, handed_out), theirs in by_unit.items():
            waiting = {} if handed_out else self._to_wait(unit, theirs)
            for owner, whole in waiting.items():
                if _is_accumulated(owner):
                    _hold(owner, whole, dtype)
            left = {owner: grad for owner, grad in theirs.items() if owner not in waiting}
            if left:
                self._launch(unit, left, dtype, handed_out=handed_out)

    @staticmethod
    def _to_wait(
        unit: Unit, grads: dict[ShardedParam, Tensor | None]
    ) -> dict[ShardedParam, Tensor | None]:
        """Select those of `grads`, of `unit`, that are not reduced now.

        That is all if the unit doesn't sync; RuntimeError if it has post-accumulate-grad hooks.
        Else it is those whose parameter has another gradient to come in this backward.
        """
        if not unit.reducer.syncs:
            unit.check_may_wait()  # told to wait after forward
            return grads
        if not uses.may_repeat(unit):
            return {}
        return {owner: grad for owner, grad in grads.items() if _comes_again(owner)}

    def _launch(
        self,
        unit: Unit,
        grads: dict[ShardedParam, Tensor | None],
        dtype: torch.dtype,
        *,
        handed_out: bool,
    ) -> None:
        """Launch the reduction of `grads`, with those that came before added; `wait` waits for it.

        Gradients that the backward is not to accumulate are sent all the same, for nothing. A
        user's `comm_hook` runs to its end here, and where parameters are not cut the all-reduce is
        launched, too. Changes `grads`: the sums are put there.
        handed_out: whether they go to `torch.autograd.grad`: then nothing is added.
        """
        wanted = {owner for owner in grads if handed_out or _is_accumulated(owner)}
        if not handed_out:
            for owner in wanted:
                grads[owner] = reduce.take_arrived(owner, grads[owner], dtype)
                grads[owner] = reduce.take_pending(owner, grads[owner], dtype)
        reduction = Reduction(unit, grads, wanted, dtype, stands_alone=handed_out)
        reduction.launch()
        self._reductions.append(reduction)

    def advance(self) -> None:
        """Go on to the all-reduces, if there are replicas; or leave sums for a later all-reduce.

        Waits for the reduce-scatters then: on a CPU the host, else the stream for all-reduces.
        """
        for reduction in self._reductions:
            reduction.advance()

    def wait(self, like: Tensor, members: str, group: str) -> list[Tensor]:
        """Wait, and return this rank's parts of the gradients, one for each owner, in order.

        They have the dtype and the device that `members` say. Where a gradient still waits, or no
        rank has one, it is zeros, and `is_withheld` of its parameter is set. They are contiguous: a
        compiler may count on the strides of what a graph waits for. All-reduces still to come are
        launched first, and users' `all_reduce_hook`s run. The host waits for a device only if this
        rank lacks a gradient. To be called once.

        members, group: of the bucket. like: a tensor on the device of gradients.
        """
        parts: dict[ShardedParam, Tensor] = {}
        for reduction in self._reductions:
            parts.update(reduction.wait())
        shards = ops.nothing(like, members, group)
        for index, owner in enumerate(self._owners):
            if owner in parts:
                shards[index] = parts[owner].to(shards[index])  # its dtype, and where it is to be
            else:
                shards[index] = shards[index].contiguous()
                owner.is_withheld = True
        return shards


def _is_handed_out(owner: ShardedParam) -> bool:
    """Tell whether the running backward is a `torch.autograd.grad`, which leaves `.grad` alone."""
    return _torch.autograd.in_backward() and _torch.autograd.returns_gradient(_leaf(owner))


def _is_accumulated(owner: ShardedParam) -> bool:
    """Tell whether the running backward will fill `.grad` of `owner`, or none is running.

    It does not if `owner` is none of the inputs that the backward was given.
    """
    return not _torch.autograd.in_backward() or _torch.autograd.accumulates_gradient(_leaf(owner))


def _leaf(owner: ShardedParam) -> object:
    return torch.autograd.graph.get_gradient_edge(owner.param).node
