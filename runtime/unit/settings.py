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
    mp, offload: in which dtypes it works, and where its shards live.
    smaller: after forward, shards over fewer ranks are kept, from which backward gathers.
    reshard_after_backward: False keeps unsharded parameters for the next forward.
    unshard_in_backward: False if backward needs none of its parameters (an embedding's).
    forward_prefetch, backward_prefetch: how many units to gather ahead, of those that
        followed it in the step before; next_in_forward, next_in_backward: or these.
    prefetches_after_backward: only when its own gradients are in.
    limits_gathers: whether the host waits rather than launch many gathers ahead of the device.
    strict_order: whether ranks run its modules in one order; see eager/unordered.py.
    is_by_fsdp2: whether it is told by `fully_shard`, not by `shard` with a strategy.
    all_gather: in place of ours.
    allocates: whose memory that, and the reduce-scatter, are for; None: they are the user's.
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
