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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.passes.ir.match import TABLE
from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.ir.ops import Unshard
from autoshard.passes.planner.costs import GROUPED, PACKED
from autoshard.runtime.comm import transport
from autoshard.runtime.compiled import extensions
from autoshard.runtime.unit.param import ShardedParam, find, resolve

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
        No variable of the user's is behind them; the function that `call_of` makes passes them. For
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
