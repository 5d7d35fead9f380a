"""Reduction of a unit's gradients, unsharded, once backward has the last of them.

    unsharded gradients --launch--> in flight --advance--> in flight --wait--> mean, `.grad`
                        reduce-scatter         all-reduce
                        over `shard`           over `replicate`

[Note: gradients that are not there]
All trainable parameters of a unit are sent, whichever of them got a gradient on this
rank: another rank may have used others (experts do so), and what is sent must match.
Zeros stand for a gradient that is not there, and one number a parameter, summed with
the rest, tells whether any rank had one. Where none had, `.grad` stays as it is. A rank
looks at these numbers only if it lacks a gradient itself: it need not wait for a device.

[Note: gradients that wait]
A backward that is not to be reduced (all microbatches but the last) leaves its unsharded
gradients in `ShardedParam.pending`, summed in the dtype of the reduce. They are not in
`.grad`, so that `zero_grad()` would miss them. Hence `.grad` is watched: zeros are put
there if it was empty, and code that empties it, or zeroes it, drops what is pending. Sums that
wait for their all-reduce alone (`Reducer.partial`) are watched alike. Zeroing by foreach
kernels, which count no version, is not seen; torch's optimizers empty it unless configured not to.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoshard import _torch
from autoshard.passes.ir.layout import Member
from autoshard.runtime.comm import collectives
from autoshard.runtime.comm.copies import Copies, launch_store
from autoshard.runtime.comm.custom_comms import Comm
from autoshard.runtime.comm.flights import InFlight
from autoshard.runtime.comm.packing import bucket_layout
from autoshard.runtime.comm.streams import is_captured, on_all_reduce_stream
from autoshard.runtime.unit.policies import CPUOffloadPolicy

if TYPE_CHECKING:
    from autoshard.runtime.unit.param import ShardedParam
    from autoshard.runtime.unit.unit import Unit

MAX_IN_FLIGHT = 1  # sent while the next unit's backward computes; more only holds memory
MAX_WITH_REPLICAS = 2  # one all-reduced beside the next one's reduce-scatter


@dataclass
class Reducer:
    """Settings of how a unit's gradients are reduced, made by the methods of `ShardedModule`.

    syncs: False lets gradients wait unsharded; see [Note: gradients that wait].
    all_reduces: False, where there are replicas, stops after the reduce-scatter, and adds its
        results up in `partial`.
    divide_by: what the sum is divided by; None: the number of ranks.
    only_sums: collectives sum, and divide nothing, also where they could.
    sends_unused: parameters without a gradient on any rank get one of zeros.
    in_flight: how many reduces may be in flight at most, with the one that is being launched; None:
        MAX_IN_FLIGHT, or MAX_WITH_REPLICAS.
    all_reduce_hook: called with this rank's part of mean gradients of the unit, 1-D, to change it
        in place; once for each dtype in which they are reduced.
    comm_hook: (state, hook), in place of the collectives and of all division:
        `hook(state, grad, part)` fills `part`, 1-D, from `grad`, 1-D of all ranks' parts; where
        parameters are not cut, `hook(state, grad)` works in place.
    reduce_scatter: the user's reduce-scatter; None: ours.
    scatter_group: the name of a group for reduce-scatters alone; "" for the group of gathers.
    partial: sums that are reduce-scattered and wait to be all-reduced; like gradients that wait
        unsharded, they are dropped if `.grad` is emptied meanwhile. By parameter, as another
        backward may reduce others together.
    """

    syncs: bool = True
    all_reduces: bool = True
    divide_by: float | None = None
    only_sums: bool = False
    sends_unused: bool = False
    in_flight: int | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    comm_hook: tuple[Any, Callable[..., Any]] | None = None
    reduce_scatter: Comm | None = None
    scatter_group: str = ""
    partial: dict[ShardedParam, Partial] = field(default_factory=dict)

    @property
    def is_custom(self) -> bool:
        """Tell whether a reduce gives something else than the mean, or is not ours."""
        told = self.divide_by, self.all_reduce_hook, self.comm_hook, self.reduce_scatter
        return any(each is not None for each in told)

    @property
    def is_plain(self) -> bool:
        """Tell whether a reduce launched now gives the mean over all ranks, by our collectives.

        It does not where gradients wait, unsharded or for their all-reduce, or if `is_custom`.
        Gradients that waited unsharded before may be added first.
        """
        return self.syncs and self.all_reduces and not (self.is_custom or self.partial)


@dataclass(frozen=True)
class Partial:
    """Reduce-scattered sum of one parameter's gradients, which waits for its all-reduce.

    chunk: this rank's part of it, flat, padded.
    count: one number, over 0 if one of the summed ranks had a gradient.
    seen: `.grad` when the sum began to wait.
    """

    chunk: Tensor
    count: Tensor
    seen: Seen


class Reduction:
    """Reduction of the gradients of some parameters of one unit, together, from launch to `.grad`.

    Its calls: `launch`, perhaps `advance`, then `wait`, or `accumulate`, perhaps after `store`. It
    may be dropped instead.
    grads: unsharded, None where this rank has none; see [Note: gradients that are not there].
    wanted: the parameters whose gradient is asked for; the others' are sent all the same.
    dtype: in which the gradients are summed.
    stands_alone: the result is handed out, as by `torch.autograd.grad`: sums of earlier backwards
        that wait in `Reducer.partial` are not added, and the all-reduce is not left for later.
    """

    def __init__(
        self,
        unit: Unit,
        grads: dict[ShardedParam, Tensor | None],
        wanted: set[ShardedParam],
        dtype: torch.dtype,
        *,
        stands_alone: bool = False,
    ) -> None:
        """Note what is to be reduced, and the unit's all-reduce hook of now; nothing is launched.

        `grads` is held, not copied, until the launch. Other settings of the unit's reduces are read
        later, when they are needed.
        """
        self._dtype = dtype
        self._stands_alone = stands_alone
        self._unit = unit
        self._reducer = unit.reducer
        self._grads: dict[ShardedParam, Tensor | None] = grads
        self._params = tuple(grads)
        self._has_grad = tuple(grad is not None for grad in grads.values())
        self._wanted = wanted
        self._flight: InFlight | None = None
        self._keep: list[object] = []
        self._left: Any = None  # event after which sums are left for a later all-reduce
        self._stored: tuple[list[ShardedParam], Copies] | None = None  # on their way to the host
        self._hook = unit.reducer.all_reduce_hook  # of now: what is sent depends on it
        self._scattered = False  # the reduce-scatter, if any, has been waited for

    @property
    def max_in_flight(self) -> int:
        """Number of reductions that may be in flight once this one is launched, itself included."""
        if self._reducer.in_flight is not None:
            return self._reducer.in_flight
        return MAX_WITH_REPLICAS if self._unit.axes.replicate_world > 1 else MAX_IN_FLIGHT

    def launch(self) -> None:
        """Start summing: launch the reduce-scatter, or run the user's `comm_hook` to its end.

        Gradients are cast and copied to what is sent, and let go of; zeros stand for those that
        this rank lacks, and a flag for each says which it has. Where parameters are not cut,
        nothing is sent, and the all-reduce is launched at once (`advance`). A `comm_hook` replaces
        both collectives. Raises RuntimeError, naming the collective, if its launch fails.
        """
        axes, first = self._unit.axes, self._params[0]
        whole = [
            torch.zeros(p.member.size, dtype=self._dtype, device=p.device) if grad is None else grad
            for p, grad in self._grads.items()
        ]
        dtypes = {grad.dtype for grad in whole}
        flag_dtype = dtypes.pop() if len(dtypes) == 1 else self._dtype  # packed with the rest
        flags = flags_of(self._has_grad, flag_dtype, first.device, axes.shard_world)
        parts = [Member(self._dtype, p.member.size, p.member.dim) for p in self._params]
        members = (*parts, Member(self._dtype, (len(flags),)))
        whole.append(flags)
        layout = bucket_layout(members, axes.shard_world, axes.shard_rank)
        self._grads = {}
        if self._reducer.comm_hook is not None:
            self._flight = collectives.run_hook(whole, layout, axes, self._reducer.comm_hook)
            self._scattered = True
            return
        packed = collectives.pack_grads(
            whole,
            layout,
            self._reducer.scatter_group or axes.shard_group,
            divisor=self._reducer.divide_by or float(axes.num_ranks),
            is_mean=self._reducer.divide_by is None and not self._reducer.only_sums,
            is_last=axes.replicate_world == 1 and self._hook is None,
            names=[param.name for param in self._params],
            comm=self._reducer.reduce_scatter,
        )
        self._flight = collectives.launch_reduce(packed, self._reducer.reduce_scatter)
        if axes.shard_world == 1:
            self.advance()

    def advance(self) -> None:
        """Go on from the reduce-scatter to the all-reduce, if there are replicas.

        Waits for the reduce-scatter then; on a device its stream for all-reduces waits, not
        compute. Sums that wait in `Reducer.partial` are added first; if the unit is not to
        all-reduce now, the sums are left there instead, an empty `.grad` gets zeros for them, and
        no gradient is wanted any more. Without replicas, or at a second call, nothing is done.
        Raises RuntimeError if `.grad` was written to while sums waited.
        """
        if self._scattered:
            return
        assert self._flight is not None
        self._scattered = True
        if self._unit.axes.replicate_world == 1:
            return
        # What the other stream reads must outlive it: until the all-reduce is waited for.
        after_compute = not self._flight.work
        with on_all_reduce_stream(self._params[0].device, after_compute=after_compute) as stream:
            self._keep.append(self._flight)
            self._flight = self._flight.wait()
            if not self._stands_alone:
                self._add_partial(*self._pieces(self._flight.receive))
            if self._reducer.all_reduces or self._stands_alone:
                group = self._unit.axes.replicate_group
                self._flight = collectives.launch_all_reduce(self._flight, group)
                return
            sums = self._flight.receive
            if self._reducer.reduce_scatter is not None:
                sums = sums.clone()  # the user may have another reduce receive there
            if stream is not None:
                self._left = stream.record_event()
        chunks, counts = self._pieces(sums)
        for param, chunk, count in zip(self._params, chunks, counts, strict=True):
            self._reducer.partial[param] = Partial(chunk, count, Seen.now(param))
        units_that_wait.add(self._unit)
        self._wanted = set()

    def _pieces(self, flat: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Split `flat`, this rank's part of the sums: a chunk and a count for each parameter.

        Both are views; see `Partial`.
        """
        world = self._unit.axes.shard_world
        lengths = [param.member.chunk_numel(world) for param in self._params]
        *chunks, counts = flat.split([*lengths, len(self._params)])
        return chunks, counts.split(1)

    def _add_partial(self, chunks: Sequence[Tensor], counts: Sequence[Tensor]) -> None:
        """Add to `chunks` and `counts`, in place, the sums that wait for their all-reduce.

        These are taken out of `Reducer.partial`, and dropped if `.grad` was emptied or zeroed
        since.
        Raises RuntimeError if it was written to otherwise.
        """
        sums: list[Tensor] = []
        waiting: list[Tensor] = []
        for param, chunk, count in zip(self._params, chunks, counts, strict=True):
            partial = self._reducer.partial.pop(param, None)
            if partial is not None and partial.seen.is_left(param):
                sums += chunk, count
                waiting += partial.chunk, partial.count
        if waiting:
            self._keep.append(waiting)
            torch._foreach_add_(sums, waiting)

    def wait(self) -> dict[ShardedParam, Tensor]:
        """Wait, and return this rank's part of the mean gradient of each wanted parameter.

        The all-reduce, if it is still to come, is launched before, and the unit's `all_reduce_hook`
        runs after it, but not if no parameter is wanted. Parameters that have a gradient on no rank
        are left out, unless the unit `sends_unused`; all are if the sums were left for a later
        all-reduce. Parts, (local rows, *rest), have the dtype of the reduce. To be called once. The
        host waits for a device only if this rank lacks a gradient.
        """
        self.advance()
        flight = self._wait()
        self._keep = []
        if not self._wanted:
            return {}
        if self._hook is not None:
            flight.receive.div_(flight.after)
            self._hook(flight.receive[: -len(self._params)])
            flight = flight.but(after=1.0)
        told = self._hook, self._reducer.comm_hook, self._reducer.reduce_scatter
        lent = any(each is not None for each in told)  # the user may have use for the buffer
        *shards, anywhere = collectives.split_reduced(flight, copies=lent)
        parts = zip(self._params, shards, self._has_grad, strict=True)
        return {
            param: shard
            for index, (param, shard, has) in enumerate(parts)
            if param in self._wanted
            and (has or self._reducer.sends_unused or anywhere[index].item() > 0)
        }

    def _wait(self) -> InFlight:
        """Wait for what is in flight, or for sums to be left for later; return what has arrived.

        Its memory may be freed from then on.
        """
        assert self._flight is not None
        flight, self._flight = self._flight.wait(), None
        if self._left is not None:
            self._left.wait()
        return flight

    def __del__(self) -> None:
        """Have the device wait for what is still in flight, as after an exception; not a CPU."""
        # An exception came between launch and wait: the device waits, so that memory may be freed.
        # On a CPU nobody does: gloo holds on to its buffers itself, and other ranks may never
        # launch their part.
        if self._params[0].device.type == "cpu" or sys.is_finalizing():
            return
        if self._flight is not None:
            self._wait()
        self.release()

    def store(self) -> bool:
        """Wait, and begin to copy gradients to the host, if the device can do so beside compute.

        Tells whether that is so: `accumulate` then has the host wait for them. Else, as on a CPU or
        without offload to pinned memory, nothing is done, and nothing waited for. A second call
        begins nothing.
        """
        offload = self._unit.settings.offload
        if not isinstance(offload, CPUOffloadPolicy) or not offload.pin_memory:
            return False
        if self._stored is None and self._params[0].device.type != "cpu":
            shards = self.wait()
            cast = [in_dtype_of_grad(param, shard) for param, shard in shards.items()]
            self._stored = list(shards), launch_store(cast) if cast else Copies([], [])
        return self._stored is not None

    def release(self) -> None:
        """Free what the device has of gradients that `store` has begun to copy."""
        if self._stored is not None:
            params, copies = self._stored
            self._stored = params, copies.release()

    def accumulate(self) -> None:
        """Wait, and add the mean gradients to `.grad`, running hooks; see `accumulate` below.

        Of wanted parameters without a gradient on any rank, zeros that stood in `.grad` for one
        that waited are taken out. After `store` the host waits for its copies.
        """
        if self._stored is None:
            shards = self.wait()
        else:
            params, copies = self._stored
            shards = dict(zip(params, copies.wait_on_host(), strict=True))
            self._stored = None
        for param, shard in shards.items():
            accumulate(param, shard)
        for param in self._wanted:
            drop_placeholder(param)  # no rank had one after all


def flags_of(
    has_grad: Sequence[bool], dtype: torch.dtype, device: torch.device, times: int
) -> Tensor:
    """Make the numbers that tell which gradients a rank has, 1 or 0, without waiting for `device`.

    See [Note: gradients that are not there]. Not to be written to, as the same tensor may be
    returned again.
    times: how often they are repeated, which is once for each rank that sums go to.
    Returns a 1-D tensor of `dtype` on `device`.
    """
    if all(has_grad):
        ones = torch.ones if is_captured() else _ones
        return ones(times * len(has_grad), dtype=dtype, device=device)
    flags = torch.tensor(has_grad, dtype=dtype)
    flags = flags if device.type == "cpu" else flags.pin_memory()
    return flags.to(device, non_blocking=True).repeat(times)


_ones = functools.lru_cache(maxsize=512)(torch.ones)  # a bucket needs the same at each step


def in_dtype_of_grad(param: ShardedParam, shard: Tensor) -> Tensor:
    """Cast a mean gradient to the parameter's dtype, unless it is kept in that of the reduce."""
    is_kept = param.unit.settings.mp.keep_low_precision_grads
    return shard if is_kept else shard.to(param.member.dtype)


def drop_placeholder(param: ShardedParam) -> None:
    """Empty `.grad` if it has zeros that `Seen.now` put there: a gradient takes their place."""
    if param.param.grad is not None and _is_placeholder(param.param.grad):
        param.param.grad = None


def fill_unused(unit: Unit, used: set[ShardedParam]) -> None:
    """Give zeros to trainable parameters of `unit` without a gradient, if it `sends_unused`.

    For the end of compiled code's backward; that code is the same on every rank.
    used: parameters to which autograd is about to hand a gradient: they are left alone.
    """
    if unit.reducer.sends_unused:
        for param in unit.params:
            if param.param.requires_grad and param.param.grad is None and param not in used:
                param.param.grad = _zeros(param)


def accumulate(sharded: ShardedParam, shard: Tensor) -> None:
    """Add this rank's part of a mean gradient to `.grad`, and run the parameter's hooks.

    Hooks on the gradient run first, and may replace it; those for after accumulation run last, and
    it is noted if they update the parameter. The gradient is first cast to the parameter's dtype,
    unless the unit keeps low-precision gradients (then the parameter's `grad_dtype` is set), and
    moved to where the shard lies. Zeros that stood in `.grad` for one that waited are not added to,
    but replaced. Hooks that were set aside are put back.
    Raises RuntimeError if a hook for after accumulation has updated the parameter since forward.
    """
    if sharded.is_updated_by_hook:
        raise RuntimeError(
            f"{sharded.name} was updated by a hook for after its gradient is accumulated (an "
            "optimizer in backward), and now another gradient of its old values has come: use it "
            "in one forward a backward, or step the optimizer after backward"
        )
    param = sharded.param
    sharded.hooks.put_back()
    drop_placeholder(sharded)
    shard = in_dtype_of_grad(sharded, shard)
    if shard.dtype != sharded.member.dtype:
        param.grad_dtype = shard.dtype
    # To the host if the parameter is there, and not ahead of who reads it next.
    grad: Tensor = sharded.grad_from(shard.contiguous().to(sharded.shard.device))
    for hook in list(_torch.autograd.hooks_on_gradient(param).values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    with torch.no_grad():
        if param.grad is None:
            param.grad = grad
        else:
            param.grad += grad
    before = sharded.stamp
    for hook in list(_torch.autograd.hooks_after_accumulation(param).values()):
        hook(param)
    sharded.is_updated_by_hook = sharded.stamp != before


@dataclass
class Pending:
    """Gradients that wait for a later backward; see [Note: gradients that wait]."""

    sum: Sum
    seen: Seen


_PLACEHOLDER = "_autoshard_placeholder"  # marks zeros that were put in an empty `.grad`


def _is_placeholder(grad: Tensor) -> bool:
    return bool(getattr(grad, _PLACEHOLDER, False))


@dataclass(frozen=True)
class Seen:
    """Snapshot of a parameter's `.grad`, taken when a gradient of it began to wait elsewhere.

    version: of `grad`; see `_version`.
    """

    grad: Tensor
    version: int

    @staticmethod
    def now(param: ShardedParam) -> Seen:
        """Take a snapshot of `.grad`; if that is empty, first put zeros there that stand for it."""
        if param.param.grad is None:
            zeros = _zeros(param)
            setattr(zeros, _PLACEHOLDER, True)
            param.param.grad = zeros
        return Seen(param.param.grad, _version(param.param.grad))

    def is_left(self, param: ShardedParam) -> bool:
        """Tell whether `.grad` is as in the snapshot; not if it was emptied, replaced or zeroed.

        Raises RuntimeError if it was written to otherwise: the gradient that waits would miss that.
        If it was written to, the host waits for its values.
        """
        if param.param.grad is not self.grad:
            return False
        if _version(self.grad) == self.version:
            return True
        if bool(self.grad.count_nonzero()):
            raise RuntimeError(
                f"the gradient of {param.name} was changed while gradients of earlier backwards "
                "were waiting to be reduced: change gradients after the backward that reduces them"
            )
        return False


units_that_wait: weakref.WeakSet[Unit] = weakref.WeakSet()
"""Units in which gradients of some parameters wait for a reduce, or did until lately."""


def _zeros(param: ShardedParam) -> Tensor:
    """Make a sharded gradient of zeros, in the dtype that `.grad` of `param` may have."""
    dtype = param.param.grad_dtype or param.shard.dtype
    return param.grad_from(torch.zeros_like(param.shard, dtype=dtype))


def hold(
    param: ShardedParam, grad: Tensor, dtype: torch.dtype, *, is_borrowed: bool = False
) -> None:
    """Let `grad`, unsharded, wait for a backward that is reduced, added to those that wait already.

    If `.grad` is empty, zeros are put there. Those that wait are dropped, not added to, if `.grad`
    was emptied or zeroed since, which the host may wait to see. `units_that_wait` gets the unit.
    dtype: in which they are summed, as that of the reduce.
    is_borrowed: its memory is about to be used for something else, so that it is copied.
    Raises RuntimeError if `.grad` was written to otherwise since a gradient began to wait.
    """
    before = None if pending_of(param) is None or param.pending is None else param.pending.sum
    total = _added(before, grad, dtype, is_borrowed=is_borrowed)
    param.pending = Pending(total, Seen.now(param))
    units_that_wait.add(param.unit)


@dataclass
class Sum:
    """Sum of unsharded gradients of one parameter.

    total: in the dtype of the reduce.
    owned: whether `total` may be written to.
    """

    total: Tensor
    owned: bool


def _added(before: Sum | None, grad: Tensor, dtype: torch.dtype, *, is_borrowed: bool) -> Sum:
    """Add `grad` to `before`, in place if that is owned; alone it is copied only if borrowed."""
    grad = grad.to(dtype, copy=is_borrowed and before is None)
    if before is None:
        return Sum(grad, is_borrowed)  # else it may be another parameter's too, not to write to
    if before.owned:
        return Sum(before.total.add_(grad), True)
    return Sum(before.total + grad, True)


@dataclass
class Arriving:
    """Sum of unsharded gradients that is not complete yet, of one backward; see uses.py.

    task: number of that backward. In another backward the sum is ignored: its own broke off.
    """

    sum: Sum
    task: int


def arrive(
    param: ShardedParam, grad: Tensor, dtype: torch.dtype, *, is_borrowed: bool = False
) -> None:
    """Let `grad`, unsharded, wait for gradients of other uses of `param` in the running backward.

    It is added to those that have come in this backward; what a broken-off one has left is dropped.
    `.grad` is left alone. `units_that_wait` gets the unit.
    dtype, is_borrowed: as of `hold`.
    """
    total = _added(arrived(param), grad, dtype, is_borrowed=is_borrowed)
    param.arriving = Arriving(total, _torch.autograd.graph_task())
    units_that_wait.add(param.unit)


def arrived(param: ShardedParam) -> Sum | None:
    """Return the sum that `arrive` has made for `param` in the running backward, or None."""
    arriving = param.arriving
    if arriving is None or arriving.task != _torch.autograd.graph_task():
        return None
    return arriving.sum


def take_arrived(param: ShardedParam, grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return `grad`, the last one of the running backward, with those that came before added.

    None if there are none at all; `grad` itself, not cast, if none came before. Those that came
    before are taken out, and so is what a broken-off backward has left.
    dtype: of the sum.
    """
    before = arrived(param)
    param.arriving = None
    if before is None or grad is None:
        return grad if before is None else before.total
    return _added(before, grad, dtype, is_borrowed=False).total


def _version(grad: Tensor) -> int:
    """Version of `grad`: goes up when it is written to as a DTensor or through its local tensor."""
    return grad._version + _torch.dtensor.local_tensor(grad)._version


def pending_of(param: ShardedParam) -> Tensor | None:
    """Return the unsharded gradient of `param` that waits, or None.

    If `.grad` was emptied or zeroed since it began to wait, it is dropped. If `.grad` was written
    to, the host waits for its values.
    Raises RuntimeError if `.grad` was written to otherwise.
    """
    if param.pending is None:
        return None
    if not param.pending.seen.is_left(param):
        param.pending = None
        return None
    return param.pending.sum.total


def is_waiting(param: ShardedParam) -> bool:
    """Tell whether a gradient of `param` waits, unsharded or for its all-reduce.

    One does not if `.grad` was emptied or zeroed since, and is dropped then if it is unsharded. If
    `.grad` was written to, the host waits for its values. Raises RuntimeError if it was written to
    otherwise.
    """
    partial = param.unit.reducer.partial.get(param)
    return pending_of(param) is not None or (partial is not None and partial.seen.is_left(param))


def forget(param: ShardedParam) -> None:
    """Drop unsharded gradients of `param` that wait, and the zeros that stand for them in `.grad`.

    Sums that wait for their all-reduce alone, in `Reducer.partial`, are left.
    """
    param.pending = param.arriving = None
    drop_placeholder(param)


def take_pending(param: ShardedParam, grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return `grad`, unsharded, with the gradient of `param` that waited added, which is taken out.

    None if there is neither; `grad` itself, not cast, if none waited, or `.grad` was emptied or
    zeroed since, which the host may wait to see. Zeros that stand for it in `.grad` are left.
    dtype: of the sum.
    Raises RuntimeError if `.grad` was written to otherwise since a gradient began to wait.
    """
    total = pending_of(param)
    param.pending = None
    if total is None:
        return grad
    return total if grad is None else total + grad.to(dtype)
