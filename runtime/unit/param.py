"""Sharded parameters: DTensors of the true global shape, with this rank's rows inside.

The module keeps the DTensor in `_parameters`, so `parameters()`, optimizers and `state_dict()` see
shards of the right global shape. `eager/access.py` decides what a read in forward gives.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autoshard import _torch
from autoshard.errors import UnsupportedError
from autoshard.passes.ir import groups
from autoshard.passes.ir.layout import Member, part_of, show_members
from autoshard.passes.ir.ops import UnshardOptions
from autoshard.runtime.comm import shard_names
from autoshard.runtime.comm.flat_layout import FlatShard
from autoshard.runtime.comm.flat_shard import FlatDTensor
from autoshard.runtime.comm.mesh import Axes, FullMesh, mesh_device
from autoshard.runtime.unit.extensions import has_methods, is_extended
from autoshard.runtime.unit.policies import (
    CPUOffloadPolicy,
    OffloadPolicy,
    OptimizerOffloadPolicy,
)

if TYPE_CHECKING:
    from autoshard.runtime.unit.reduce import Arriving, Pending
    from autoshard.runtime.unit.unit import Unit


_numbers = itertools.count()

Stamp = tuple[int, int, int, int]
"""Stamp that tells the values of a parameter from earlier ones: see `ShardedParam.stamp`."""


class Hooks:
    """Hooks of the user's on a parameter, set aside until its reduced gradient is there.

    Autograd is handed no gradient, and would call the hooks before the reduced one is there. It
    keeps the very dicts that hooks are registered in: so the dicts are emptied and refilled.
    """

    def __init__(self) -> None:
        self._aside: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def set_aside(self, param: Tensor) -> bool:
        """Hide the hooks of `param` from autograd until `put_back()`.

        Returns whether any are hidden, now or since before.
        """
        for hooks in _torch.autograd.hooks_of(param):
            self._aside.append((hooks, dict(hooks)))
            hooks.clear()
        return bool(self._aside)

    def put_back(self) -> None:
        """Put the hidden hooks back, if any, in front of those that were registered since."""
        for hooks, before in self._aside:
            since = dict(hooks)
            hooks.clear()
            hooks.update(before)
            hooks.update(since)
        self._aside = []


@dataclass(frozen=True)
class TensorParallel:
    """Layout of a parameter that was a DTensor before it was sharded: its local tensor is cut.

    size: its global size.
    data_axes: those over which gradients are left to our reduce, as `dp_mesh_dims` names them.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: tuple[int, ...]
    data_axes: tuple[int, ...] = ()

    def wrap(self, local: Tensor) -> DTensor:
        """Make the DTensor that the model computes with from `local`, to which gradients flow back.

        local: the local tensor, unsharded. Its gradient is not summed over `data_axes`.
        """
        keywords: dict[str, Any] = {}
        if self.data_axes:
            keywords["grad_placements"] = [
                Partial() if axis in self.data_axes else placement
                for axis, placement in enumerate(self.placements)
            ]
        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.size),
            stride=torch.empty(self.size, device="meta").stride(),
            **keywords,
        )

    def without(self, axes: tuple[int, ...]) -> TensorParallel | None:
        """Return the same layout over the mesh's axes other than `axes`; None if there are none.

        It has no `data_axes`.
        """
        names = self.mesh.mesh_dim_names or ()
        left = [axis for axis in range(self.mesh.ndim) if axis not in axes]
        if not left:
            return None
        placements = tuple(self.placements[axis] for axis in left)
        return TensorParallel(self.mesh[tuple(names[axis] for axis in left)], placements, self.size)


@dataclass(frozen=True)
class Layout:
    """Layout of a parameter as optimizers see it: over all axes, tensor-parallel ones last."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: tuple[int, ...]
    _specs: dict[torch.dtype, Any] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def cls(self) -> type[DTensor]:
        """Class of the DTensors of this layout."""
        return FlatDTensor if FlatShard() in self.placements else DTensor

    def dtensor(self, shard: Tensor) -> DTensor:
        """DTensor of this layout whose local tensor is `shard`, not copied.

        Nothing is checked, and no gradient flows back to `shard`.
        """
        dtype = shard.dtype
        spec = self._specs.get(dtype)
        if spec is None:
            spec = _torch.dtensor.make_spec(self.mesh, self.placements, self.size, dtype)
            self._specs[dtype] = spec
        return _torch.dtensor.make(self.cls, shard, spec)


def layout_of(axes: Axes, member: Member, tp: TensorParallel | None) -> Layout:
    """Layout of a parameter whose local tensor, `member`, is cut over `axes`.

    tp: the layout that it had as a DTensor before; None if it was none. With one, the result is
        over the axes of both meshes, `axes` first and `tp.data_axes` left out; its size is that of
        the DTensor. A dim that `tp` cuts already gets strided shards over `axes`.
    Raises RuntimeError if the two meshes are no slices of one.
    """
    tp = None if tp is None else tp.without(tp.data_axes)
    if tp is None:
        return Layout(axes.mesh, axes.placements(member), member.size)
    cut_before = [
        tp.mesh.size(axis)
        for axis, placement in enumerate(tp.placements)
        if isinstance(placement, Shard) and placement.dim == member.dim
    ]
    own = tuple(
        _torch.dtensor.strided_shard(member.dim, math.prod(cut_before)) if each.is_shard() else each
        for each in axes.placements(member)
    )
    mesh = _torch.dtensor.join_meshes([axes.mesh, tp.mesh])
    return Layout(mesh, (*own, *tp.placements), tp.size)


MarkerArguments = tuple[str, str, bool, str]
"""Arguments of a marker, the op `unshard`: members, group, keep, reduce; see passes/ir/ops.py."""

MARKER_ARGUMENTS = "_autoshard_marker_arguments"
"""Module attribute: {parameter's attribute: `MarkerArguments`; None where there is more to ask}.

Getters spell the name out, as Dynamo traces that faster."""


@dataclass(eq=False)
class ShardedParam:
    """Sharded parameter, of all modules where it is registered.

    name:   from the outermost sharded module, "layers.3.mlp.w1"; the first name if tied.
    member: its dtype and unsharded size; with `tp`, of the local tensor that it was.
    axes:   the data-parallel mesh that it is cut over.
    param:  the DTensor `nn.Parameter` that all modules share.
    layout: of `param`.
    tp:     the layout that it had as a DTensor before sharding; None if it was none.
    unit:   set by `Unit.take`.
    registrations: every (module, attribute) where it is registered; more than one if tied.
    """

    name: str
    member: Member
    axes: Axes
    param: nn.Parameter
    layout: Layout
    tp: TensorParallel | None = None
    unit: Unit = field(init=False)
    registrations: list[tuple[nn.Module, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Give the parameter a number of its own; nothing waits, and markers say nothing yet.

        Its group, number of ranks and device are those of `axes`. It has no `unit` yet.
        """
        # What the getter hands to the marker under torch.compile: constants to guard on. See
        # `update_markers()`.
        self.marker_arguments: MarkerArguments = ("", "", False, "")
        self.marker_arguments_in_full = self.marker_arguments
        self.follows_mode = False  # the latter holds in eval mode
        self.is_extended = False  # its shard says what is gathered for it: see extensions.py
        self.number = next(_numbers)  # of this one alone: what it says is traced into its graph
        self.group = self.axes.shard_group
        self.world = self.axes.shard_world
        self.device = mesh_device(self.axes.mesh)  # where it is gathered, if not where it lives
        # Gradients of backwards that were not to be reduced: whole, summed, in the dtype
        # of the reduce; see reduce.py.
        self.pending: Pending | None = None
        self.arriving: Arriving | None = None  # of the running backward: see uses.py
        self.hooks = Hooks()  # the user's, on `param`
        self._withheld_in: int | None = None  # number of a backward: see `is_withheld`
        self.num_updates = 0  # steps that torch optimizers have taken with it
        self.is_updated_by_hook = False  # since forward, when its gradient was accumulated
        self.has_planned_states = False  # on the host, as a memory budget decided

    @property
    def is_withheld(self) -> bool:
        """Whether compiled code of the running backward has no gradient for `.grad`.

        A backward that failed may leave it set: it holds for no other.
        """
        return self.is_withheld_in(_torch.autograd.graph_task())

    @is_withheld.setter
    def is_withheld(self, value: bool) -> None:
        self._withheld_in = _torch.autograd.graph_task() if value else None

    def is_withheld_in(self, task: int) -> bool:
        """Tell whether compiled code of backward number `task` has no gradient for `.grad`."""
        return self._withheld_in == task

    @property
    def shard_bytes(self) -> int:
        """Bytes of its shard on the rank that has most."""
        return self.member.chunk_numel(self.world) * self.member.dtype.itemsize

    @property
    def states_offload(self) -> OptimizerOffloadPolicy | None:
        """Policy by which its optimizer states live on the host; None if they live with its shard.

        It is the user's, or that of a plan that has decided so.
        """
        offload = self.unit.settings.offload
        if isinstance(offload, OptimizerOffloadPolicy):
            return offload
        is_planned = self.has_planned_states and not isinstance(offload, CPUOffloadPolicy)
        return OptimizerOffloadPolicy() if is_planned else None

    def update_markers(self) -> None:
        """Update its markers' arguments, also in modules, to how its unit gathers and reduces now.

        Markers are what a read under torch.compile leaves in the graph. To be called after each
        change of that, once it has a unit. Also sets `is_extended` and `follows_mode`.
        Raises TypeError if its shard has only one of the two methods of an extension.
        """
        self.is_extended = is_extended(self.name, self.shard)
        self.follows_mode = self.unit.settings.mp.full_precision_in_eval
        self.marker_arguments = self._description(in_full_precision=False)
        self.marker_arguments_in_full = self._description(in_full_precision=True)
        self.write_markers()

    def write_markers(self) -> None:
        """Write the marker's arguments into each module where the parameter is registered.

        Reads under torch.compile take them from there. They are None if the getter has to ask: with
        tensor parallelism, or if eval mode decides on the dtype. With them goes a name that a
        tied parameter has, "" for others: code for two parameters must run with no single one.
        """
        is_tied = len(self.registrations) > 1
        tie = self.name.removeprefix(f"{self.unit.name}.") if is_tied else ""
        has_to_ask = self.tp is not None or self.follows_mode
        asked = None if has_to_ask else (*self.marker_arguments, tie)
        for module, attribute in self.registrations:
            module.__dict__.setdefault(MARKER_ARGUMENTS, {})[attribute] = asked

    def _description(self, *, in_full_precision: bool) -> MarkerArguments:
        """Make the arguments of a marker, for a forward in full precision or in `param_dtype`.

        Returns (the member as it is gathered, the group of the gather, whether it stays unsharded
        until backward, how its gradient is reduced). The last is text of `UnshardOptions`, which
        also has what else the unit asks for: an extension, offload, gathers by the runtime,
        gradients that wait, a smaller group. It is "" if there is none of that, and the reduce is
        as the gather.
        """
        gathered = self.unit.gathered_member(self, in_full_precision=in_full_precision)
        reduced = self.unit.reduced_member(self, gathered.dtype)
        if reduced.dtype != self.member.dtype:
            reduced = dataclasses.replace(reduced, shard_dtype=self.member.dtype)
        unit, smaller = self.unit, self.unit.settings.smaller
        on_host = unit.settings.is_offloaded
        if on_host:
            reduced = dataclasses.replace(reduced, on_host=True)
        options = UnshardOptions(
            asks=str(self.number) if self.is_extended else "",
            host_device=self.device.type if on_host else "",
            stays=unit.stays,
            waits=not unit.reducer.syncs or unit.is_unordered,
            smaller_group=smaller.shard_group if smaller is not None else "",
        )
        if options != UnshardOptions() or reduced != gathered or self.reduce_group != self.group:
            members = show_members((reduced,))
            options = dataclasses.replace(options, members=members, group=self.reduce_group)
        return show_members((gathered,)), self.group, not unit.reshards, options.show()

    @property
    def reduce_group(self) -> str:
        """Group over which compiled code reduces its gradient, named as `passes.ir.groups` says.

        Just the group of its shards if gradients are to wait, as always with `strict_order=False`.
        Else the unit's own group for reduce-scatters, or that of its shards, joined with that of
        its replicas, which is left out if the unit leaves their all-reduce for later.
        The name is marked as customized in that case, or if the unit's settings ask for another
        reduce than the mean by collectives of ours.
        """
        reducer = self.unit.reducer
        scatter_group = reducer.scatter_group or self.axes.shard_group
        if not reducer.syncs or self.unit.is_unordered:
            return self.axes.shard_group
        if self.axes.replicate_world > 1 and not reducer.all_reduces:
            return groups.customized(scatter_group)
        group = self.axes.reduce_group(scatter_group)
        return groups.customized(group) if reducer.is_custom else group

    @property
    def reduce_axis(self) -> str:
        """Names of the axes of `reduce_group`."""
        reducer = self.unit.reducer
        has_all = reducer.syncs and reducer.all_reduces and not self.unit.is_unordered
        return self.axes.reduce_name if has_all else self.axes.shard_name

    @property
    def shard(self) -> Tensor:
        """Rows of this rank, (local rows, *rest); the storage that optimizers update."""
        return _torch.dtensor.local_tensor(self.param)

    def grad_from(self, shard: Tensor) -> DTensor:
        """Make a gradient for `param`, a DTensor, from this rank's rows of it; no copy."""
        return self.layout.dtensor(shard)

    @property
    def stamp(self) -> Stamp:
        """Stamp of its values: another one once the parameter was written to, or replaced.

        It sees writes to the DTensor, to its local tensor, and by a torch optimizer's step, whose
        foreach and fused kernels count no version.
        """
        param = self.param
        shard = _torch.dtensor.local_tensor(param)
        return id(param), param._version, shard._version, self.num_updates

    def check_unwritten(self, stamp: Stamp) -> None:
        """Raise RuntimeError if the parameter was written to since it had `stamp`."""
        if self.stamp != stamp:
            raise RuntimeError(
                f"parameter {self.name} was modified in place between forward and backward: step "
                "the optimizer, and write to parameters, after backward"
            )

    def refresh(self) -> bool:
        """Follow what was done to it in its modules since; return whether anything was.

        It may have been replaced by another DTensor, as by `load_state_dict(assign=True)`,
        converted, as by `model.to(dtype)`, or have got or lost the methods of an all-gather
        extension. The first replacement found is put into all of its modules. A plain tensor in its
        place is not looked at. For a new dtype or extension its markers are updated.
        Hooks that a broken-off backward left aside are put back, too, which does not count.
        Raises ValueError for a replacement that is not sharded alike, TypeError for one of the two
        methods alone.
        """
        self.hooks.put_back()  # a backward may have broken off
        before = self.param, self.member.dtype, self.is_extended
        for module, attribute in self.registrations:
            param = module._parameters.get(attribute)
            if param is not None and param is not self.param and isinstance(param, DTensor):
                self._replace(param)
                break
        dtype = self.shard.dtype
        if dtype != self.member.dtype:
            self.member = Member(dtype, self.member.size, self.member.dim)
            self.update_markers()
        if has_methods(self.shard) != self.is_extended:
            self.update_markers()
        return self.param is not before[0] or (dtype, self.is_extended) != before[1:]

    def _replace(self, param: nn.Parameter) -> None:
        """Take `param`, which was put in one of the modules, as the parameter in all of them.

        `find` knows it from now on, and still the one before.
        Raises ValueError if it is not sharded as the parameter before it.
        """
        value: Tensor = param.data
        if (
            not isinstance(value, self.layout.cls)
            or tuple(value.shape) != self.layout.size
            or value.placements != self.layout.placements
            or value.device_mesh != self.layout.mesh
        ):
            raise ValueError(
                f"{self.name} was replaced after sharding by {_describe(param)}; expected a "
                f"DTensor of size {list(self.layout.size)} placed as {self.layout.placements} on "
                f"{self.layout.mesh}. "
                "Replace parameters before sharding, or load values with load_state_dict"
            )
        remember_origin(self.param, self)  # so that an optimizer which holds it is told
        self.param = param
        for module, attribute in self.registrations:
            module._parameters[attribute] = param
        remember(self)


def stamps_of(sharded: Iterable[ShardedParam]) -> list[Stamp]:
    """List the stamps of parameters, in order; faster than one by one."""
    pairs = [(each.param, each.num_updates) for each in sharded]
    local = _torch.dtensor.local_tensor
    return [(id(p), p._version, local(p)._version, updates) for p, updates in pairs]


def shard_parameter(
    name: str, param: nn.Parameter, axes: Axes, dim: int, offload: OffloadPolicy
) -> ShardedParam:
    """Make a sharded parameter from a copy of this rank's part of `param`, cut along `dim`.

    The part of a scalar is all of it. It lies where `param` does, or, if `offload` is a
    `CPUOffloadPolicy`, in host memory: if it came from a device, pinned if the policy says so. On
    the meta device it stays.
    The new one requires gradients if `param` does, and has no unit yet. Modules are left as they
    are; `find` knows `param` and the new one, and `shard_names` the new one.
    param: plain, or a DTensor (tensor-parallel), whose local tensor is cut.
    Raises ValueError for a dim other than 0 that ranks can't share evenly, a DTensor on a mesh of
    another device type, or, with `axes.full`, a parameter that is not replicated over the
    data-parallel axes; NotImplementedError for a non-contiguous parameter.
    """
    tp, whole = None, param.detach()
    data_axes = _data_axes(name, whole, axes.full)
    if isinstance(whole, DTensor):
        tp = TensorParallel(whole.device_mesh, whole.placements, tuple(whole.shape), data_axes)
        whole = _torch.dtensor.local_tensor(whole)
        if tp.mesh.device_type != axes.mesh.device_type:
            raise ValueError(
                f"parameter {name} is a DTensor on {tp.mesh}, which is no mesh of "
                f"{axes.mesh.device_type} as {axes.mesh} is: shard over slices of one mesh"
            )
    if not whole.is_contiguous():
        raise NotImplementedError(
            f"parameter {name} is not contiguous (size {list(whole.shape)}, stride "
            f"{list(whole.stride())}): make it so with param.data = param.data.contiguous() "
            "before sharding"
        )
    member = Member(param.dtype, tuple(whole.shape), dim)
    world, rank = axes.shard_world, axes.shard_rank
    if dim > 0 and member.rows % world:
        raise UnsupportedError(
            f"parameter {name} of size {list(whole.shape)} can't be sharded on dim {dim} over "
            f"{world} ranks: only dim 0 may be uneven; give it Shard(0) or FlatShard()"
        )
    layout = layout_of(axes, member, tp)
    with torch.no_grad():
        shard = part_of(whole, member, world, rank)
        if isinstance(offload, CPUOffloadPolicy) and shard.device.type not in ("cpu", "meta"):
            shard = shard.cpu()
            shard = shard.pin_memory() if offload.pin_memory else shard
        sharded = nn.Parameter(layout.dtensor(shard), requires_grad=param.requires_grad)
    made = ShardedParam(name, member, axes, sharded, layout, tp)
    shard_names.add(made)
    remember_origin(param, made)
    remember(made)
    return made


def _data_axes(name: str, whole: Tensor, full: FullMesh | None) -> tuple[int, ...]:
    """Positions of the data-parallel axes of `full`; () if that is None.

    Raises ValueError if `whole`, of parameter `name`, is no DTensor on the mesh of `full`, or is
    not replicated over these axes.
    """
    if full is None:
        return ()
    if not isinstance(whole, DTensor) or whole.device_mesh != full.mesh:
        where = f"a DTensor on {whole.device_mesh}" if isinstance(whole, DTensor) else "no DTensor"
        raise ValueError(
            f"parameter {name} is {where}: with dp_mesh_dims, all parameters should be DTensors on "
            f"the mesh given, {full.mesh}, as distribute_module() makes them"
        )
    names = full.mesh.mesh_dim_names or ()
    for axis in full.data_axes:
        if not isinstance(whole.placements[axis], Replicate):
            raise ValueError(
                f"parameter {name} is placed as {whole.placements[axis]} over the data-parallel "
                f"axis {names[axis]!r}: expected Replicate()"
            )
    return full.data_axes


IGNORED = "_autoshard_ignored"  # parameter attribute: the user asked for it to be left alone


def is_ignored(param: Tensor) -> bool:
    """Tell whether the user asked for `param` to be left alone."""
    return bool(getattr(param, IGNORED, False))


# Which parameter became which: by id, since a Tensor's == is no identity. A parameter from
# before sharding, or replaced, has a weak reference beside it, to tell it from a reused id. The
# sharded one must have none (torch's `_apply` swaps no tensor that is weakly referenced):
# its ShardedParam knows it.
_known: dict[int, tuple[weakref.ref[Tensor] | None, weakref.ref[ShardedParam]]] = {}


def remember_origin(param: Tensor, sharded: ShardedParam) -> None:
    """Let `find` answer `sharded` for `param`, while both live.

    param: what the user may still hold instead: the parameter from before sharding, one that was
        replaced, or an unsharded one of `full_params()`.
    """
    key = id(param)
    _known[key] = (weakref.ref(param, lambda _: _known.pop(key, None)), weakref.ref(sharded))


def remember(sharded: ShardedParam) -> None:
    """Let `find` answer `sharded` for its `param`, for as long as it has that one."""
    key = id(sharded.param)
    _known[key] = (None, weakref.ref(sharded, lambda _: _known.pop(key, None)))


def find(param: object) -> ShardedParam | None:
    """Find the sharded parameter that `param`, from before or after sharding, belongs to.

    None if there is none, or if that lives no more.
    """
    entry = _known.get(id(param))
    if entry is None:
        return None
    origin, sharded = entry[0], entry[1]()
    if origin is not None:
        return sharded if origin() is param else None
    return sharded if sharded is not None and sharded.param is param else None


def lend(sharded: ShardedParam, whole: Tensor) -> Tensor:
    """Mark `whole` as an unsharded copy that `parameters()` gives for `sharded`, and return it.

    An optimizer that holds a marked copy raises at its step.
    """
    setattr(whole, _LENT_BY, sharded.name)
    _lent[id(whole)] = whole
    return whole


_LENT_BY = "_autoshard_lent_by"  # tensor attribute: the parameter that it is a copy of
_lent: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def check_wanted() -> None:
    """Raise RuntimeError if a backward was to give a gradient to a copy that `lend` marked.

    `backward(inputs=...)` marks it, and runs nothing of ours: no graph leads there. Only copies
    that still live are seen.
    """
    for whole in list(_lent.values()):
        if whole.retains_grad:
            raise RuntimeError(
                f"backward(inputs=...) was given a gathered copy of parameter {lent_by(whole)}, "
                "which parameters() gives between forward and backward, so no gradient came to its "
                "shards: pass as inputs what parameters() gave before the forward"
            )


def lent_by(tensor: Tensor) -> str | None:
    """Name of the parameter of which `tensor` is a copy that `lend` marked; None if it is none."""
    name: str | None = getattr(tensor, _LENT_BY, None)
    return name


def resolve(param: Tensor) -> ShardedParam | None:
    """Find the sharded parameter of `param`, also if `param` was put in its place since.

    In that case, looked for only if `param` is a DTensor, the sharded parameter is refreshed, so
    that it has `param`; see `ShardedParam.refresh`, which may raise. None if there is none.
    """
    sharded = find(param)
    if sharded is not None or not isinstance(param, DTensor):
        return sharded
    wanted: object = param
    for _, known in list(_known.values()):
        candidate = known()
        if candidate is not None and any(
            module._parameters.get(attribute) is wanted
            for module, attribute in candidate.registrations
        ):
            candidate.refresh()
            return candidate
    return None


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{type(value.data).__name__} of size {list(value.shape)}"
    return type(value).__name__


def _write_data(param: DTensor, value: object) -> bool:
    """Write `value`, assigned to `param.data`, to this rank's part; tell whether `param` is ours.

    A DTensor of other placements is redistributed, for which ranks wait for each other. Raises
    RuntimeError for a value of another size or dtype, and for one that is no DTensor.
    """
    sharded = find(param)
    if sharded is None or id(sharded.param) != id(param):
        return False
    if not isinstance(value, DTensor) or value.shape != param.shape or value.dtype != param.dtype:
        what = f" {list(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else ""
        raise RuntimeError(
            f"{sharded.name}.data was assigned {type(value).__name__}{what}: a sharded parameter "
            f"stays a DTensor of {list(param.shape)}, {param.dtype}. Convert the model before it "
            "is sharded, and write whole values inside full_params()"
        )
    with torch.no_grad():
        param.copy_(value)
    return True


_torch.dtensor.write_assigned_data(_write_data)
