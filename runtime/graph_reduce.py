"""Reduces of compiled graphs, where the user's settings of a unit have a say.

Compiled code launches a bucket, goes on to its all-reduce, and waits for it, as
planned. Mostly that is one collective, and nothing to ask. Where a unit of the bucket has
hooks, a number to divide by, or gradients that wait, each unit's are a `Reduction` as in
the eager runtime, taken through the same three steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes import ops
from autoshard.passes.layout import read_members
from autoshard.runtime import reduce
from autoshard.runtime.param import ShardedParam
from autoshard.runtime.reduce import Reduction
from autoshard.runtime.unit import Unit


def is_plain(owners: Sequence[ShardedParam]) -> bool:
    """Whether no user's setting concerns the reduce of these parameters."""
    return all(unit.reducer.is_plain for unit in {owner.unit for owner in owners})


def add_pending(owners: Sequence[ShardedParam], grads: list[Tensor], dtype: torch.dtype) -> None:
    """To each of `grads` that `.grad` will get, add what waited for it."""
    for index, owner in enumerate(owners):
        if owner.pending is not None and _is_accumulated(owner):
            total = reduce.take_pending(owner, grads[index], dtype)
            assert total is not None
            grads[index] = total


def hold(owner: ShardedParam, grad: Tensor, members: str, group: str) -> Tensor:
    """Let `grad` wait. Returns what stands for its shard: nothing, or what was asked for
    by `torch.autograd.grad`, which does not wait.

    Raises RuntimeError if the parameter has hooks for after its gradient is accumulated.
    """
    (member,) = read_members(members)
    if _is_handed_out(owner):
        reductions = UnitReductions([grad], [owner], member.dtype)
        return reductions.wait(grad, members, group)[0]
    if _is_accumulated(owner):
        owner.unit.check_may_wait()
        reduce.hold(owner, grad, member.dtype, is_borrowed=True)
    owner.is_withheld = True
    return ops.nothing(grad, members, group)[0]


class UnitReductions:
    """The gradients of one bucket on their way, unit by unit."""

    def __init__(
        self, grads: Sequence[Tensor], owners: Sequence[ShardedParam], dtype: torch.dtype
    ) -> None:
        self._owners = owners
        self._reductions: list[Reduction] = []
        by_unit: dict[tuple[Unit, bool], dict[ShardedParam, Tensor | None]] = {}
        for owner, grad in zip(owners, grads, strict=True):
            by_unit.setdefault((owner.unit, _is_handed_out(owner)), {})[owner] = grad
        for (unit, handed_out), theirs in by_unit.items():
            if handed_out or unit.reducer.syncs:
                self._launch(unit, theirs, dtype, handed_out=handed_out)
                continue
            unit.check_may_wait()  # told to wait after forward
            for owner, whole in theirs.items():
                if whole is not None and _is_accumulated(owner):
                    reduce.hold(owner, whole, dtype, is_borrowed=True)

    def _launch(
        self,
        unit: Unit,
        grads: dict[ShardedParam, Tensor | None],
        dtype: torch.dtype,
        *,
        handed_out: bool,
    ) -> None:
        wanted = {owner for owner in grads if handed_out or _is_accumulated(owner)}
        if not handed_out:
            for owner in wanted:
                grads[owner] = reduce.take_pending(owner, grads[owner], dtype)
        reduction = Reduction(unit, grads, wanted, dtype, stands_alone=handed_out)
        reduction.launch()
        self._reductions.append(reduction)

    def advance(self) -> None:
        """Go on to the all-reduces, if there are to be any."""
        for reduction in self._reductions:
            reduction.advance()

    def abandon(self) -> None:
        """Wait for what is on its way, which nobody wants any more."""
        for reduction in self._reductions:
            reduction.abandon()

    def wait(self, like: Tensor, members: str, group: str) -> list[Tensor]:
        """This rank's parts of the gradients; of those that wait still, zeros: a compiler may
        count on the strides of what a graph waits for.
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
    """Whether the running backward is a `torch.autograd.grad`: `.grad` is none of its business."""
    return _torch.in_backward() and _torch.returns_gradient(_leaf(owner))


def _is_accumulated(owner: ShardedParam) -> bool:
    """Whether `.grad` will get what the running backward finds for it; not if it is none of the
    inputs that backward was told of."""
    return not _torch.in_backward() or _torch.accumulates_gradient(_leaf(owner))


def _leaf(owner: ShardedParam) -> object:
    return torch.autograd.graph.get_gradient_edge(owner.param).node
