"""Units: parameters that are gathered, and whose gradients are reduced, together."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn

from autoshard import _torch
from autoshard.passes.ir.layout import Member
from autoshard.runtime.comm.mesh import Axes
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.reduce import Reducer
from autoshard.runtime.unit.settings import UnitSettings

if TYPE_CHECKING:
    from autoshard.runtime.unit.unsharded import Unsharded
    from autoshard.runtime.unit.uses import Use

T = TypeVar("T")

ROOT_NAME = "root"
UNIT = "_autoshard_unit"  # module attribute: the unit that the module heads
SHOWN = 3  # names in a list

heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that head a unit."""


@dataclass(eq=False)
class Unit:
    """Unit of modules: their parameters, less those of nested units, are gathered together.

    name:    of its first module, from the outermost sharded module; "root" for that one.
    is_root: no other unit's module contains this one's; set by the enclosing call.
    kept: unsharded parameters that stay beyond a step, as `unshard()` asks or settings say.
    is_unsharded_by_user: True from `unshard()` to `reshard()`.
    shows_unsharded: `parameters()` gives unsharded ones: from `unshard()` to the next backward.
    computes_in_full_precision: whether the latest forward does; see `note_mode`.
    uses: forwards that have read its parameters; see uses.py.

    The eager and the compiled runtime keep their own data with a unit by `state`.
    """

    modules: tuple[nn.Module, ...]
    axes: Axes
    settings: UnitSettings = field(default_factory=UnitSettings)
    name: str = ROOT_NAME
    is_root: bool = True
    params: list[ShardedParam] = field(default_factory=list)
    reducer: Reducer = field(default_factory=Reducer)
    kept: Unsharded | None = None
    is_unsharded_by_user: bool = False
    shows_unsharded: bool = False
    computes_in_full_precision: bool = False
    uses: weakref.WeakSet[Use] = field(default_factory=weakref.WeakSet)
    _gathers: dict[bool, str] = field(default_factory=dict)  # by computes_in_full_precision
    _states: dict[type[Any], Any] = field(default_factory=dict)

    def state(self, kind: type[T]) -> T:
        """Return the object of class `kind` that is kept with this unit; made at the first call."""
        known = self._states.get(kind)
        if known is None:
            known = self._states[kind] = kind()
        return cast(T, known)

    def configure(self, **changes: Any) -> None:
        """Change fields of `settings`, given by name, and update what markers say of them."""
        self.settings = dataclasses.replace(self.settings, **changes)
        self.update_markers()

    @property
    def compared_settings(self) -> list[str]:
        """Settings of this unit, other than defaults, that decide about its collectives, as text.

        Ranks compare them before a forward. Left out is whether gradients wait, which changes
        within a step: that shows in what backward reduces.
        """
        own, found = self.settings, []
        if own.smaller is not None:
            found.append(f"reshard_after_forward={own.smaller.shard_world}")
        elif self.reshards == self.is_root:
            found.append(f"reshard_after_forward={self.reshards}")
        for value, default, name in (
            (own.reshard_after_backward, True, "reshard_after_backward"),
            (own.unshard_in_backward, True, "unshard_in_backward"),
            (own.forward_prefetch, 1, "forward_prefetch"),
            (own.backward_prefetch, 1, "backward_prefetch"),
            (own.prefetches_after_backward, False, "prefetches_after_backward"),
            (own.mp.param_dtype, None, "param_dtype"),
            (own.mp.reduce_dtype, None, "reduce_dtype"),
            (self.reducer.all_reduces, True, "requires_all_reduce"),
            (self.reducer.divide_by, None, "gradient_divide_factor"),
            (self.reducer.sends_unused, False, "sends_unused"),
            (own.strict_order, True, "strict_order"),
        ):
            if value != default:
                found.append(f"{name}={value}")
        if self.reducer.comm_hook is not None:
            found.append("a hook that communicates")
        if own.all_gather is not None:
            found.append("an all-gather of its own")
        if self.reducer.reduce_scatter is not None:
            found.append("a reduce-scatter of its own")
        if self.reducer.scatter_group:
            found.append("a group of its own for reduces")
        if own.next_in_forward is not None:
            found.append(f"forward prefetch of {listed([u.name for u in own.next_in_forward])}")
        if own.next_in_backward is not None:
            found.append(f"backward prefetch of {listed([u.name for u in own.next_in_backward])}")
        return found

    @property
    def is_unordered(self) -> bool:
        """Tell whether ranks need not run its modules in one order: see eager/unordered.py."""
        return not self.settings.strict_order and self.axes.num_ranks > 1

    @property
    def lends(self) -> bool:
        """Tell whether `parameters()` gives unsharded ones between forward and backward.

        It does, like FSDP2, where the user set FSDP2's argument `reshard_after_forward=False`,
        parameters are cut, and the order is strict. Otherwise it gives sharded ones, which
        `torch.autograd.grad` takes.
        """
        is_told = self.settings.reshard_after_forward is False and self.settings.is_by_fsdp2
        return is_told and self.world > 1 and not self.is_unordered

    @property
    def reshards(self) -> bool:
        """Tell whether its unsharded parameters are dropped after forward, for backward to gather.

        By default they are, but for the root's. Never with `strict_order=False`.
        """
        if self.is_unordered:
            return False
        if self.settings.reshard_after_forward is None:
            return not self.is_root
        return self.settings.reshard_after_forward

    @property
    def keeps_after_backward(self) -> bool:
        """Tell whether its unsharded parameters outlive backward, by its settings.

        They do if the settings say so; also if they stay after forward and gradients wait, so that
        there will be another backward before the update. Never with `strict_order=False`.
        """
        if self.is_unordered:
            return False
        return not self.settings.reshard_after_backward or not (self.reshards or self.reducer.syncs)

    @property
    def stays(self) -> bool:
        """Tell whether the runtime, not the graph, gathers its parameters for compiled code.

        It does where they are kept unsharded already, or are to be after backward, or with an
        all-gather of the unit's own, or `strict_order=False`. Never where they are not cut.
        """
        if self.is_unordered:
            return self.world > 1
        is_kept = self.is_unsharded_by_user or self.kept is not None
        has_own = self.settings.all_gather is not None  # which only the runtime can use
        return self.world > 1 and (self.keeps_after_backward or is_kept or has_own)

    @property
    def world(self) -> int:
        """Number of ranks that its parameters are cut over."""
        return self.axes.shard_world

    @functools.cached_property
    def identity(self) -> str:
        """Digest of the unit: the same on every rank, whatever else a rank has sharded.

        Made of its name, and the names, sizes and dtypes of its parameters at the first call.
        """
        members = [(param.name, str(param.member)) for param in self.params]
        return hashlib.sha256(repr((self.name, members)).encode()).hexdigest()[:16]

    def take(self, param: ShardedParam) -> None:
        """Make `param` this unit's, moving it here if it is another unit's; update its markers.

        Raises TypeError if its shard has only one of the two methods of an all-gather extension.
        """
        previous = getattr(param, "unit", None)
        if previous is not None:
            previous.params.remove(param)
        param.unit = self
        self.params.append(param)
        param.update_markers()

    @property
    def gather(self) -> str:
        """Name of its gather, as ranks compare it: "the gather of layers.3 (float32: 576 bytes)".

        In the precision of the latest forward. Made once for each, until markers are updated.
        """
        known = self._gathers.get(self.computes_in_full_precision)
        if known is None:
            num_bytes: dict[str, int] = {}
            for member in map(self.gathered_member, self.params):
                dtype = str(member.dtype).removeprefix("torch.")
                num_bytes[dtype] = num_bytes.get(dtype, 0) + member.num_bytes
            sent = ", ".join(f"{dtype}: {number} bytes" for dtype, number in num_bytes.items())
            known = f"the gather of {self.name}{f' ({sent})' if sent else ''}"
            self._gathers[self.computes_in_full_precision] = known
        return known

    def update_markers(self) -> None:
        """Update what its parameters' markers say of how it gathers and reduces.

        To be called after each change of that; see `ShardedParam.describe`.
        """
        self._gathers = {}
        for param in self.params:
            param.update_markers()

    def gathered_member(
        self, param: ShardedParam, *, in_full_precision: bool | None = None
    ) -> Member:
        """Member of `param` as it is gathered, in the dtype that forward computes with.

        That is the policy's `param_dtype`, if it has one. In full precision, or if the parameter is
        not of floating point, it is the parameter's own.
        in_full_precision: None: as the latest forward does.
        """
        own, wanted = param.member.dtype, self.settings.mp.param_dtype
        if in_full_precision is None:
            in_full_precision = self.computes_in_full_precision
        if wanted is None or not own.is_floating_point or in_full_precision:
            return param.member
        return Member(wanted, param.member.size, param.member.dim)

    def reduced_member(self, param: ShardedParam, dtype: torch.dtype) -> Member:
        """Member of `param`'s gradient, computed in `dtype`, as it is reduced.

        In the policy's `reduce_dtype`, if it has one and `dtype` is of floating point; else in
        `dtype`.
        """
        if self.settings.mp.reduce_dtype is not None and dtype.is_floating_point:
            dtype = self.settings.mp.reduce_dtype
        return Member(dtype, param.member.size, param.member.dim)

    @property
    def asks_for_full_precision(self) -> bool:
        """Tell whether a forward that begins now, in this mode, is to compute in full precision."""
        return self.settings.mp.full_precision_in_eval and not self.modules[0].training

    def note_mode(self) -> None:
        """Note, as a forward begins, in which precision it and its backward compute.

        Sets `computes_in_full_precision`, by the mode (train or eval) and the policy.
        """
        self.computes_in_full_precision = self.asks_for_full_precision

    def check_may_wait(self) -> None:
        """Raise RuntimeError if its gradients can't wait for a later backward to be reduced.

        They can't where a parameter has hooks for after its gradient is accumulated.
        """
        hooked = [p.name for p in self.params if _torch.autograd.hooks_after_accumulation(p.param)]
        if hooked:
            raise RuntimeError(
                f"parameters {hooked[:4]} have hooks for after their gradient is accumulated (an "
                "optimizer in backward), which can't be combined with gradients that are not "
                "reduced: reduce in every backward, or step the optimizer after the last"
            )

    def check_may_return(self) -> None:
        """Raise NotImplementedError if `torch.autograd.grad` can't return its gradients.

        With `strict_order=False` they only go to `.grad`.
        """
        if self.is_unordered:
            raise NotImplementedError(
                f"torch.autograd.grad() wants gradients of unit {self.name!r}, which other ranks "
                "may not have reached, as strict_order=False: call backward(), at whose end all is "
                "reduced, and read .grad"
            )

    def make_ready(self) -> None:
        """Prepare for a gather: follow what was done to the parameters since.

        See `ShardedParam.refresh`. Nothing is moved or launched.
        Raises RuntimeError, naming them, if some are still on the meta device, or, if they are to
        be offloaded, not in host memory; ValueError if one was replaced by one that is sharded
        otherwise; TypeError if a shard has only one of the two methods of an all-gather extension.
        """
        for param in self.params:
            param.refresh()
        if self.settings.is_offloaded:
            off = [p.name for p in self.params if p.shard.device.type not in ("cpu", "meta")]
            if off:
                raise RuntimeError(
                    f"parameters {off} of unit {self.name!r} are not in host memory, where its "
                    "offload policy keeps them: materialise and load them with device='cpu'"
                )
        meta = [param.name for param in self.params if param.shard.is_meta]
        if meta:
            raise RuntimeError(
                f"parameters {meta} of unit {self.name!r} are still on the meta device: before the "
                "first forward call autoshard.load_pretrained(model, folder), for adapters that "
                "were trained also with their folder; or call model.to_empty(device=...) and "
                "initialise them"
            )


def listed(names: Sequence[str]) -> str:
    """Join the first SHOWN of `names`, with a digest of all if there are more."""
    if len(names) <= SHOWN:
        return ", ".join(names)
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more ({digest})"


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that `module` heads, if it heads one."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


def units_below(unit: Unit) -> list[Unit]:
    """List `unit`, and the units that modules inside its own head, in the order of the modules."""
    found = {unit_of(each): None for module in unit.modules for each in module.modules()}
    return [each for each in found if each is not None]


@dataclass
class _Root:
    """Root of the model that a unit is of, as it was last found."""

    unit: Callable[[], Unit | None] = lambda: None


def root_unit(unit: Unit) -> Unit:
    """Return the unit of the outermost sharded module that `unit` is in.

    It is remembered for as long as it is a root. A unit without parameters is its own.
    """
    if unit.is_root or not unit.params:
        return unit
    known = unit.state(_Root)
    root = known.unit()
    if root is None or not root.is_root:
        root = unit_of(root_of(unit.params[0]))
        assert root is not None
        known.unit = weakref.ref(root)
    return root


def root_of(param: ShardedParam) -> nn.Module:
    """Return the outermost sharded module that `param` is in."""
    wanted = param.registrations[0][0]
    around = [head for head in heads if any(each is wanted for each in head.modules())]
    return max(around, key=lambda head: sum(1 for _ in head.modules()))
