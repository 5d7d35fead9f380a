"""Methods that a sharded module has beside those of its own class.

Most have the names and the meaning that FSDP2 gave them, some those of FSDP1. A setting is of
this module's unit; with `recurse=True` also of the units of all modules inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from autoshard import _torch
from autoshard.errors import UsageError
from autoshard.runtime.comm.custom_comms import AllGatherIn, ReduceScatterIn, check_comm
from autoshard.runtime.comm.mesh import mesh_device, separate_group
from autoshard.runtime.eager import access, unit_steps
from autoshard.runtime.eager import step as steps
from autoshard.runtime.training import clip_grad_norm, full_params
from autoshard.runtime.unit.param import find
from autoshard.runtime.unit.unit import Unit, unit_of
from autoshard.runtime.unit.unsharded import keep


class UnshardHandle(fsdp.UnshardHandle):
    """Handle that `unshard(async_op=True)` returns: `wait()` for the unsharded parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the unsharded parameters are there; does nothing after `reshard()`.

        Forward and other reads wait by themselves.
        """
        if self._unit.kept is not None:
            self._unit.kept.tensors()


class GradientReductionHandle:
    """Handle that `finalize_backward(async_op=True)` returns: `wait()` for the gradients."""

    def __init__(self, root: Unit) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until all reduces that were launched are done, and fill `.grad`.

        Hooks on the parameters run. A second call finds nothing to do.
        """
        unit_steps.finish_reduces(self._root)


class ShardedModule(fsdp.FSDPModule, nn.Module):
    """Mixin for the class of every module that heads a unit; `isinstance` tells such modules.

    To `isinstance` they are FSDP2's `FSDPModule`, too, and have all of its public methods up to
    torch 2.13, but none of FSDP2's hooks or state. A slice of a container that heads a unit, as
    `model.layers[1:3]`, is of the container's own class, without these methods.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the user's class: containers call their class to make a slice.

        It heads no unit, and lacks the methods of this mixin.
        """
        original: type[nn.Module] | None = cls.__dict__.get("_autoshard_original")
        return object.__new__(cls) if original is None else original(*args, **kwargs)

    def _get_fsdp_state(self) -> Any:
        """Raise NotImplementedError: FSDP2 keeps no state of this module."""
        raise NotImplementedError(
            f"unit {_unit(self).name!r} is autoshard's, and keeps none of the state that FSDP2 "
            "keeps of its modules: what asked for that works with torch's fully_shard alone"
        )

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        """Names that DistributedDataParallel, which asks for them, is to leave alone.

        Raises RuntimeError if that leaves nothing for it to train.
        """
        named = dict(self.named_parameters())
        names = [name for name, param in named.items() if find(param) is not None]
        if all(name in names for name, param in named.items() if param.requires_grad):
            raise RuntimeError(
                f"{type(self).__name__} was given to DistributedDataParallel, and is sharded by "
                "autoshard, which averages its gradients: leave DistributedDataParallel out (with "
                "Accelerate, don't give the model to prepare())"
            )
        return names

    # ---- whole parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's unit and keep it until `reshard()`; not the units of modules inside.

        Reads of its parameters then give unsharded ones outside of forward, too; so does
        `parameters()`, until the next backward. Nothing is gathered if the unit keeps unsharded
        parameters already, of the values that its shards have. All ranks call this together.
        Compiled code is compiled once more, to take what is gathered.

        async_op: return once the gather is launched, a handle to wait for it; else None.
        Raises RuntimeError for a parameter on the meta device.
        """
        unit = _unit(self)
        keep(unit)
        unit.is_unsharded_by_user = unit.shows_unsharded = True
        unit.update_markers()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Drop unsharded parameters of this module's unit; not of the units of modules inside.

        Also drops parameters that an eager forward kept for backward
        (`reshard_after_forward=False`): backward gathers them again. Parameters that compiled code
        saved for backward stay, and those that a running forward or backward reads. Ends what
        `unshard()` began.
        Raises RuntimeError if an unsharded parameter was written to, as that is lost.
        """
        unit_steps.reshard(_unit(self))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield parameters as sharded DTensors, or as unsharded copies while their unit shows them.

        A unit shows copies
        - from `unshard()` to `reshard()` or the next backward;
        - from an eager forward with gradients to its backward, if `fully_shard` or
          `set_reshard_after_forward` was given `reshard_after_forward=False`.
        A parameter that has a gradient is sharded all the same, and all are inside a forward or a
        backward, or in compiled code.

        Gradients of what is computed from copies go to the sharded parameters. A write to a copy
        raises RuntimeError later, and so does the step of an optimizer that holds one. The output
        of a forward doesn't depend on copies that are yielded after it: take inputs of
        `torch.autograd.grad` or `backward(inputs=...)` before the forward. `parameters()` is the
        same without names.
        """
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return named if torch.compiler.is_compiling() else access.named_registered(named)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of sharded parameters, as `nn.Module` does, also while gathered."""
        with access.as_sharded():
            super().zero_grad(set_to_none)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze the sharded parameters, also while gathered; returns this module."""
        with access.as_sharded():
            return super().requires_grad_(requires_grad)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed after forward; False keeps them for backward.

        An int that `fully_shard` was given counts no more. With False `parameters()` gives
        unsharded copies from an eager forward to its backward; see `named_parameters`. Raises
        ValueError for what is no bool.
        """
        _expect_bool("reshard_after_forward", reshard_after_forward)
        for unit in _units(self, recurse):
            unit.configure(
                reshard_after_forward=reshard_after_forward, smaller=None, is_by_fsdp2=True
            )

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after backward.

        False keeps them for the next forward, as for microbatches between two optimizer steps.
        Raises ValueError for what is no bool.
        """
        _expect_bool("reshard_after_backward", reshard_after_backward)
        for unit in _units(self, recurse):
            unit.configure(reshard_after_backward=reshard_after_backward)

    def set_strict_order(self, strict_order: bool) -> None:
        """Set whether all ranks run the same modules in the same order, for the whole model.

        False lets each rank run other modules, or leave some out, in each step. A forward then
        gathers all units before it begins, they stay unsharded until backward is over, and the end
        of backward reduces all of them: a replica's memory, and no overlap. Parameters that no rank
        has reached get no gradient.
        Raises ValueError for what is no bool, RuntimeError if this is not the root.
        """
        _expect_bool("strict_order", strict_order)
        root = _unit(self)
        if not root.is_root:
            raise RuntimeError(f"set strict_order on the root module, not on {root.name!r}")
        for unit in _units(self, True):
            unit.configure(strict_order=strict_order)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether an eager backward prefetches this unit.

        False is for a unit whose backward reads none of its parameters, such as an embedding. If
        it reads one all the same, the unit is gathered at that point.
        Raises ValueError for what is no bool.
        """
        _expect_bool("unshard_in_backward", unshard_in_backward)
        _unit(self).configure(unshard_in_backward=unshard_in_backward)

    # ---- prefetch

    def set_modules_to_forward_prefetch(self, modules: list[fsdp.FSDPModule]) -> None:
        """Set which units an eager forward gathers ahead when it gathers this module's unit.

        They are those that `modules` head, instead of the next ones in the order of the step
        before. An empty list: none. Compiled code follows its plan.
        Raises ValueError for a module that heads no unit.
        """
        _unit(self).configure(next_in_forward=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[fsdp.FSDPModule]) -> None:
        """Set which units an eager backward gathers ahead when it gathers this module's unit.

        They are those that `modules` head. An empty list is the default: the unit that forward
        gathered before this one. Compiled code follows its plan.
        Raises ValueError for a module that heads no unit.
        """
        _unit(self).configure(next_in_backward=_units_of(modules) or None)

    # ---- reduction

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward reduces no gradients of this module's units or units inside.

        They wait, unsharded, for the next backward that reduces, which reduces the sum. On leaving,
        also by an exception, each unit reduces, or not, as it was set before; nothing is reduced
        then. Compiled code is compiled once more for it.
        """
        before = [(unit, unit.reducer.syncs) for unit in _units(self, True)]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for unit, syncs in before:
                unit.reducer.syncs = syncs
                unit.update_markers()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients.

        With False they wait, unsharded, for a backward that does. Raises ValueError for what is no
        bool.
        """
        _expect_bool("requires_gradient_sync", requires_gradient_sync)
        for unit in _units(self, recurse):
            unit.reducer.syncs = requires_gradient_sync
            unit.update_markers()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over replicas.

        With False this is left to a later backward, and only the reduce-scatter is done. Without a
        replicated axis it makes no difference. Raises ValueError for what is no bool.
        """
        _expect_bool("requires_all_reduce", requires_all_reduce)
        for unit in _units(self, recurse):
            unit.reducer.all_reduces = requires_all_reduce
            unit.update_markers()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether a backward waits for its reduces before it ends, in this module's units.

        With False it may end while reduces are in flight and `.grad` is not filled; a later
        backward with True, or `finalize_backward()`, waits for them. The call also lets
        torch.distributed.pipelining find this module as a stage that it can finalize.
        Raises ValueError for what is no bool.
        """
        _expect_bool("is_last_backward", is_last_backward)
        _torch.fsdp.stand_in_for_fsdp2(self, self.finalize_backward)  # for a stage of a pipeline
        for unit in _units(self, True):
            unit_steps.steps_of(unit).is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the user calls `finalize_backward()` after the last backward before a step.

        The same as `set_is_last_backward(not enabled)`; the later of two calls counts.
        Raises ValueError for what is no bool, RuntimeError if this is not the root.
        """
        _expect_bool("enabled", enabled)
        _root(self, "set_manual_backward_finalization")
        self.set_is_last_backward(not enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients that wait, without a backward, wait for all reduces, and fill `.grad`.

        For schedules in which reduction is a step of its own: let gradients wait in all backwards,
        call `set_requires_gradient_sync(True)`, and then this, on all ranks together. Gradients of
        units for which that is still False go on waiting. Unsharded parameters that were kept for
        a next backward are dropped, except after `unshard()` or
        `set_reshard_after_backward(False)`, or in a unit that keeps them after forward and whose
        gradients go on waiting. Hooks on the parameters run.

        async_op: return once reduces are launched, a handle to wait for them; else None. Earlier
            reduces may be waited for before, as only some may be in flight at a time.
        Raises RuntimeError if this is not the root, or inside a forward or a backward.
        """
        root = _root(self, "finalize_backward")
        steps.finalize(root)
        handle = GradientReductionHandle(root)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Have reduces divide this unit's summed gradients by `factor`, not by the number of ranks.

        Raises ValueError for what is no positive number.
        """
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"the gradient divide factor should be positive, not {factor!r}")
        unit = _unit(self)
        unit.reducer.divide_by = float(factor)
        unit.update_markers()

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this unit's collectives only sum, and divisions are done beside them.

        Otherwise those of NCCL may give the mean, but not of float16. gloo's always sum.
        Raises ValueError for what is no bool.
        """
        _expect_bool("enable", enable)
        _unit(self).reducer.only_sums = enable

    def set_reduce_scatter_unused_params(self, enable: bool, *, recurse: bool = True) -> None:
        """Set whether parameters that no rank has used get gradients of zeros rather than none.

        A parameter that some rank has used gets its mean gradient on all ranks in either case.
        Raises ValueError for what is no bool.
        """
        _expect_bool("enable", enable)
        for unit in _units(self, recurse):
            unit.reducer.sends_unused = enable

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reduces an eager backward may have in flight; by default 1, with replicas 2.

        Each holds the gradients that it sends. A larger number hides reduces that take longer than
        the backward of one unit. Compiled code ignores it: there the plan says what is in flight,
        and a `memory_budget` bounds it.
        Raises TypeError for what is no int, and ValueError for one less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers should be an int, not {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers should be positive, not {max_input_buffers}")
        for unit in _units(self, recurse):
            unit.reducer.in_flight = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether reduce-scatters have a process group of their own, beside that of gathers.

        Backends run the collectives of one group one after another; with two groups a gather and a
        reduce-scatter may run at once. All ranks that share parameters call it together, as it may
        make the group; units over the same ranks share one. Compiled code is compiled anew. Where
        parameters are not cut it makes no difference.
        Raises ValueError for what is no bool.
        """
        _expect_bool("enable", enable)
        for unit in _units(self, recurse):
            unit.reducer.scatter_group = separate_group(unit.axes) if enable else ""
            unit.update_markers()

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit's parameters by `comm` rather than by collectives of ours.

        comm: as `torch.distributed.fsdp`'s `AllGather`. `comm.allocate(size, dtype=, device=)`
            gives the tensor to receive into, out of which parameters are copied, and
            `comm(output_tensor=, input_tensor=, group=, async_op=)` begins to gather, returning
            an object with `wait()`, or None. There is one call a dtype; both tensors are 1-D, and
            `input_tensor` is a part of `output_tensor`. None: collectives of ours again. Where
            parameters are not cut it is not called.

        No graph can hold the call of `comm`: such a unit is gathered before compiled code runs,
        and stays unsharded until its backward is over.
        Raises TypeError if `comm`, or its `allocate`, can't be called.
        """
        if comm is not None:
            check_comm(comm, "all-gather")
        _unit(self).configure(all_gather=comm, allocates=None)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter this unit's gradients by `comm` rather than by collectives of ours.

        comm: as `torch.distributed.fsdp`'s `ReduceScatter`: as for `set_custom_all_gather`, and
            called with `op=`, which is always the sum: we divide. Compiled code
            calls `comm`, too. Where parameters are not cut it is not called. None: collectives of
            ours again.
        Raises TypeError if `comm`, or its `allocate`, can't be called.
        """
        if comm is not None:
            check_comm(comm, "reduce-scatter")
        unit = _unit(self)
        unit.reducer.reduce_scatter = comm
        unit.configure(allocates=None)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether this unit's collectives use buffers that the process group allocates.

        If its backend allocates none, as gloo, or parameters are not cut, they are ordinary ones.
        For compiled code see `set_custom_all_gather`. It was run on no device that has such memory
        yet.
        Raises ValueError for what is no bool, or if the unit has communication that another method
        has set, as `set_custom_all_gather` does.
        """
        _expect_bool("enable", enable)
        unit = _unit(self)
        _refuse_own(unit, "set_allocate_memory_from_process_group_for_comm()", "group")
        group = unit.axes.shard_group
        device = mesh_device(unit.axes.mesh)
        allocate = _torch.dist.group_allocator(group, device) if enable and group else None
        _allocate(unit, "group", allocate)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Have this unit's collectives use buffers in symmetric memory; all ranks call it together.

        They wait for each other, and `backend` is set for all symmetric memory of this process.
        Does nothing more than check where parameters are not cut. For compiled code see
        `set_custom_all_gather`. It was run on no device yet.
        Raises ValueError for a backend other than NCCL, a mesh of other devices than CUDA's, if
        `set_reduce_scatter_max_input_buffers` was given more than 1, or if the unit has
        communication that another method has set, as `set_custom_all_gather` does.
        """
        unit = _unit(self)
        _refuse_own(unit, "set_symm_mem_for_comm()", "symmetric")
        if backend != "NCCL" or unit.axes.mesh.device_type != "cuda":
            raise ValueError(
                f"unit {unit.name!r} is on {unit.axes.mesh.device_type}, asked for symmetric "
                f"memory of {backend!r}: only NCCL has some, for meshes of CUDA devices"
            )
        if (unit.reducer.in_flight or 1) > 1:
            raise ValueError(
                f"unit {unit.name!r} may have {unit.reducer.in_flight} reduces in flight, and one "
                "buffer of symmetric memory: call set_reduce_scatter_max_input_buffers(1) first"
            )
        if unit.axes.shard_group:
            allocate, prepare = _torch.dist.symmetric_memory(unit.axes.shard_group, backend)
            _allocate(unit, "symmetric", allocate, prepare)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divide factor by the former name of `set_gradient_divide_factor()`. Warns so."""
        warnings.warn(
            "set_reduce_scatter_divide_factor is deprecated: call set_gradient_divide_factor",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: Any | None = None
    ) -> None:
        """Have reduces call `hook` with this rank's part of this unit's mean gradients, 1-D.

        It changes them in place. It is called once for each reduce of the unit, after all
        collectives of that, and before `.grad` is filled. It takes the place of a hook set before.

        stream: on which to run it; None: the current one. Raises ValueError if one is given and
        the mesh has a replicated axis, TypeError if the hook can't be called.
        """
        unit = _unit(self)
        if not callable(hook):
            raise TypeError(f"an all-reduce hook should be callable, not {type(hook).__name__}")
        if stream is not None and unit.axes.replicate is not None:
            raise ValueError(
                f"unit {unit.name!r}: stream can't be set where a mesh axis replicates"
            )
        unit.reducer.all_reduce_hook = hook if stream is None else _on_stream(hook, stream)
        unit.update_markers()

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Have gradients reduced by `hook`, not by collectives of ours, in all units of the model.

        state: passed to `hook` as it is.
        hook: `hook(state, grad, part)` fills `part`, 1-D, this rank's part, from `grad`, 1-D, the
            parts of all ranks one after another. It does all summing and dividing. Where
            parameters are not cut (no_shard, replicate), `hook(state, grad)` works in place.
        Raises RuntimeError if this is not the root, if a hook is registered already, or if
        the mesh both replicates and shards; TypeError if `hook` can't be called.
        """
        unit = _unit(self)
        if not unit.is_root:
            raise RuntimeError(
                f"register a communication hook on the root module, not on {unit.name!r}"
            )
        if not callable(hook):
            raise TypeError(f"a communication hook should be callable, not {type(hook).__name__}")
        for each in _units(self, True):
            if each.reducer.comm_hook is not None:
                raise RuntimeError(f"unit {each.name!r} has a communication hook already")
            if each.axes.replicate is not None and each.axes.shard is not None:
                raise RuntimeError(
                    f"unit {each.name!r}: a communication hook would see only one of the two "
                    "collectives of a mesh that both replicates and shards"
                )
        for each in _units(self, True):
            each.reducer.comm_hook = state, hook
            each.update_markers()

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward wait for `event`, once, before its first gather.

        Call it on the root: only a forward whose outermost unit is this module's waits.
        event: an object with `wait()`. A device event makes the current stream wait, not the host,
            beside what that stream was given before.
        """
        unit_steps.steps_of(_unit(self)).post_optim_event = event

    # ---- state

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all parameters so that their norm is at most `max_norm`.

        The norm is that of the replicated model: of all gradients as one vector. There is one
        small all-reduce for all parameters that are cut over the same mesh axis. A parameter that
        is not sharded counts once, with this rank's gradient, which should be the same on every
        rank; one without a gradient doesn't count. All ranks must call it together.

        norm_type: p of the p-norm, greater than 0; inf for the largest absolute value.

        Returns the norm before scaling, a plain scalar tensor, f32 (f64 if a parameter is f64 or
        c128), the same on every rank; 0 if there is no gradient. A norm of inf or NaN is returned,
        and scaled by, as in `torch.nn.utils.clip_grad_norm_`.
        Raises ValueError for a norm_type that is not greater than 0, or a gradient laid out
        as a partial sum; RuntimeError inside `full_params()`, or while a gradient waits to be
        reduced, as in `no_sync()`.
        """
        return clip_grad_norm.clip_grad_norm_(self, max_norm, norm_type)

    def full_params(self, *, writeback: bool = True) -> AbstractContextManager[None]:
        """Context in which all parameters of this module and below are unsharded, on every rank.

        Inside, `module.weight`, `parameters()` and `state_dict()` give plain tensors of the
        global size, ties kept, without gradients. All ranks must enter together; leaving needs
        no other rank, so that what is done inside may differ. It takes the memory of the whole
        module once more on every rank.

        A forward inside works under `torch.no_grad()`, without collectives, and eagerly if the
        module is compiled; with gradients it raises RuntimeError, as they would be lost.

        writeback: True writes values and `requires_grad` of the unsharded parameters, or of
            parameters put in their places, back to the shards, also if the block raises. Each rank
            writes its own rows, so all ranks must have changed them alike. False drops all changes.

        Raises RuntimeError for a parameter on meta, inside a forward, a backward or a
        `full_params()` of the same parameters. On leaving, unless the block raises, it raises
        RuntimeError if gradients were made inside, and, with `writeback`, ValueError if a parameter
        was removed, or given another size or dtype: that one is left as it was before.
        """
        return full_params.full_params(self, writeback=writeback)

    def reset_iter_state(self) -> None:
        """Drop what an exception in forward or backward left; all ranks call it.

        That is the open step of this thread, unsharded parameters (also after `unshard()`), reduces
        in flight and gradients that wait. What `.grad` has stays. Ranks exchange nothing here; in
        the next step they compare the order of their collectives anew. Raises RuntimeError if this
        is not the root.
        """
        _root(self, "reset_iter_state")
        steps.abandon_open_step()
        for unit in _units(self, True):
            unit_steps.reset(unit)


def share_comm_ctx(modules: list[fsdp.FSDPModule]) -> None:
    """Do nothing but check `modules`: units of several roots on a device share streams in any case.

    FSDP2's function of that name has the stages of a pipeline do so.
    Raises ValueError, as FSDP2 does, for a module that heads no unit.
    """
    _units_of(modules)


def _unit(module: nn.Module) -> Unit:
    unit = unit_of(module)
    assert unit is not None
    return unit


def _root(module: nn.Module, what: str) -> Unit:
    """Return the unit that `module` heads. Raises RuntimeError if it is not the root.

    what: the method that was called, for the message.
    """
    unit = _unit(module)
    if not unit.is_root:
        raise RuntimeError(f"{what} must be called on the root module, not on {unit.name!r}")
    return unit


def _units(module: nn.Module, recurse: bool) -> list[Unit]:
    """List the unit that `module` heads, and, if `recurse`, those that modules inside head."""
    unit = _unit(module)
    if not recurse:
        return [unit]
    inside = (unit_of(each) for each in module.modules())
    return list(dict.fromkeys(each for each in inside if each is not None))


def _units_of(modules: Iterable[object]) -> tuple[Unit, ...]:
    """Return the unit that each of `modules` heads. Raises ValueError if one heads none."""
    units: list[Unit] = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ValueError(f"expected modules that head units but got {type(module).__name__}")
        units.append(unit)
    return tuple(units)


def _expect_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} should be a bool, got {type(value).__name__}")


def _refuse_own(unit: Unit, what: str, by: str) -> None:
    """Raise UsageError if `unit` has communication of its own that `by` did not set.

    what: the method that was called, for the message.
    by: the kind of allocator that this method sets, as in `UnitSettings.allocates`.
    """
    own = unit.settings.all_gather or unit.reducer.reduce_scatter
    if own is not None and unit.settings.allocates != by:
        raise UsageError(
            f"unit {unit.name!r} has communication of its own, a {type(own).__name__}, which "
            f"allocates what it needs: {what} can't have a say; call set_custom_all_gather(None) "
            "and set_custom_reduce_scatter(None) first"
        )


def _allocate(unit: Unit, by: str, allocate: Any, *prepare: Any) -> None:
    """Have `unit` send from and receive into buffers that `allocate` gives; None: ours.

    Takes the place of an all-gather and a reduce-scatter that were set before.

    by: the kind of allocator, for `UnitSettings.allocates`.
    prepare: at most one function, called with each buffer and the group before they are used.
    """
    is_ours = allocate is None
    unit.reducer.reduce_scatter = None if is_ours else ReduceScatterIn(allocate, *prepare)
    unit.configure(
        all_gather=None if is_ours else AllGatherIn(allocate, *prepare),
        allocates=None if is_ours else by,
    )


def _on_stream(hook: Callable[[Tensor], None], stream: Any) -> Callable[[Tensor], None]:
    """Wrap `hook` to run on `stream`, after earlier and before later work of the current stream."""

    def call(tensor: Tensor) -> None:
        """Run `hook` on `tensor`, on `stream`, between the current one's earlier and later work.

        The host does not wait.
        """
        current = torch.accelerator.current_stream()
        stream.wait_stream(current)
        with stream:
            hook(tensor)
        current.wait_stream(stream)

    return call
