"""Calls of compiled frames: what is done around a graph, before it, after it, and in its backward.

A graph takes shards, and gives gradients of shards. The parameters are DTensors: one autograd
function takes their local tensors out for all of them, and makes DTensors of the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.one_piece import in_one_piece
from autoshard.passes.ir.plan import Plan
from autoshard.runtime.comm import threads
from autoshard.runtime.compiled import extensions
from autoshard.runtime.compiled.frame import Frame
from autoshard.runtime.compiled.other_frames import PlannedBytes, note_backward, note_run
from autoshard.runtime.compiled.planned import node_of
from autoshard.runtime.compiled.tables import Table, Tables
from autoshard.runtime.eager import outside, unmanaged, unordered
from autoshard.runtime.eager import step as steps
from autoshard.runtime.eager.saved import in_checkpoint, in_recomputation, without_hooks
from autoshard.runtime.eager.unit_steps import describe_forward, steps_of, wait_for_optimizer
from autoshard.runtime.ranks.order import forward_order
from autoshard.runtime.unit import reduce
from autoshard.runtime.unit.extensions import has_methods
from autoshard.runtime.unit.param import ShardedParam, resolve, stamps_of
from autoshard.runtime.unit.unit import Unit, listed
from autoshard.runtime.unit.unsharded import keep
from autoshard.runtime.unit.uses import Use


def call_of(
    frame: Frame,
    compiled: Callable[..., Any],
    name: str,
    plans: Sequence[Plan],
    planned: PlannedBytes | None = None,
) -> Callable[..., Any]:
    """Wrap `compiled`, over local shards, in a function with the signature of Dynamo's graph.

    The function passes shards, and the inputs of `Frame.with_more_inputs`: parameters kept
    unsharded are gathered before, and waited for, if they are not there. First it compares with
    other ranks, if this is new, which graph runs next, and waits for them, or with
    `strict_order=False` launches the gathers of all units of the model; and has compute wait for
    the event that `set_post_optim_event` was given. The backward of the results, as it begins,
    notes which of them have no gradient. The function raises RuntimeError if other ranks run
    another graph, or if a parameter is laid out otherwise than when the graph was compiled.
    `compiled` itself is returned if the graph reads no sharded parameter.

    frame: its fields are read now, not at calls.
    name: of the graph, the same on every rank.
    plans: of the graph and its backward, which `autoshard.plans` gives for each model they run.
    planned: memory of the graph and its backward, if there is a memory budget.
    """
    if not frame.params:
        return compiled
    positions = list(frame.local)
    mesh = frame.params[0].axes.mesh
    in_table = list(frame.positions)
    number_at = {position: number for number, position in enumerate(in_table)}
    numbers = [number_at.get(position) for position in positions]
    extended = [param.is_extended for param in frame.local.values()]
    stays = list(frame.stays)
    tables = Tables(frame.params, plans)
    compiled_for = listed(list(dict.fromkeys(param.unit.name for param in frame.params)))

    @in_one_piece
    def call(*args: Any) -> Any:
        """Compare with other ranks which graph runs next, then run `compiled` over shards.

        Ranks wait for each other if this is new. With `strict_order=False` the gathers of all
        units of the model are launched instead. Compute waits for the event of
        `set_post_optim_event`. Parameters kept unsharded, and the table's number, are passed,
        too: the former are gathered, and waited for, if they are not there. If there are none,
        the open step's hooks on saved tensors are off while `compiled` runs. Units note the
        forward, whose backward, as it begins, notes which results have no gradient. Raises as
        `call_of` says.
        """
        values = list(args)
        table = tables.of([values[position] for position in in_table])
        # Blocks that are alike run one graph: which of them runs next has to be told, too.
        what = name if table.where == compiled_for else f"{name}, for {table.where}"
        root, units = table.root, table.units
        threads.begin_forward()
        if root.is_unordered:  # other ranks may run another graph, or none
            unordered.gather_all(root)
            steps_of(root).backward_ran = False
        else:
            forward_order.take(describe_forward(root, what, units), mesh)
        wait_for_optimizer(root)
        kept = _kept_unsharded([table[number] for number in stays]) if stays else []
        params = [values[position] for position in positions]
        known = table.params()
        # A parameter that is only read as a shard is gathered by no marker, and has no number.
        owners = [
            _resolved(param) if number is None else known[number]
            for number, param in zip(numbers, params, strict=True)
        ]
        shards = _shards(params, owners, extended, table, units)
        for position, shard in zip(positions, shards, strict=True):
            values[position] = shard
        # What autograd saves of parameters kept unsharded is for the step's hooks.
        with contextlib.nullcontext() if stays else without_hooks() as step:
            results = compiled(*values, *kept, table.tensor)
        node = _watch_backward(results, table, step, is_counted=planned is not None)
        if planned is not None and torch.is_grad_enabled():
            note_run(table, planned, node)
        return results

    return call


def _watch_backward(
    results: Any, table: Table, step: steps.Step | None = None, *, is_counted: bool = False
) -> Any:
    """Have the backward of `results` tell `table`, as it begins, which of them have no gradient.

    It tells `step`, too, that backward begins, which may launch gathers. Returns autograd's node;
    None, and does nothing, for results without a compiled backward. Backward raises RuntimeError
    for a gradient that is a DTensor, unless one of the results is a DTensor.

    is_counted: whether frames are counted that run before the backward; see `note_backward`.
    """
    if not isinstance(results, (list, tuple)):
        return None
    planned = node_of(results)
    node, positions = planned or (_torch.aot.compiled_node(results), [])
    if node is None:
        return None
    if planned is None:
        _torch.aot.keep_in_one_piece(node)
        positions = _torch.aot.tangent_positions(node)
    has_dtensors = any(isinstance(result, DTensor) for result in results)

    def note(grads: Sequence[Tensor | None]) -> None:
        """Set `table.unused_outputs`, as backward begins, to the outputs without one of `grads`.

        First tells `step`, if there is one, that backward begins: it may launch gathers. Raises
        RuntimeError for a DTensor, unless a result of forward is one.
        """
        if step is not None:
            step.begin_backward()
        for grad in grads if not has_dtensors else ():
            outside.refuse_dtensor(grad)
        if is_counted:
            note_backward(table.root)
        unused = (number for number, at in enumerate(positions) if grads[at] is None)
        table.unused_outputs = frozenset(unused)

    node.register_prehook(note)
    return node


def _kept_unsharded(params: list[ShardedParam]) -> list[Tensor]:
    """Return `params` unsharded, in order: those that their units keep, and others gathered now.

    Launches all gathers, then waits for them. Units note in which precision they compute. Units
    then let go of them, but for those that keep them after backward, by `unshard()`, or with
    `strict_order=False`: at once, as the graph holds what it needs; or, in a checkpoint, at the end
    of the backward that runs the graph again.
    """
    units = list(dict.fromkeys(param.unit for param in params))
    for unit in units:
        unit.note_mode()
        keep(unit)  # all are launched before one is waited for
    whole = [keep(unit).tensors() for unit in units]
    of = dict(zip(units, whole, strict=True))
    kept = [of[param.unit][param] for param in params]
    for unit in units:
        if unit.keeps_after_backward or unit.is_unsharded_by_user or unit.is_unordered:
            continue
        if in_recomputation():  # there may be another one in this backward
            _torch.autograd.queue_backward_callback(functools.partial(_let_go, unit))
        elif not in_checkpoint():  # else it is run again, by the same graph
            _let_go(unit)
    return kept


def _let_go(unit: Unit) -> None:
    """Drop the unsharded parameters kept for `unit`, and have its markers gather again."""
    unit.kept = None
    unit.update_markers()


def _resolved(param: Tensor) -> ShardedParam:
    sharded = resolve(param)
    assert sharded is not None
    return sharded


def _shards(
    params: list[Tensor],
    owners: list[ShardedParam],
    extended: list[bool],
    table: Table,
    units: list[Unit],
) -> Sequence[Tensor]:
    """Return what the graph takes for `params`, with a backward if one of them needs a gradient.

    That is its shard, or the stand-in of an extended one. In the order of `params`; without a
    backward under no_grad. With one, `units` note the use of their parameters.
    owners: the sharded parameter of each. extended: whether each was when the graph was compiled.
    Raises RuntimeError for one that is extended, and was not then, or the reverse.
    """
    inputs = list(map(_torch.dtensor.local_tensor, params))
    if list(map(has_methods, inputs)) != extended:
        pairs = zip(inputs, extended, strict=True)
        at = next(at for at, (each, was) in enumerate(pairs) if has_methods(each) != was)
        raise RuntimeError(
            f"parameter {owners[at].name} was given fsdp_pre_all_gather, or lost it, after "
            "it was compiled: put such methods on before the first forward"
        )
    for at in itertools.compress(range(len(inputs)), extended):
        inputs[at] = extensions.stand_in(inputs[at])
    if torch.is_grad_enabled() and any(param.requires_grad for param in params):
        shards: tuple[Tensor, ...] = _torch.autograd.apply(
            _LocalShards, table, units, owners, inputs, *params
        )
        return shards
    return inputs


def _kept_dtype(sharded: ShardedParam) -> torch.dtype | None:
    """Dtype of the reduce, in which `.grad` is to stay; None if it gets the parameter's own.

    That of a forward which begins now, in this mode (train or eval).
    """
    unit = sharded.unit
    if not unit.settings.mp.keep_low_precision_grads:
        return None
    in_full = unit.asks_for_full_precision
    gathered = unit.gathered_member(sharded, in_full_precision=in_full).dtype
    return unit.reduced_member(sharded, gathered).dtype


def _with_pending(sharded: ShardedParam, grad: Tensor) -> Tensor:
    """Return `grad`, a rank's part, with the gradient of `sharded` that waited, if it is to add it.

    That is where no other rank shares the parameter, so that graphs have no reduce, which adds it
    elsewhere. The sum is made in the dtype of reduces.
    """
    if sharded.pending is None or sharded.axes.num_ranks > 1:
        return grad
    dtype = sharded.pending.sum.total.dtype
    total = reduce.take_pending(sharded, grad.reshape(sharded.member.size), dtype)
    assert total is not None
    return total.reshape(grad.shape).to(grad.dtype)


class _LocalShards(torch.autograd.Function):
    """Autograd function that gives the graph's inputs for all sharded parameters at once.

    Backward makes DTensors of their gradients, and none of one that waits or that no rank has. It
    raises RuntimeError if a parameter was written to since forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        table: Table,
        units: list[Unit],
        owners: list[ShardedParam],
        inputs: list[Tensor],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return `inputs`, detached; differentiable are those whose parameter needs a gradient.

        Each of `units` notes the use of its parameters, until backward has the gradients of
        `owners`, which are those of `params`. Kept for backward: which values the parameters have,
        and in which dtype `.grad` is to be, by the mode (train or eval) of now.
        """
        ctx.table, ctx.units = table, units  # backward looks things up in them
        ctx.use = Use(table.members, ctx)
        for unit in units:
            unit.uses.add(ctx.use)
        ctx.sharded, ctx.stamps = owners, stamps_of(owners)
        keeps = any(unit.settings.mp.keep_low_precision_grads for unit in units)
        ctx.kept_as = [_kept_dtype(each) for each in owners] if keeps else [None] * len(owners)
        ctx.set_materialize_grads(False)
        shards = tuple(each.detach() for each in inputs)
        ctx.mark_non_differentiable(
            *(s for s, p in zip(shards, params, strict=True) if not p.requires_grad)
        )
        return shards

    @staticmethod
    @once_differentiable
    @in_one_piece
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hand on the reduced `grads` of shards, as DTensors, or put them in `.grad` itself.

        The latter where this backward accumulates there, `.grad` is empty (zeros that stood for a
        gradient that waited are taken out), and the parameter has no hooks: None is handed on then.
        None is also handed on for a gradient that waits, or that no rank has, and hooks of that
        parameter are set aside. In units that `sends_unused`, if some parameter of theirs got a
        gradient, the trainable ones without a `.grad` get zeros. Low-precision gradients that are
        to be kept set `grad_dtype`.
        Notes that a backward has begun: `parameters()` gives shards again. If gradients wait, hooks
        are aside, or with `strict_order=False`, the end of the running backward reduces what waits
        in the model, and puts hooks back.
        Raises RuntimeError if a parameter was written to since forward.
        """
        ctx.use.end()
        for unit in ctx.units:
            unit.shows_unsharded = False
        unmanaged.note_backward(ctx.table.root)
        steps_of(ctx.table.root).backward_ran = True
        if stamps_of(ctx.sharded) != ctx.stamps:
            for sharded, stamp in zip(ctx.sharded, ctx.stamps, strict=True):
                sharded.check_unwritten(stamp)
        task = _torch.autograd.graph_task()
        is_left = bool(reduce.units_that_wait) or ctx.table.root.is_unordered
        handed_on: list[Tensor | None] = []
        used: set[ShardedParam] = set()
        leaves = (node for node, _ in ctx.next_functions)
        for sharded, grad, leaf, kept_as in zip(
            ctx.sharded, grads, leaves, ctx.kept_as, strict=True
        ):
            if grad is None or sharded.is_withheld_in(task):
                sharded.is_withheld = False
                is_left |= sharded.hooks.set_aside(sharded.param)  # they are for gradients
                handed_on.append(None)
                continue
            param = sharded.param
            accumulates = _torch.autograd.accumulates_gradient(leaf)
            if accumulates:
                grad = _with_pending(sharded, grad)
                reduce.drop_placeholder(sharded)  # before its dtype may change
                used.add(sharded)
            if kept_as is not None:  # exact: it was reduced in that dtype
                param.grad_dtype, grad = kept_as, grad.to(kept_as)
            whole = sharded.grad_from(grad)
            if accumulates and param.grad is None and not _torch.autograd.has_hooks(param):
                param.grad = whole  # autograd would make a second DTensor of it
                handed_on.append(None)
            else:
                handed_on.append(whole)
        if is_left:
            # A nested backward, a reentrant checkpoint's, is not the end of the others' gradients.
            units = {sharded.unit for sharded in ctx.sharded}
            for owner in units if _torch.autograd.in_nested_backward() else {ctx.table.root}:
                steps.close_compiled(owner)
        for unit in {sharded.unit for sharded in used}:
            reduce.fill_unused(unit, used)
        return None, None, None, None, *handed_on
