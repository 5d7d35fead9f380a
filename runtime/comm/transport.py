"""Transport of gathers and reduces: by torch's collectives, or by sends and receives.

gloo's all-gather copies what it has received once more, and its reduce-scatter copies what it
sends, sums all of it on every rank, and keeps a part (torch 2.11 to 2.15). Among few ranks, pieces
are sent from where they lie to where they are wanted instead, so that large members of a bucket
need not be packed. Reduces are done so between two ranks only, as the order of two summands doesn't
matter. Sums over more ranks are left to gloo, so that they equal those of other code that uses it.
With AUTOSHARD_MESSAGES=0 everything is left to gloo's collectives.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.layout import Member
from autoshard.runtime.comm import observed

# Tags of messages: users' own are mostly small. Each has a number, and what it is a part of.
FIRST_TAG, NUMBERS, KINDS = 1 << 30, 1 << 14, 1 << 16
GATHER, REDUCE = 1, 2
VARIABLE = "AUTOSHARD_MESSAGES"
FEW = 8  # ranks, each of which has a connection to each other one
LEAST = 1 << 16  # bytes of a whole parameter: packing a smaller one is faster than one message more


class Work(Protocol):
    """Collective that was launched, to be waited for."""

    def wait(self) -> object: ...


def sends_members(group: str, device: torch.device) -> bool:
    """Tell whether gathers over `group` are messages: those of gloo on CPUs, among few ranks.

    Nothing is gained then by packing large members of a bucket. False for "", no group.
    """
    return bool(group) and _by_messages(_torch.dist.resolve_group(group), device)


def _by_messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether gathers over `group` are messages; see `sends_members`."""
    return (
        may_send()
        and group.size() <= FEW
        and device.type == "cpu"
        and _torch.dist.is_gloo(group, device)
    )


@functools.cache
def may_send() -> bool:
    """Tell whether messages may take the place of collectives, on any group; read once.

    They may unless the environment has AUTOSHARD_MESSAGES=0, which is for tools that look at
    collectives, and to have on a CPU what other devices have. All ranks must have the same: they
    compare it before a forward, but not with `strict_order=False`.
    Raises ValueError if the variable is neither 0 nor 1.
    """
    told = os.environ.get(VARIABLE, "1")
    if told not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={told!r}: expected 0, for collectives alone, or 1")
    return told == "1"


def sends_alone(member: Member, group: str, device: torch.device) -> bool:
    """Tell whether `member` is sent as a message of its own in a grouped gather over `group`.

    It is if it has LEAST bytes, unsharded, and if `sends_members`.
    """
    return member.num_bytes >= LEAST and sends_members(group, device)


def too_small(
    members: Sequence[Member], group: dist.ProcessGroup, device: torch.device
) -> tuple[int, ...]:
    """Positions of `members` that are better sent together in a grouped gather: none, or several.

    They have fewer than LEAST bytes each. None of them if it would be one alone, or where gathers
    are not messages, see `sends_members`.
    """
    if not _by_messages(group, device):
        return ()
    found = [number for number, member in enumerate(members) if member.num_bytes < LEAST]
    return tuple(found) if len(found) > 1 else ()


def swaps(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether a reduce over `group` is a `swap` and an addition.

    It is between two ranks, by gloo on a CPU.
    """
    return group.size() == 2 and _by_messages(group, device)


def averages(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Tell whether collectives over `group` divide sums by its size themselves; gloo's don't."""
    return device.type != "cpu" and not _torch.dist.is_gloo(group, device)


def gather(
    receive: Sequence[Tensor], send: Sequence[Tensor], group: dist.ProcessGroup
) -> list[Work]:
    """Begin to gather each tensor of `send` into the one of `receive` at the same position.

    receive: contiguous, with room for the pieces of all ranks in turn, along the first dim.
    send: this rank's piece, contiguous, which may lie in its place in `receive`.
    By messages where `sends_members`: this rank's own pieces are copied to their places at once.
    Else by torch's all-gathers, several of them in one call where the backend has such a call.
    Returns works, all of which have to be waited for; tensors must live until then.
    """
    if _by_messages(group, receive[0].device):
        return [_exchange_gather(receive, send, group)]
    if len(receive) == 1:
        work = _torch.dist.all_gather_flat(receive[0], send[0], group=group, async_op=True)
        return [work]
    return list(_torch.dist.all_gather_grouped(list(receive), list(send), group))


def reduce(
    receive: Tensor, send: Tensor, group: dist.ProcessGroup, *, is_mean: bool = False
) -> Work:
    """Begin a reduce-scatter: sum the ranks' `send`, each rank to get its part in `receive`.

    send, receive: both 1D and contiguous, without overlap; they must live, and not be written to,
        until the work has been waited for.
    is_mean: the sums are to be divided by the number of ranks; only if `averages`.
    If `swaps`, this is a message each way, and an addition at the wait, before which `receive` has
    no sums. For units, it is used then only where an all-reduce or its hook follows, which wants
    its input in one piece; `swap` is used elsewhere.
    """
    if swaps(group, send.device):
        here = group.rank()
        parts = send.view(2, -1)
        observed.show(observed.reduce_scatter_by_messages, [receive], [send])
        kind = hash((REDUCE, receive.nbytes))
        sends, receives = [(1 - here, parts[1 - here])], [(1 - here, receive)]
        return Exchange(group, kind, sends, receives, parts[here])
    work: Work = _torch.dist.reduce_scatter_flat(
        receive, send, op=_op(is_mean), group=group, async_op=True
    )
    return work


def all_reduce(sums: Tensor, group: dist.ProcessGroup, *, is_mean: bool = False) -> Work:
    """Begin to sum `sums` over `group`, in place. It must live until the work is waited for.

    is_mean: the sums are to be divided by the number of ranks; only if `averages`.
    """
    work: Work = dist.all_reduce(sums, op=_op(is_mean), group=group, async_op=True)
    return work


def _op(is_mean: bool) -> Any:
    return dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM


def bare_reduce(receive: Tensor, send: Tensor, group: dist.ProcessGroup) -> Work:
    """Begin a `reduce` for measuring; where `swaps`, only the two messages, without the addition.

    receive, send: as for `reduce`; in the second case the result is not the sum.
    """
    if swaps(group, send.device):
        return swap(receive, send[: receive.numel()], group)
    return reduce(receive, send, group)


def swap(receive: Tensor, send: Tensor, group: dist.ProcessGroup) -> Work:
    """Begin to send all of `send` to the other of two ranks, and to receive `receive` from it."""
    other = 1 - group.rank()
    observed.show(observed.reduce_scatter_by_messages, [receive], [send])
    return Exchange(group, hash((REDUCE, send.nbytes)), [(other, send)], [(other, receive)])


class Exchange:
    """Messages of one collective, launched when this is made.

    kind: a number, the same on all ranks, and another one for other sizes: messages of different
        kinds never meet. (gloo would end the process if one were longer than is expected.)
    sends, receives: (rank in the group, tensor). What one rank sends to another is matched by order
        with what the other receives from it.
    own: added, at the wait, to the first tensor of `receives`; None: nothing is.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        kind: int,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        own: Tensor | None = None,
    ) -> None:
        """Launch the messages, receives before sends; nothing is waited for.

        Messages and tensors are kept, by the group, until they have come and gone, even if this
        object is dropped without a wait. Raises as gloo does if one can't be launched.
        """
        self._own = own
        self._messages: _Messages | None = None
        self._channel = _channels.setdefault(group, _Channel())
        self._messages = self._channel.begin(group, kind, sends, receives)

    def wait(self) -> None:
        """Wait until all messages have come and gone, and add `own`. A second call does nothing.

        Ends messages of earlier exchanges that nobody waits for any more, too; see `_Channel.end`.
        Raises as gloo does if a message fails.
        """
        messages, self._messages = self._messages, None
        if messages is None:
            return
        messages.wait()
        if self._own is not None:
            messages.receives[0][1].add_(self._own)
        self._channel.end(messages)

    def __del__(self) -> None:
        """Leave messages that were not waited for to a later `wait` of the group."""
        if self._messages is not None:  # an exception came between launch and wait
            self._messages.is_abandoned = True


@dataclass(eq=False)
class _Messages:
    """Messages in flight: their tensors have to live until gloo is done, wanted or not.

    is_abandoned: nobody is going to wait for them, or a wait for them has failed.
    """

    receives: Sequence[tuple[int, Tensor]]
    sends: Sequence[tuple[int, Tensor]]
    works: list[Any]
    is_abandoned: bool = False

    def wait(self) -> None:
        """Wait for all messages; if one fails, raise, and mark them as abandoned."""
        try:
            for work in self.works:
                _torch.dist.wait_for_work(work)
        except BaseException:
            self.is_abandoned = True
            raise


class _Channel:
    """Exchanges of one group, numbered; the number of each is in the tag of its messages.

    So messages of an exchange that was abandoned are not taken for those of a later one.
    """

    def __init__(self) -> None:
        self._number = 0
        self._open: list[_Messages] = []

    def begin(
        self,
        group: dist.ProcessGroup,
        kind: int,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
    ) -> _Messages:
        """Launch messages under the next tag of `kind`. If that raises, they count as abandoned.

        They, and their tensors, are kept here until `end`.
        """
        tag = FIRST_TAG + self._number % NUMBERS * KINDS + kind % KINDS
        self._number += 1
        messages = _Messages(receives, sends, [])
        self._open.append(messages)
        try:
            for peer, tensor in receives:
                messages.works.append(group.recv([tensor], peer, tag))
            for peer, tensor in sends:
                messages.works.append(group.send([tensor], peer, tag))
        except BaseException:
            messages.is_abandoned = True
            raise
        return messages

    def end(self, messages: _Messages) -> None:
        """Note that `messages` have come and gone; end those begun before them and abandoned, too.

        They are waited for, which takes no long time, as other ranks began them before `messages`;
        a RuntimeError of theirs is passed over. Those begun later, and those that somebody is still
        to wait for, stay open.
        """
        at = self._open.index(messages)
        for each in self._open[:at]:
            if each.is_abandoned:
                with contextlib.suppress(RuntimeError):  # it failed; whoever began it was told
                    each.wait()
        self._open[: at + 1] = [each for each in self._open[:at] if not each.is_abandoned]


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, _Channel] = weakref.WeakKeyDictionary()


def _exchange_gather(
    receive: Sequence[Tensor], send: Sequence[Tensor], group: dist.ProcessGroup
) -> Exchange:
    """Begin a gather by messages: each rank sends its pieces to all others.

    This rank's own are copied to their places in `receive` at once, unless they lie there. Nothing
    is sent for a piece without elements.
    """
    world, here = group.size(), group.rank()
    peers = [(here + distance) % world for distance in range(1, world)]
    wholes = [(whole.view(world, -1), part) for whole, part in zip(receive, send, strict=True)]
    wholes = [pair for pair in wholes if pair[1].numel()]
    receives = [(peer, whole[peer]) for peer in peers for whole, _ in wholes]
    sends = [(peer, part) for peer in reversed(peers) for _, part in wholes]
    observed.show(observed.all_gather_by_messages, receive, send)
    kind = hash((GATHER, *(part.nbytes for _, part in wholes)))  # of ints: alike on all ranks
    exchange = Exchange(group, kind, sends, receives)
    for whole, part in wholes:
        if whole[here].data_ptr() != part.data_ptr():
            whole[here].copy_(part.view(-1))
    return exchange
