"""Memory of a model's other frames, as the planner of one frame counts it.

Where a model is compiled in several frames, by blocks or because graphs break, what all of them
save for backward is in memory together, and they share one budget:

    frames that have run        what they were planned to save, for each run in this forward
    frames that are to come     as much as this one for each parameter, or for each unit if that is
                                less: 32 blocks that are alike share by 32

Shards count as the largest ones, and decisions are the first rank's. Where batches differ by rank,
so does what frames save; ranks follow the first one's plans then, as ever (`agreed_plan.py`). One
graph may run for blocks of several models, or more often than was known when it was planned: what
is then in memory is added up as it runs, and beyond the budget it is a warning.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field

from autoshard import _torch
from autoshard.passes.ir.plan import show_bytes
from autoshard.passes.planner.update import STATES
from autoshard.runtime.compiled.tables import Table
from autoshard.runtime.eager.saved import in_checkpoint
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import Unit, root_of, root_unit


@dataclass(frozen=True)
class Others:
    """Memory in use while a frame runs that is not the frame's own.

    num_bytes: of parameters that it does not read, their gradients and two optimizer states; and of
        what frames that have run in this forward save for backward.
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
    """Frames of a model that have run.

    runs: of each, by the table that its graph ran with.
    number: of the forward, which a backward ends: what ran since is in memory together.
    is_told: whether there was a warning that they need more than the budget.
    """

    runs: weakref.WeakKeyDictionary[Table, _Runs] = field(default_factory=weakref.WeakKeyDictionary)
    number: int = 0
    is_told: bool = False

    def of_this_forward(self) -> dict[Table, _Runs]:
        return {table: runs for table, runs in self.runs.items() if runs.forward == self.number}


@dataclass(eq=False)
class _Runs:
    """Runs of a frame in a forward.

    forward: its number. nodes: of autograd, one a run: it lives as long as what the run has saved.
    most: runs at once, of all forwards.
    """

    planned: PlannedBytes
    names: frozenset[str]
    forward: int = -1
    nodes: list[weakref.ref[object]] = field(default_factory=list)
    most: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes that they have in memory together."""
        return sum(node() is not None for node in self.nodes) * self.planned.saved


def note_run(table: Table, planned: PlannedBytes, node: object | None) -> None:
    """Note that a frame has run with gradients, for the parameters of `table`.

    In a checkpoint of the user's it saves nothing, and is not noted. Warns once for a model whose
    frames are found to need more than the budget.

    node: of autograd, for its backward; None if it has none.
    """
    if in_checkpoint():
        return
    frames = table.root.state(_Frames)
    runs = frames.runs.get(table)
    if runs is None:
        names = frozenset(param.name for param in table.params())
        runs = frames.runs[table] = _Runs(planned, names)
    before = runs.nodes if runs.forward == frames.number else []
    runs.nodes = [known for known in before if known() is not None]
    if node is not None:
        runs.nodes.append(weakref.ref(node))
    runs.forward = frames.number
    if len(runs.nodes) > runs.most:
        runs.most = len(runs.nodes)
        if not frames.is_told:
            frames.is_told = _is_beyond(table, frames)


def note_backward(root: Unit) -> None:
    """Note that a backward of the model begins: what its frames save from now on is another's."""
    root.state(_Frames).number += 1


def others_of(params: Collection[ShardedParam]) -> Others:
    """Tell what is in memory beside a frame that reads `params`, all of one model, and runs next.

    There is nothing if these are all of its sharded parameters. Frames to come are counted by their
    parameters, or by their units, if that is less. In a checkpoint of the user's they are taken to
    be in one, too, and to save nothing.
    """
    if not params:
        return Others()
    first = next(iter(params))
    read = {param.name for param in params}
    found = (find(each) for each in root_of(first).parameters())
    unread = [param for param in found if param is not None and param.name not in read]
    if not unread:
        return Others()
    known = root_unit(first.unit).state(_Frames).of_this_forward().values()
    num_bytes = sum(map(_bytes_with_states, unread)) + sum(runs.saved_bytes for runs in known)
    if in_checkpoint() or _torch.autograd.in_backward():  # the latter: one that is reentrant
        return Others(num_bytes, is_alone=False)
    alive = (runs for runs in known if runs.saved_bytes or not runs.planned.saved)
    have_run = set().union(*(runs.names for runs in alive))
    to_come = [param for param in unread if param.name not in have_run]
    own_units = {param.unit for param in params}
    by_units = len({param.unit for param in to_come} - own_units) / len(own_units)
    by_numel = sum(map(_numel, to_come)) / max(sum(map(_numel, params)), 1)
    return Others(num_bytes, min(by_units, by_numel), is_alone=False)


def _is_beyond(table: Table, frames: _Frames) -> bool:
    """Warn if the frames of a forward need more than the budget; tell whether they do.

    table: of the one that runs now, with what it needs itself.
    """
    now = frames.of_this_forward()
    planned, params = now[table].planned, table.params()
    found = (find(each) for each in root_of(params[0]).parameters())
    every = [param for param in found if param is not None]
    shards = sum(param.shard_bytes for param in params)  # they are part of what it needs
    own = sum(map(_bytes_with_states, every)) - shards
    others = sum(runs.saved_bytes for runs in now.values()) - planned.saved
    beyond = others + own + planned.peak - planned.budget
    if beyond <= 0 or not others or len(every) == len(params):
        return False  # of a frame that is a model, two forwards at once are the user's
    warnings.warn(
        f"the frames of {table.where} and others of its model need more memory than option "
        f"'memory_budget' allows, by {show_bytes(beyond)}: one was compiled for another model, in "
        "a checkpoint, or for one use in a forward where there are several; take a larger budget, "
        "or call torch._dynamo.reset() before this model's first call",
        RuntimeWarning,
        stacklevel=3,
    )
    return True


def _numel(param: ShardedParam) -> int:
    return math.prod(param.member.size)


def _bytes_with_states(param: ShardedParam) -> int:
    """Bytes of a shard, and of its gradient and optimizer states, where these are on the device."""
    on_host = param.unit.settings.is_offloaded
    states = 0 if param.states_offload else STATES
    trained = 1 + states if param.param.requires_grad else 0
    return 0 if on_host else param.shard_bytes * (1 + trained)
