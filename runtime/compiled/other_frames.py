"""Memory of a model's other frames, as the planner of one frame counts it.

Where a model is compiled in several frames, by blocks or because graphs break, what all of them
save for backward is in memory together, and they share one budget:

    frames that have run        what they were planned to save
    frames that are to come     as much as this one for each parameter: 32 blocks that are alike
                                share by 32, whichever of them is compiled first

Numbers are those of the largest shards and of the first rank's decisions, so that they are the same
on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from autoshard.passes.planner.update import STATES
from autoshard.runtime.eager.saved import in_checkpoint
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import Unit, root_of, root_unit


@dataclass(frozen=True)
class Others:
    """Memory in use while a frame runs that is not the frame's own.

    num_bytes: of parameters that it does not read, their gradients and two optimizer states; and of
        what frames that have run save for backward.
    per_byte: bytes that frames to come are taken to save for each byte that this one saves.
    """

    num_bytes: int = 0
    per_byte: float = 0.0


@dataclass(eq=False)
class _SavedByFrames:
    """Bytes that frames of a model save for backward, by the names of the parameters they read."""

    num_bytes: dict[frozenset[str], int] = field(default_factory=dict)


def note_saved(root: Unit, params: Iterable[ShardedParam], num_bytes: int) -> None:
    """Note that a frame which reads `params`, of the model of `root`, saves so many bytes.

    A frame that was noted before, for another batch, counts with the larger number; one that saves
    nothing, as without gradients, is not noted.
    """
    if not num_bytes:
        return
    known = root.state(_SavedByFrames).num_bytes
    names = frozenset(param.name for param in params)
    known[names] = max(num_bytes, known.get(names, 0))


def others_of(params: Collection[ShardedParam]) -> Others:
    """Tell what is in memory beside a frame that reads `params`, all of one model.

    There is nothing if these are all of its sharded parameters. In a checkpoint of the user's other
    frames save nothing meanwhile.
    """
    if not params:
        return Others()
    first = next(iter(params))
    read = {param.name for param in params}
    found = (find(each) for each in root_of(first).parameters())
    unread = [param for param in found if param is not None and param.name not in read]
    num_bytes = sum(map(_bytes_with_states, unread))
    if in_checkpoint():
        return Others(num_bytes)
    known: set[str] = set()
    for names, saved_bytes in root_unit(first.unit).state(_SavedByFrames).num_bytes.items():
        if names.isdisjoint(read):
            num_bytes += saved_bytes
            known |= names
    to_come = sum(math.prod(param.member.size) for param in unread if param.name not in known)
    own = sum(math.prod(param.member.size) for param in params)
    return Others(num_bytes, to_come / max(own, 1))


def _bytes_with_states(param: ShardedParam) -> int:
    """Bytes of a shard, and of its gradient and optimizer states, where these are on the device."""
    on_host = param.unit.settings.is_offloaded
    states = 0 if param.states_offload else STATES
    trained = 1 + states if param.param.requires_grad else 0
    return 0 if on_host else param.shard_bytes * (1 + trained)
