"""Launch and wait: the only code that issues gathers and reduces; others decide which and when.

Both the eager runtime and the compiled graphs move bytes through these
functions, so their results can only agree.

    gather:  shards -> one send buffer -> all-gather -> copied out to unsharded parameters
    grouped: shards -> all-gathers in one call, or messages (tiny members share one) -> parameters
    reduce:  gradients -> one send buffer -> reduce-scatter [-> all-reduce] -> per shard
    swap:    between two ranks: each packs only the other's part, and adds what comes to its own

`packing.py` says how members lie in the buffers, `flights.py` what is kept until a wait. Of the
axes (shard, replicate) of a mesh, reduce-scatter goes over the first and all-reduce over the
second; over an axis of size 1, or none, nothing is sent.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from autoshard import _torch
from autoshard.runtime.comm import custom_comms, packing, transport
from autoshard.runtime.comm.custom_comms import Comm
from autoshard.runtime.comm.flights import GroupedFlight, InFlight, Issued, launch, num_launched
from autoshard.runtime.comm.mesh import Axes
from autoshard.runtime.comm.packing import BucketLayout, bucket_layout
from autoshard.runtime.comm.transport import Work


def launch_gather(
    shards: list[Tensor],
    layout: BucketLayout,
    group: str,
    *,
    copies: bool = False,
    bucket: int | None = None,
    comm: Comm | None = None,
) -> InFlight:
    """Start gathering the members of `layout` over `group`, from this rank's `shards`.

    Tells observers first. Raises RuntimeError, naming the collective, if its launch fails.
    A group of one rank launches, too. Shards of another dtype are cast. Only a single shard that is
    a full chunk of the right dtype is sent from where it lies; others are copied to a send buffer.
    shards: one for each member, (local rows, *rest).
    layout: over the ranks of `group`, as this one sees it.
    copies: whether to copy in any case, as a shard that may be written to before the wait needs.
    bucket: number of the bucket in its graph, for messages.
    comm: the unit's own all-gather, if it has one: it allocates the buffer that is received into,
        a part of which is sent, so that shards are always copied; the result `is_lent`.
    """
    process_group = _torch.dist.resolve_group(group)
    issued = _gather_of(shards, layout, group, bucket)
    begin = transport.gather if comm is None else functools.partial(custom_comms.gather, comm)
    copies |= comm is not None
    with _section("launch_gather", group):
        send, receive = packing.pack_shards(shards, layout, copies=copies, comm=comm)
        (work,) = launch(issued, begin, [receive], [send], process_group)
    number = num_launched(group)
    is_lent = comm is not None
    return InFlight(issued, work, send, receive, layout, is_lent=is_lent, number=number)


def _gather_of(
    shards: list[Tensor], layout: BucketLayout, group: str, bucket: int | None
) -> Issued:
    addresses = tuple(each.data_ptr() for each in shards)
    return Issued("gather", layout.members, group, bucket, addresses)


def launch_grouped_gather(
    shards: list[Tensor],
    layout: BucketLayout,
    group: str,
    *,
    copies: bool = False,
    bucket: int | None = None,
) -> GroupedFlight:
    """Start gathering as `launch_gather` does, but each member into a tensor of its own.

    For observers it is one collective. Only shards that can't be sent from where they lie are
    copied: of another dtype, of fewer rows than a full chunk, or if `copies`. Members that are
    `transport.too_small` share one buffer.
    """
    process_group = _torch.dist.resolve_group(group)
    issued = _gather_of(shards, layout, group, bucket)
    together = transport.too_small(layout.members, process_group, shards[0].device)
    with _section("launch_grouped_gather", group):
        alone = [number for number in range(len(shards)) if number not in together]
        send, receive = packing.pack_each(
            [shards[number] for number in alone],
            _part_of(layout, alone) if together else layout,
            copies=copies,
        )
        if together:
            shared = [shards[number] for number in together]
            packed = packing.pack_shards(shared, _part_of(layout, together), copies=copies)
            send.append(packed[0])
            receive.append(packed[1])
        works = launch(issued, transport.gather, receive, send, process_group)
    return GroupedFlight(issued, works, send, receive, layout, together, num_launched(group))


def _part_of(layout: BucketLayout, numbers: Sequence[int]) -> BucketLayout:
    """Lay out those members of a bucket that have these `numbers`, which may be none."""
    members = tuple(layout.members[number] for number in numbers)
    return bucket_layout(members, layout.world, layout.rank)


def wait_gather(flight: InFlight | GroupedFlight) -> list[Tensor]:
    """Wait for a gather, and return the unsharded parameters, in the order of the members.

    Each has its true size, without padding, and is contiguous in a storage of its own. A scalar has
    the first rank's value. To be called once for a `flight`: it takes the tensors out of a
    `GroupedFlight`. Tells observers, and raises, as `wait_for`.
    """
    with _section("wait_gather", flight.issued.group):
        flight.wait()
        if isinstance(flight, GroupedFlight):
            rooms = _in_order(flight)
        elif flight.is_lent and len(flight.layout.members) == 1:
            rooms = [flight.receive.clone()]
        else:
            rooms = packing.split_gathered(flight.receive, flight.layout)
        return packing.unsharded(rooms, flight.layout)


def _in_order(flight: GroupedFlight) -> list[Tensor]:
    """Return what was gathered, a room for each member, in the order of the members.

    That is `flight.receive` itself. Where members share a tensor it is a new list, and `receive` is
    emptied.
    """
    if not flight.together:
        return flight.receive
    shared = _part_of(flight.layout, flight.together)
    parted = iter(packing.split_gathered(flight.receive.pop(), shared))
    alone = iter(flight.receive)
    numbers = range(len(flight.layout.members))
    found = [next(parted if number in flight.together else alone) for number in numbers]
    flight.receive.clear()  # they are freed one by one
    return found


def pack_grads(
    grads: list[Tensor],
    layout: BucketLayout,
    group: str,
    *,
    divisor: float = 1.0,
    is_mean: bool = False,
    is_last: bool = False,
    bucket: int | None = None,
    names: Sequence[str] = (),
    flags: Any = None,
    comm: Comm | None = None,
) -> InFlight:
    """Copy `grads`, cast, to the buffer that `launch_reduce` sends; launch nothing.

    Returns an `InFlight` without `work`.
    grads: unsharded, one for each member; the list is emptied, so that they are freed once they are
        copied.
    layout: over the ranks of `group`, as this one sees it.
    group: of the reduce-scatter; "" if parameters are not cut: then nothing is to be sent, and this
        rank's part is all of it.
    divisor: what the sums are divided by in the end, by `split_reduced`, or in part here, before
        they are summed; see `packing.division`.
    is_mean: whether `divisor` is the number of all ranks whose gradients are summed, and the
        collectives may divide in its place, if `transport.averages`. In no case may they divide
        sums of float16, which are divided in two steps (`packing.division`), nor may a `comm`.
    is_last: whether no all-reduce follows. Then, if `transport.swaps`, and without a `comm`, only
        the other rank's part is packed to be sent; this rank's part waits in `own`.
    bucket, names: number of the bucket in its graph, and names of the parameters, for messages.
    flags: kept in the result for whoever waits for it.
    comm: the unit's own reduce-scatter, if it has one, which allocates the buffer unless `group` is
        ""; `launch_reduce` needs the same.
    """
    swaps = averages = False
    if group:
        process_group = _torch.dist.resolve_group(group)
        may_average = is_mean and comm is None and layout.dtype != torch.float16
        averages = may_average and transport.averages(process_group, grads[0].device)
        swaps = comm is None and is_last and transport.swaps(process_group, grads[0].device)
    issued = Issued("reduce", layout.members, group, bucket, tuple(names))
    own = None
    divides = packing.division(1.0 if averages else divisor, layout.dtype, is_free=swaps)
    with _section("pack_grads", group):
        if swaps:
            send = packing.pack_part(grads, layout, 1 - layout.rank, divides.before)
            own = packing.own_parts(grads, layout, divides.before)
        else:
            send = packing.pack_grads(grads, layout, divides.before, comm if group else None)
        grads.clear()
    return InFlight(issued, None, send, send, layout, own, averages, divides.after, flags)


def launch_reduce(packed: InFlight, comm: Comm | None = None) -> InFlight:
    """Start the reduce-scatter of `packed`: each rank is to get its own part of the group's sums.

    Returns a copy of `packed` with the `work` to wait for; or `packed` itself if the group has one
    rank: nothing is sent, nobody told. Observers are told first. The sums are averages already if
    `packed.averages`; those of a swap (`packed.own`) are only added up by `split_reduced`.
    packed: from `pack_grads`.
    comm: the one that `pack_grads` was given; it allocates what is received into.
    Raises RuntimeError, naming the collective, if its launch fails.
    """
    issued, send = packed.issued, packed.send
    if packed.layout.world == 1:
        return packed
    with _section("launch_reduce", issued.group):
        process_group = _torch.dist.resolve_group(issued.group)
        work: Work
        if packed.own is None:
            receive = custom_comms.buffer(comm, packed.layout.chunk, send, send.dtype)
            begin = functools.partial(transport.reduce, is_mean=packed.averages)
            if comm is not None:
                begin = functools.partial(custom_comms.reduce, comm)
            work = launch(issued, begin, receive, send, process_group)
        else:
            receive = torch.empty_like(send)
            work = launch(issued, transport.swap, receive, send, process_group)
    return packed.but(work=work, receive=receive, number=num_launched(issued.group))


def launch_all_reduce(reduced: InFlight, group: str) -> InFlight:
    """Start summing, over `group` and in place, this rank's part of `reduced`.

    Averages instead if `reduced.averages`. Tells observers first. Returns a copy with the `work` to
    wait for, whose `issued` is the all-reduce. A group of one rank launches, too.
    reduced: a reduce-scatter that has been waited for.
    Raises RuntimeError, naming the collective, if its launch fails.
    """
    issued = replace(reduced.issued, kind="all_reduce", group=group)
    process_group = _torch.dist.resolve_group(group)
    with _section("launch_all_reduce", group):
        begin = functools.partial(transport.all_reduce, is_mean=reduced.averages)
        work = launch(issued, begin, reduced.receive, process_group)
    number = num_launched(group)
    return reduced.but(issued=issued, work=work, send=reduced.receive, number=number)


def run_hook(
    grads: list[Tensor],
    layout: BucketLayout,
    axes: Axes,
    comm_hook: tuple[Any, Callable[..., Any]],
) -> InFlight:
    """Have the user's hook sum and divide `grads` at once: nothing is left to wait for.

    Observers are not told. Returns an `InFlight` without `work`, with what the hook wrote. All runs
    in the caller's grad mode.
    grads: unsharded, one for each member; packed, cast and undivided, into one buffer. The list is
        emptied.
    layout: over the ranks that share the shards of `axes`, as this one sees it.
    comm_hook: (state, hook). Called as `hook(state, buffer, part)`, to fill `part`, this rank's;
        or, if parameters are not cut, as `hook(state, buffer)`, to change the buffer in place.
    """
    state, hook = comm_hook
    send = packing.pack_grads(grads, layout, 1.0)
    grads.clear()
    receive = send if layout.world == 1 else send.new_empty(layout.chunk)
    if layout.world == 1:
        hook(state, send)
    else:
        hook(state, send, receive)
    issued = Issued("reduce", layout.members, axes.shard_group)
    return InFlight(issued, None, send, receive, layout)


def split_reduced(flight: InFlight, *, copies: bool = True) -> list[Tensor]:
    """Return this rank's parts of the summed gradients, divided, in the order of the members.

    A part has the size of the member's shard, without padding. It has the dtype in which it was
    summed, or the member's `shard_dtype` if it has one.
    flight: a reduce-scatter, or the all-reduce after it, that has been waited for. To be called
        once: the sums of a swap are finished here, in place.
    copies: whether each part has to have a storage of its own, as where the buffer is a user's.
        Otherwise they may share the buffer, which is divided in place; each counts its own version.
    """
    layout = flight.layout
    with _section("split_reduced", flight.issued.group):
        parts = packing.split_pieces(flight.receive, layout)
        if flight.own is not None:
            torch._foreach_add_(flight.own, parts)
            parts = flight.own
            if flight.after != 1.0:
                torch._foreach_div_(parts, flight.after)
        elif copies:
            parts = list(torch._foreach_div(parts, flight.after))
        else:
            if flight.after != 1.0:
                flight.receive.div_(flight.after)
            parts = [part.data for part in parts]
        if any(member.shard_dtype for member in layout.members):
            pairs = zip(parts, layout.members, strict=True)
            parts = [part.to(member.shard_dtype or part.dtype) for part, member in pairs]
        return parts


def _section(what: str, group: str) -> contextlib.AbstractContextManager[object]:
    """Run a section of code without gradients; a profile shows it as "autoshard::what group"."""
    if _torch.autograd.is_profiled():
        return _shown(f"autoshard::{what} {group}")
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _shown(name: str) -> Iterator[None]:
    with record_function(name), torch.no_grad():
        yield
