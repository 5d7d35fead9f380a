"""Units: parameters that are gathered, and whose gradients are reduced, together."""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoshard.passes.ir.layout import Member
from autoshard.passes.ir.plan import Plan
from autoshard.runtime.comm.custom_comms import Comm
from autoshard.runtime.comm.mesh import Axes
from autoshard.runtime.ranks.agreement import Agreed, Order
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from autoshard.runtime.unit.reduce import Reducer, Reduction, forget

if TYPE_CHECKING:
    from autoshard.runtime.eager.saved import Held
    from autoshard.runtime.eager.step import Step
    from autoshard.runtime.eager.tokens import Tokens
    from autoshard.runtime.unit.unsharded import Whole
    from autoshard.runtime.unit.uses import Use

ROOT_NAME = "root"
UNIT = "_autoshard_unit"  # module attribute: the unit that the module heads
SHOWN = 3  # names in a list


@dataclass(eq=False)
class Unit:
    """Unit of modules: their parameters, less those of nested units, are gathered together.

    name:    of its first module, from the outermost sharded module; "root" for that one.
    is_root: no other unit's module contains this one's; set by the enclosing call.
    reshard_after_forward: True frees unsharded parameters after forward and gathers them
        again in backward; False keeps them; None means True except for the root,
        whose parameters backward would want right away.
    reshard_after_backward: False keeps unsharded parameters for the next forward.
    unshard_in_backward: False if backward needs none of its parameters (an embedding's).
    forward_prefetch, backward_prefetch: how many units to gather ahead, of those that
        followed it in the step before; next_in_forward, next_in_backward: or these.
    prefetches_after_backward: only when its own gradients are in.
    kept: unsharded parameters beyond a step: asked for, or kept after backward.
    held: what stays of unsharded parameters from forward to backward, unless it is resharded.
    is_unsharded_by_user: from `unshard()` to `reshard()`; reading: the step of reads meanwhile.
    smaller: after forward, shards over fewer ranks are kept, from which backward gathers.
    limits_gathers: whether the host waits rather than launch many gathers ahead of the device.
    all_gather: in place of ours.
    allocates: whose memory that, and the reduce-scatter, are for; None: they are the user's.
    post_optim_event: what the first gather of the next step it owns waits for.
    is_last_backward: False: reduces need not be over when a backward of steps it owns is;
        they are `carried` on to the next.
    """

    modules: tuple[nn.Module, ...]
    axes: Axes
    reshard_after_forward: bool | None
    mp: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    name: str = ROOT_NAME
    is_root: bool = True
    params: list[ShardedParam] = field(default_factory=list)
    last_step: Step | None = None  # the latest step that gathered it
    last_order: tuple[Unit, ...] = ()  # what the latest step that it owned gathered, in order
    orders: dict[str, Order] = field(default_factory=dict)  # phase -> of the steps that it owns
    agreed: Agreed = field(default_factory=set)
    known_plans: dict[str, list[Plan]] = field(default_factory=dict)  # by frame, which ranks share
    kept_params: dict[str, frozenset[str]] = field(default_factory=dict)  # likewise
    backward_ran: bool = True  # since the latest forward that it owned
    misses_plans: bool = False  # of graphs that torch's caches have: nothing is taken from them
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    prefetches_after_backward: bool = False
    next_in_forward: list[Unit] | None = None
    next_in_backward: list[Unit] | None = None
    kept: Whole | None = None
    held: weakref.WeakSet[Held | Tokens] = field(default_factory=weakref.WeakSet)
    is_unsharded_by_user: bool = False
    reading: Step | None = None
    reducer: Reducer = field(default_factory=Reducer)
    smaller: Axes | None = None
    limits_gathers: bool = True
    post_optim_event: Any = None
    all_gather: Comm | None = None
    allocates: str | None = None
    computes_in_full_precision: bool = False
    is_last_backward: bool = True
    carried: list[Reduction] = field(default_factory=list)
    closed_in: int = -1  # the latest backward that ran compiled code of its model
    shows_whole: bool = False  # to `parameters()`, from `unshard()` to the next backward
    strict_order: bool = True  # see eager/unordered.py
    is_by_fsdp2: bool = True  # made by `fully_shard`, not by `shard` with a strategy
    reduced_in: int = -1  # the latest backward at whose end all of its units were reduced
    uses: weakref.WeakSet[Use] = field(default_factory=weakref.WeakSet)  # see uses.py
    _gathers: dict[bool, str] = field(default_factory=dict)  # by computes_in_full_precision

    def forward_of(self, what: str, units: Iterable[Unit]) -> str:
        """Describe a forward that this unit owns and that uses `units`, as ranks compare it.

        what: its name. Added are the settings of `units`, and whether no backward came since the
            forward before: so a rank that left out a backward, which others are in, is noticed.
        """
        ran, self.backward_ran = self.backward_ran, False
        told: dict[str, list[str]] = {}  # by setting: in which units
        for unit in units:
            for setting in unit.settings:
                told.setdefault(setting, []).append(unit.name)
        parts = [f"{setting} in {listed(names)}" for setting, names in told.items()]
        if not ran:
            parts.append("no backward since the forward before")
        return f"{what}, with {', '.join(parts)}" if parts else what

    @property
    def settings(self) -> list[str]:
        """Settings of this unit, other than defaults, that decide about its collectives, as text.

        Not whether gradients wait, which changes within a step: it shows in what backward reduces.
        """
        found = []
        if self.smaller is not None:
            found.append(f"reshard_after_forward={self.smaller.shard_world}")
        elif self.reshards == self.is_root:
            found.append(f"reshard_after_forward={self.reshards}")
        for value, default, name in (
            (self.reshard_after_backward, True, "reshard_after_backward"),
            (self.unshard_in_backward, True, "unshard_in_backward"),
            (self.forward_prefetch, 1, "forward_prefetch"),
            (self.backward_prefetch, 1, "backward_prefetch"),
            (self.prefetches_after_backward, False, "prefetches_after_backward"),
            (self.mp.param_dtype, None, "param_dtype"),
            (self.mp.reduce_dtype, None, "reduce_dtype"),
            (self.reducer.all_reduces, True, "requires_all_reduce"),
            (self.reducer.divide_by, None, "gradient_divide_factor"),
            (self.reducer.sends_unused, False, "sends_unused"),
            (self.strict_order, True, "strict_order"),
        ):
            if value != default:
                found.append(f"{name}={value}")
        if self.reducer.comm_hook is not None:
            found.append("a hook that communicates")
        if self.all_gather is not None:
            found.append("an all-gather of its own")
        if self.reducer.reduce_scatter is not None:
            found.append("a reduce-scatter of its own")
        if self.reducer.scatter_group:
            found.append("a group of its own for reduces")
        if self.next_in_forward is not None:
            found.append(f"forward prefetch of {listed([u.name for u in self.next_in_forward])}")
        if self.next_in_backward is not None:
            found.append(f"backward prefetch of {listed([u.name for u in self.next_in_backward])}")
        return found

    @property
    def is_unordered(self) -> bool:
        """Tell whether ranks need not run its modules in one order: see eager/unordered.py."""
        return not self.strict_order and self.axes.num_ranks > 1

    @property
    def lends(self) -> bool:
        """Tell whether `parameters()` gives unsharded ones between forward and backward.

        FSDP2's does, and so does ours if the user asked for that by FSDP2's argument. Otherwise it
        gives what `torch.autograd.grad` takes.
        """
        is_told = self.reshard_after_forward is False and self.is_by_fsdp2
        return is_told and self.world > 1 and not self.is_unordered

    @property
    def reshards(self) -> bool:
        if self.is_unordered:
            return False
        if self.reshard_after_forward is None:
            return not self.is_root
        return self.reshard_after_forward

    @property
    def keeps_after_backward(self) -> bool:
        """Tell whether its unsharded parameters outlive backward.

        They do also if they were kept from forward, and gradients wait, so that there will be
        another backward before the update.
        """
        if self.is_unordered:
            return False
        return not self.reshard_after_backward or not (self.reshards or self.reducer.syncs)

    @property
    def stays(self) -> bool:
        """Tell whether compiled code finds its parameters unsharded, or is to leave them so."""
        if self.is_unordered:
            return self.world > 1
        is_kept = self.is_unsharded_by_user or self.kept is not None
        has_own = self.all_gather is not None  # which only the runtime can use
        return self.world > 1 and (self.keeps_after_backward or is_kept or has_own)

    @property
    def world(self) -> int:
        """Number of ranks that its parameters are cut over."""
        return self.axes.shard_world

    def order(self, phase: str) -> Order:
        """Order of collectives in one phase ("forward", "backward") of the steps that it owns."""
        if phase not in self.orders:
            key = f"{self.identity}/{phase}"
            self.orders[phase] = Order(key, f"the {phase} of {self.name}", self.axes.mesh)
        return self.orders[phase]

    @functools.cached_property
    def identity(self) -> str:
        """Digest of the unit: the same on every rank, whatever else a rank has sharded.

        Units that are just alike have the same.
        """
        members = [(param.name, str(param.member)) for param in self.params]
        return hashlib.sha256(repr((self.name, members)).encode()).hexdigest()[:16]

    def take(self, param: ShardedParam) -> None:
        """Make `param` a member, moving it here if it is another unit's."""
        previous = getattr(param, "unit", None)
        if previous is not None:
            previous.params.remove(param)
        param.unit = self
        self.params.append(param)
        param.describe()

    @property
    def gather(self) -> str:
        """Name of its gather, to compare: "the gather of layers.3 (float32: 576 bytes)"."""
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

    def describe(self) -> None:
        """Write down for markers how it gathers and reduces, after a change of that."""
        self._gathers = {}
        for param in self.params:
            param.describe()

    def gathered_member(
        self, param: ShardedParam, *, in_full_precision: bool | None = None
    ) -> Member:
        """Member of `param` as it is gathered, in the dtype that forward computes with.

        in_full_precision: None: as the latest forward does.
        """
        own, wanted = param.member.dtype, self.mp.param_dtype
        if in_full_precision is None:
            in_full_precision = self.computes_in_full_precision
        if wanted is None or not own.is_floating_point or in_full_precision:
            return param.member
        return Member(wanted, param.member.size, param.member.dim)

    def reduced_member(self, param: ShardedParam, dtype: torch.dtype) -> Member:
        """Member of `param`'s gradient, computed in `dtype`, as it is reduced."""
        if self.mp.reduce_dtype is not None and dtype.is_floating_point:
            dtype = self.mp.reduce_dtype
        return Member(dtype, param.member.size, param.member.dim)

    @property
    def asks_for_full_precision(self) -> bool:
        """Tell whether a forward that begins now, in this mode, is to compute in full precision."""
        return self.mp.full_precision_in_eval and not self.modules[0].training

    def note_mode(self) -> None:
        """Note the mode as a forward begins: it, and its backward, compute as that says."""
        self.computes_in_full_precision = self.asks_for_full_precision

    def reshard(self) -> None:
        """Drop unsharded parameters, those that backward is to find in place, too.

        Raises RuntimeError if one of them was written to.
        """
        self.is_unsharded_by_user = False
        kept, self.kept = self.kept, None
        if self.last_step is not None:
            self.last_step.reshard(self)
        try:
            for each in list(self.held):
                each.free()
            if kept is not None:
                kept.check_unwritten()
        finally:
            if kept is not None:
                kept.drop()
            self.describe()

    def check_may_wait(self) -> None:
        """Raise RuntimeError if its gradients can't wait for a later backward to be reduced."""
        hooked = [p.name for p in self.params if getattr(p.param, "_post_accumulate_grad_hooks", 0)]
        if hooked:
            raise RuntimeError(
                f"parameters {hooked[:4]} have hooks for after their gradient is accumulated (an "
                "optimizer in backward), which can't be combined with gradients that are not "
                "reduced: reduce in every backward, or step the optimizer after the last"
            )

    def finish_reduces(self) -> None:
        """Wait for reduces that backwards of its steps have launched, and fill `.grad`."""
        while self.carried:
            self.carried.pop(0).accumulate()

    def reset(self) -> None:
        """Forget unsharded parameters, and gradients on their way to `.grad`."""
        if self.kept is not None:
            self.kept.drop()
        self.kept, self.is_unsharded_by_user = None, False
        self.carried = []
        self.reducer.partial = {}
        for param in self.params:
            forget(param)

    def make_ready(self) -> None:
        """Prepare for a gather: follow what was done to the parameters since the last.

        Raises RuntimeError, naming them, if some are still on the meta device, or, if they are to
        be offloaded, not in host memory.
        """
        for param in self.params:
            param.refresh()
        if self.is_offloaded:
            off = [p.name for p in self.params if p.shard.device.type not in ("cpu", "meta")]
            if off:
                raise RuntimeError(
                    f"parameters {off} of unit {self.name!r} are not in host memory, where its "
                    "offload policy keeps them: materialise and load them with device='cpu'"
                )
        meta = [param.name for param in self.params if param.shard.is_meta]
        if meta:
            raise RuntimeError(
                f"parameters {meta} of unit {self.name!r} are still on the meta device: call "
                "model.to_empty(device=...) and initialise them before the first forward"
            )

    @property
    def is_offloaded(self) -> bool:
        """Tell whether its shards live on the host."""
        return isinstance(self.offload, CPUOffloadPolicy)


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
