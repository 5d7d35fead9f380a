"""Settings of a unit: what its user has asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autoshard.runtime.comm.custom_comms import Comm
from autoshard.runtime.comm.mesh import Axes
from autoshard.runtime.unit.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

if TYPE_CHECKING:
    from autoshard.runtime.unit.unit import Unit


@dataclass(frozen=True, eq=False)
class UnitSettings:
    """Settings of one unit, replaced as a whole by `Unit.configure`. Those of reduces: `Reducer`.

    reshard_after_forward: True frees unsharded parameters after forward and gathers them
        again in backward; False keeps them; None means True except for the root,
        whose parameters backward would want right away.
    mp, offload: in which dtypes it works, and what lives on the host between steps.
    smaller: axes over fewer ranks: after forward, shards over these are kept, from which backward
        gathers; None: backward gathers from the parameters' own shards.
    reshard_after_backward: False keeps unsharded parameters for the next forward.
    unshard_in_backward: False if backward needs none of its parameters (an embedding's): it is
        not gathered ahead then.
    forward_prefetch: how many units to gather ahead when forward reads this one, of those that
        followed it in the step before.
    backward_prefetch: the same for backward, in the reverse order of forward.
    next_in_forward, next_in_backward: the units to gather ahead instead, as the user named them.
    prefetches_after_backward: whether backward gathers ahead only when this unit's gradients are
        in, not when it reads the unit.
    limits_gathers: whether the host waits rather than launch many gathers by `all_gather` ahead of
        the device.
    strict_order: whether ranks run its modules in one order; see eager/unordered.py.
    is_by_fsdp2: whether `fully_shard` or its methods set `reshard_after_forward`, not a strategy
        of `shard`.
    all_gather: the all-gather to use; None: ours.
    allocates: "group" or "symmetric", if `all_gather` and the reduce-scatter are torch's in such
        memory; None: they are the user's, or ours.
    """

    reshard_after_forward: bool | None = None
    mp: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    smaller: Axes | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    prefetches_after_backward: bool = False
    next_in_forward: tuple[Unit, ...] | None = None
    next_in_backward: tuple[Unit, ...] | None = None
    limits_gathers: bool = True
    strict_order: bool = True
    is_by_fsdp2: bool = True
    all_gather: Comm | None = None
    allocates: str | None = None

    @property
    def is_offloaded(self) -> bool:
        """Tell whether shards live on the host."""
        return isinstance(self.offload, CPUOffloadPolicy)

    @property
    def is_limited(self) -> bool:
        """Tell whether the host waits for `limiter` before gathers, which are by `all_gather`."""
        return self.limits_gathers and self.all_gather is not None
