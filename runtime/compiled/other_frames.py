"""Memory of a model's other frames, as the planner of one frame counts it.

Where a model is compiled in several frames, by blocks or because graphs break, what all of them
save for backward is in memory together, and they share one budget:

    frames that have run        what they were planned to save, as often as they ran in a step
    frames that are to come     as much as this one for each parameter: 32 blocks that are alike
                                share by 32, whichever of them is compiled first

Numbers are those of the largest shards and of the first rank's decisions, so that they are the same
on all ranks. One graph may run for blocks of several models, or more often than was known when it
was planned: what is then in memory is added up as it runs, and beyond the budget it is a warning.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

from autoshard.passes.ir.plan import show_bytes
from autoshard.passes.planner.update import STATES
from autoshard.runtime.compiled.tables import Table
from autoshard.runtime.eager.saved import in_checkpoint
from autoshard.runtime.eager.step import Step
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import root_of, root_unit


@dataclass(frozen=True)
class Others:
    """Memory in use while a frame runs that is not the frame's own.

    num_bytes: of parameters that it does not read, their gradients and two optimizer states; and of
        what frames that have run save for backward.
    per_byte: bytes that frames to come are taken to save for each byte that this one saves.
    is_alone: whether the frame reads all of the model's parameters.
    """

    num_bytes: int = 0
    per_byte: float = 0.0
    is_alone: bool = True


@dataclass(frozen=True)
class PlannedBytes:
    """Memory that a frame was planned to use, under a memory budget.

    saved: for backward; 0 if it has none.
    peak: of its graphs, with what they save; 0 if that is not known.
    budget: for all that is in memory.
    """

    saved: int
    peak: int
    budget: int


@dataclass(eq=False)
class _Frames:
    """Frames of a model that have run: the tables that their graphs run with.

    is_told: whether there was a warning that they need more than the budget.
    """

    runs: weakref.WeakKeyDictionary[Table, _Runs] = field(default_factory=weakref.WeakKeyDictionary)
    is_told: bool = False


@dataclass(eq=False)
class _Runs:
    """Runs of a frame whose values are in memory at once.

    planned: of one run. names: of the parameters that it reads.
    step: the forward of the model that it ran in last; now, most: how often, and at most in one.
    """

    planned: PlannedBytes
    names: frozenset[str]
    step: weakref.ref[Step] | None = None
    now: int = 0
    most: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes that they save together."""
        return self.most * self.planned.saved


def note_run(table: Table, planned: PlannedBytes, step: Step | None) -> None:
    """Note that a frame runs with gradients, for the parameters of `table`.

    In a checkpoint of the user's it saves nothing, and is not noted. Warns once for a model whose
    frames are found to need more than the budget.

    step: the forward of the model that it runs in, if there is one.
    """
    if in_checkpoint():
        return
    frames = table.root.state(_Frames)
    runs = frames.runs.get(table)
    if runs is None:
        names = frozenset(param.name for param in table.params())
        runs = frames.runs[table] = _Runs(planned, names)
    is_same = step is not None and runs.step is not None and runs.step() is step
    runs.now = runs.now + 1 if is_same else 1
    if step is not None and not is_same:
        runs.step = weakref.ref(step)
    if runs.now > runs.most:
        runs.most = runs.now
        if not frames.is_told:
            frames.is_told = _is_beyond(table, runs)


def others_of(params: Collection[ShardedParam]) -> Others:
    """Tell what is in memory beside a frame that reads `params`, all of one model.

    There is nothing if these are all of its sharded parameters. In a checkpoint of the user's,
    frames to come are taken to be in one, too, and to save nothing.
    """
    if not params:
        return Others()
    first = next(iter(params))
    read = {param.name for param in params}
    found = (find(each) for each in root_of(first).parameters())
    unread = [param for param in found if param is not None and param.name not in read]
    if not unread:
        return Others()
    num_bytes = sum(map(_bytes_with_states, unread))
    known: dict[frozenset[str], int] = {}
    for runs in root_unit(first.unit).state(_Frames).runs.values():
        if not (runs.names <= read or runs.names >= read):  # else it is this one, or of its kind
            known[runs.names] = max(runs.saved_bytes, known.get(runs.names, 0))
    names = set().union(*known)
    to_come = sum(math.prod(param.member.size) for param in unread if param.name not in names)
    own = sum(math.prod(param.member.size) for param in params)
    per_byte = 0.0 if in_checkpoint() else to_come / max(own, 1)
    return Others(num_bytes + sum(known.values()), per_byte, is_alone=False)


def _is_beyond(table: Table, runs: _Runs) -> bool:
    """Warn if frames that have run need more than the budget together; tell whether they do."""
    planned, params = runs.planned, table.params()
    own = sum(_bytes_with_states(param) - param.shard_bytes for param in params)
    again = (runs.most - 1) * planned.saved
    others = others_of(params).num_bytes
    beyond = others + max(own, 0) + planned.peak + again - planned.budget
    if beyond <= 0 or not (others or again):  # a frame alone has a warning of its own
        return False
    warnings.warn(
        f"the frames of {table.where} and others of its model need more memory than option "
        f"'memory_budget' allows, by {show_bytes(beyond)}: one was compiled for another model, in "
        "a checkpoint, or for one use in a forward where there are several; take a larger budget, "
        "or call torch._dynamo.reset() before this model's first call",
        RuntimeWarning,
        stacklevel=3,
    )
    return True


def _bytes_with_states(param: ShardedParam) -> int:
    """Bytes of a shard, and of its gradient and optimizer states, where these are on the device."""
    on_host = param.unit.settings.is_offloaded
    states = 0 if param.states_offload else STATES
    trained = 1 + states if param.param.requires_grad else 0
    return 0 if on_host else param.shard_bytes * (1 + trained)
