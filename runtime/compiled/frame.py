"""Frames: Dynamo's graphs over DTensor parameters, rewritten to graphs over plain local shards.

Dynamo's graph takes DTensor parameters and turns each into its local tensor where it
is read. Parameters that are only read so become local tensors at the graph's inputs:

    Dynamo's graph:  f(x, W: DTensor)      w = W.to_local(); w' = unshard(w, ..., -1)
    ours:            f(x, w: Tensor)       w' = unshard(w, ..., 0)
    the call:        f(x, W) = ours(x, shards(W)), with one autograd node for all W

AOTAutograd then sees no tensor subclass, so its graphs are the same on every torch
version, and a call unwraps and wraps no parameter one by one. Markers get their
number in the table of this frame's parameters.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.passes.ir.match import TABLE
from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.ir.ops import Unshard
from autoshard.passes.ir.plan import Plan
from autoshard.passes.planner.costs import GROUPED, PACKED
from autoshard.runtime.comm import transport
from autoshard.runtime.compiled import extensions
from autoshard.runtime.compiled.tables import Table, Tables
from autoshard.runtime.eager import outside, unmanaged, unordered
from autoshard.runtime.eager import step as steps
from autoshard.runtime.eager.saved import in_checkpoint, in_recomputation, without_hooks
from autoshard.runtime.eager.unit_steps import describe_forward, steps_of, wait_for_optimizer
from autoshard.runtime.ranks.order import forward_order
from autoshard.runtime.unit import reduce
from autoshard.runtime.unit.extensions import has_methods
from autoshard.runtime.unit.param import ShardedParam, find, resolve, stamps_of
from autoshard.runtime.unit.unit import Unit, listed
from autoshard.runtime.unit.unsharded import keep
from autoshard.runtime.unit.uses import Use

_UNSHARD = (torch.ops.autoshard.unshard, torch.ops.autoshard.unshard.default)


@dataclass
class Frame:
    """Captured graph, ready for AOTAutograd.

    gm:      takes local shards where Dynamo's graph took DTensor parameters.
    inputs:  example inputs for it, fake where they are shards.
    params:  the table: what a marker's argument `param` indexes.
    positions: of `params` among the inputs.
    stays:   indices in `params` of those that the runtime keeps unsharded: the graph gets them so,
        as additional inputs.
    local:   input position -> the parameter whose shard goes there.
    """

    gm: fx.GraphModule
    inputs: list[Any]
    params: list[ShardedParam] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    stays: list[int] = field(default_factory=list)
    local: dict[int, ShardedParam] = field(default_factory=dict)

    def table(self) -> tuple[ParamInfo, ...]:
        """Facts about the parameters for the passes, one entry a parameter.

        In the order of `params`: names, axes, and whether a gather of several would send it by
        itself; see `ParamInfo`.
        """
        return tuple(
            ParamInfo(
                param.name,
                param.unit.name,
                param.axes.shard_name,
                param.reduce_axis,
                GROUPED
                if transport.sends_alone(param.member, param.group, param.device)
                else PACKED,
            )
            for param in self.params
        )

    @contextlib.contextmanager
    def with_more_inputs(self) -> Iterator[None]:
        """Add inputs to the graph in this context: parameters kept unsharded, and a table's number.

        They come last; `inputs` gets fake examples of them. At the end all are removed again; but
        `gm` is recompiled only when they are added.
        No variable of the user's is behind them; the function that `wrap` makes passes them. For
        the number see `tables.py`. A graph that reads no sharded parameter is left as it is.
        """
        if not self.params:
            yield
            return
        fake = next(value for value in self.inputs if isinstance(value, _torch.tensors.FakeTensor))
        more: dict[str, Tensor] = {}
        with fake.fake_mode:
            for number in self.stays:
                param = self.params[number]
                more[f"whole_{number}"] = _example_of_unsharded(param)
            more[TABLE] = torch.empty(1, dtype=torch.int64)
        before = list(self.inputs)
        with _torch.dynamo.more_inputs(self.gm.graph, more):
            self.gm.recompile()
            self.inputs.extend(more.values())
            try:
                yield
            finally:
                self.inputs = before

    def wrap(
        self, compiled: Callable[..., Any], name: str, plans: Sequence[Plan]
    ) -> Callable[..., Any]:
        """Wrap `compiled`, over local shards, in a function with the signature of Dynamo's graph.

        The function passes shards, and the inputs of `with_more_inputs`: parameters kept unsharded
        are gathered before, and waited for, if they are not there. First it compares with other
        ranks, if this is new, which graph runs next, and waits for them, or with
        `strict_order=False` launches the gathers of all units of the model; and has compute wait
        for the event that `set_post_optim_event` was given. The backward of the results, as it
        begins, notes which of them have no gradient. The function raises RuntimeError if other
        ranks run another graph, or if a parameter is laid out otherwise than when the graph was
        compiled. `compiled` itself is returned if the graph reads no sharded parameter.

        name: of the graph, the same on every rank.
        plans: of the graph and its backward, which `autoshard.plans` gives for each model they run.
        The frame's fields are read now, not at calls.
        """
        if not self.params:
            return compiled
        positions = list(self.local)
        mesh = self.params[0].axes.mesh
        in_table = list(self.positions)
        number_at = {position: number for number, position in enumerate(in_table)}
        numbers = [number_at.get(position) for position in positions]
        extended = [param.is_extended for param in self.local.values()]
        stays = list(self.stays)
        tables = Tables(self.params, plans)
        compiled_for = listed(list(dict.fromkeys(param.unit.name for param in self.params)))

        def call(*args: Any) -> Any:
            """Compare with other ranks which graph runs next, then run `compiled` over shards.

            Ranks wait for each other if this is new. With `strict_order=False` the gathers of all
            units of the model are launched instead. Compute waits for the event of
            `set_post_optim_event`. Parameters kept unsharded, and the table's number, are passed,
            too: the former are gathered, and waited for, if they are not there. If there are none,
            the open step's hooks on saved tensors are off while `compiled` runs. Units note the
            forward, whose backward, as it begins, notes which results have no gradient. Raises as
            `Frame.wrap` says.
            """
            values = list(args)
            table = tables.of([values[position] for position in in_table])
            # Blocks that are alike run one graph: which of them runs next has to be told, too.
            what = name if table.where == compiled_for else f"{name}, for {table.where}"
            root, units = table.root, table.units
            if root.is_unordered:  # other ranks may run another graph, or none
                unordered.gather_all(root)
                steps_of(root).backward_ran = False
            else:
                forward_order.take(describe_forward(root, what, units), mesh)
            wait_for_optimizer(root)
            kept = _kept_unsharded([table[number] for number in stays]) if stays else []
            params = [values[position] for position in positions]
            known = table.params()
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
            _watch_backward(results, table, step)
            return results

        return call


def _watch_backward(results: Any, table: Table, step: steps.Step | None = None) -> None:
    """Have the backward of `results` tell `table`, as it begins, which of them have no gradient.

    It tells `step`, too, that backward begins, which may launch gathers. Results without a compiled
    backward are left alone. Backward raises RuntimeError for a gradient that is a DTensor, unless
    one of the results is a DTensor.
    """
    node = _torch.aot.compiled_node(results) if isinstance(results, (list, tuple)) else None
    if node is None:
        return
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
        unused = (number for number, at in enumerate(positions) if grads[at] is None)
        table.unused_outputs = frozenset(unused)

    node.register_prehook(note)


def sharded_parameters(example_inputs: Sequence[Any]) -> list[ShardedParam]:
    """Sharded parameters among the inputs of a captured graph, in order.

    A parameter that was put in the place of a sharded one since counts: that is refreshed here; see
    `resolve`, whose errors it raises.
    """
    found = (resolve(value) for value in example_inputs if isinstance(value, Tensor))
    return [param for param in found if param is not None]


def follow_replaced(example_inputs: Sequence[Any]) -> bool:
    """Have units take note of parameters among the inputs that were replaced or converted.

    Returns whether there are any. The graph was then traced with what stood there before (of
    another dtype, or with ties undone), so that it has to be traced again. Hooks that a broken-off
    backward has set aside are put back, too. Raises as `ShardedParam.refresh`: ValueError for a
    replacement that is not sharded alike, TypeError for half an all-gather extension.
    """
    changed = False
    for value in example_inputs:
        if isinstance(value, Tensor):
            known = find(value)
            if known is not None:
                changed |= known.refresh()
            elif isinstance(value, DTensor):
                changed |= resolve(value) is not None
    return changed


def make_frame(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Frame:
    """Rewrite Dynamo's `gm` in place: take local shards, give markers their parameters' numbers.

    A marker is the op that gathers a parameter; parameters have numbers from 0, in the order of
    their first markers. Parameters that the graph uses as DTensors (in a user's own DTensor code)
    are still taken as DTensors. Dynamo is kept from guarding layouts that the tables look at. To
    compile an all-gather extension its methods are called (`extensions.spell_out`).
    Raises ValueError for a marker of something else than a parameter, for a parameter that is
    written to, or read under no_grad and used with gradients, or whose all-gather extension can't
    be compiled.
    """
    frame = Frame(gm, list(example_inputs))
    placeholders = gm.graph.find_nodes(op="placeholder")
    known: dict[fx.Node, ShardedParam] = {}
    for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        param = resolve(value) if isinstance(value, Tensor) else None
        if param is None:
            continue
        known[node] = param
        if _only_read_locally(node):
            frame.local[position] = param
            frame.inputs[position] = _localize(node, as_stand_in=param.is_extended)
    numbers: dict[ShardedParam, int] = {}
    staying: set[int] = set()
    _number_markers(gm, known, numbers, staying)
    frame.params = list(numbers)
    position_of = {known[node]: at for at, node in enumerate(placeholders) if node in known}
    frame.positions = [position_of[param] for param in frame.params]
    frame.stays = sorted(staying)
    looked_at = frame.local.keys() & set(frame.positions)  # by the tables, when the frame runs
    dtensors = {at: each for at, each in enumerate(example_inputs) if isinstance(each, DTensor)}
    _torch.dynamo.leave_layouts_unguarded(
        [dtensors.pop(at) for at in looked_at if at in dtensors], list(dtensors.values())
    )
    gm.recompile()
    return frame


def _only_read_locally(node: fx.Node) -> bool:
    """Tell whether `node`, a DTensor, is only asked for its local tensor, here or in a subgraph.

    False if nothing uses it.
    """
    if not node.users:
        return False
    for user in node.users:
        if _torch.dynamo.is_to_local(user):
            continue
        inner = _inside(user, node)
        if not inner or not all(map(_only_read_locally, inner)):
            return False
    return True


def _localize(node: fx.Node, *, as_stand_in: bool) -> Any:
    """Make `node`, a DTensor, the local tensor itself, or its stand-in, in subgraphs, too.

    Nodes that asked for its local tensor are replaced by it, and erased.
    as_stand_in: for an extended parameter; see `extensions.py`.
    Returns an example of what `node` is now.
    """
    fake = node.meta["example_value"]
    with torch.no_grad():
        local = _torch.dtensor.local_tensor(fake).detach()
        if as_stand_in:
            local = _example_of_stand_in(local)
        local.requires_grad_(fake.requires_grad)
    node.meta["example_value"] = local
    for user in list(node.users):
        if _torch.dynamo.is_to_local(user):
            user.replace_all_uses_with(node)
            user.graph.erase_node(user)
        else:
            for inner in _inside(user, node):
                _localize(inner, as_stand_in=as_stand_in)
    return local


def _example_of_stand_in(shard: Tensor) -> Tensor:
    """Make a fake stand-in for `shard`, which is fake, or a subclass with fake parts."""
    part: Any = shard
    while not isinstance(part, _torch.tensors.FakeTensor):
        part = getattr(part, part.__tensor_flatten__()[0][0])
    with part.fake_mode:
        return extensions.stand_in(torch.empty(shard.shape, dtype=shard.dtype, device=shard.device))


def _number_markers(
    gm: fx.GraphModule,
    known: dict[fx.Node, ShardedParam],
    numbers: dict[ShardedParam, int],
    staying: set[int],
) -> None:
    """Give each marker in `gm`, and in its subgraphs, its parameter's number.

    known:   the parameter behind each input of `gm` that is one.
    numbers: filled here: a parameter's number, in the order of their first markers.
    staying: filled here: numbers of parameters that the runtime keeps unsharded.

    A marker of an extended parameter is replaced by what `extensions.spell_out` makes. Subgraphs
    are recompiled, `gm` is not. Raises ValueError as `make_frame` does.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _UNSHARD:
            shard = node.args[0]
            source = shard.args[0] if _torch.dynamo.is_to_local(shard) else shard
            param = known.get(source)
            if param is None:
                raise ValueError(
                    f"%{node.name} gathers %{source.name}, which is no parameter of the model"
                )
            _check_uses(node, param)
            number = numbers.setdefault(param, len(numbers))
            options = Unshard.of(node).options
            if options.asks:
                _spell_out(node, param, number)
                continue
            node.args = (*node.args[:-1], number)
            if options.stays:
                staying.add(number)
        for subgraph in _subgraphs(node):
            inner = {
                placeholder: known[operand]
                for placeholder, operand in _operands(node, subgraph)
                if operand in known
            }
            _number_markers(subgraph, inner, numbers, staying)
            subgraph.recompile()


def _spell_out(marker: fx.Node, param: ShardedParam, number: int) -> None:
    """Replace `marker`, of an extended parameter, by a call that asks its shard what to gather.

    The extension's methods are called, to see whether that can be compiled; raises as
    `extensions.spell_out` if not.
    """
    asked = Unshard.of(marker)
    gather = extensions.spell_out(
        param, asked.members, asked.group, asked.is_kept, number, asked.options.show()
    )
    with marker.graph.inserting_before(marker):
        whole = marker.graph.call_function(gather, (marker.args[0],))
    whole.meta = dict(marker.meta)
    marker.replace_all_uses_with(whole)
    marker.graph.erase_node(marker)


def _check_uses(marker: fx.Node, param: ShardedParam) -> None:
    """Raise ValueError if the graph uses the gathered copy of `param` in a way that is lost.

    That is a write to the copy, or a read under no_grad whose result is used with gradients.
    """
    whole = marker.meta["example_value"]
    if whole._version:
        raise ValueError(
            f"parameter {param.name} is written to in forward, where it is a gathered copy: write "
            "to it outside of forward"
        )
    if param.param.requires_grad and not whole.requires_grad and _is_used_with_grad(marker):
        raise ValueError(
            f"parameter {param.name} is read under torch.no_grad() and used outside of it: read "
            "it where it is used"
        )


def _is_used_with_grad(marker: fx.Node) -> bool:
    """Tell whether `marker`, read under no_grad, is used where the graph has enabled gradients."""
    enabled = False  # as it is at the marker
    node = marker.next
    while node.op != "output":
        if node.target is _torch.autograd.set_grad_enabled:
            enabled = bool(node.args[0])
        elif enabled and marker in node.all_input_nodes:
            return True
        node = node.next
    return False


def _subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    """Graph modules that `node`, a higher-order op, calls; none for any other node."""
    if node.op != "call_function" or node.graph.owning_module is None:
        return []
    found = []
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            value = getattr(node.graph.owning_module, str(arg.target), None)
            if isinstance(value, fx.GraphModule):
                found.append(value)
    return found


def _operands(node: fx.Node, subgraph: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of an input of `subgraph`, and the node that `node`, a higher-order op, passes for it.

    The operands of such an op are its last arguments, one for each input of the subgraph. There are
    no pairs for a subgraph with more inputs than `node` has arguments, as the backward of an
    autograd.Function is.
    """
    placeholders = subgraph.graph.find_nodes(op="placeholder")
    if len(placeholders) > len(node.args):
        return []
    passed = node.args[len(node.args) - len(placeholders) :]
    return [
        (placeholder, operand)
        for placeholder, operand in zip(placeholders, passed, strict=True)
        if isinstance(operand, fx.Node)
    ]


def _inside(user: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Inputs of `user`'s subgraphs that stand for `node`; none if it has no subgraphs."""
    return [
        placeholder
        for subgraph in _subgraphs(user)
        for placeholder, operand in _operands(user, subgraph)
        if operand is node
    ]


def _example_of_unsharded(param: ShardedParam) -> Tensor:
    """Make an uninitialized unsharded `param`, in the dtype for its unit's mode (train or eval)."""
    in_full = param.unit.asks_for_full_precision
    member = param.unit.gathered_member(param, in_full_precision=in_full)
    return torch.empty(member.size, dtype=member.dtype, device=param.device)


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
    unit.describe()


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
        `owners`, which are those of `params`. Kept
        for backward: which values the parameters have, and in which dtype `.grad` is to be, by the
        mode (train or eval) of now.
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
        unmanaged.note_backward()
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
            if kept_as is not None:  # exact: it was reduced in that dtype
                param.grad_dtype, grad = kept_as, grad.to(kept_as)
            whole = sharded.grad_from(grad)
            if _torch.autograd.accumulates_gradient(leaf):
                reduce.make_room(sharded)
                used.add(sharded)
                if param.grad is None and not _torch.autograd.has_hooks(param):
                    param.grad = whole  # autograd would make a second DTensor of it
                    handed_on.append(None)
                    continue
            handed_on.append(whole)
        if is_left:
            # A nested backward, a reentrant checkpoint's, is not the end of the others' gradients.
            units = {sharded.unit for sharded in ctx.sharded}
            for owner in units if _torch.autograd.in_nested_backward() else {ctx.table.root}:
                steps.close_compiled(owner)
        for unit in {sharded.unit for sharded in used}:
            reduce.fill_unused(unit, used)
        return None, None, None, None, *handed_on
