"""Steps of a unit: what the eager runtime keeps with it from one to the next."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoshard.runtime.comm import transport
from autoshard.runtime.ranks.order import CollectiveOrder
from autoshard.runtime.unit.param import find
from autoshard.runtime.unit.reduce import Reduction, forget
from autoshard.runtime.unit.unit import Unit, listed
from autoshard.runtime.unit.unsharded import Unsharded, is_kept

if TYPE_CHECKING:
    from autoshard.runtime.eager.saved import Held
    from autoshard.runtime.eager.step import Step
    from autoshard.runtime.eager.tokens import Tokens


@dataclass(eq=False)
class UnitSteps:
    """State that a unit keeps from step to step.

    Of all steps that use the unit:
    last_step:  the latest step that gathered it.
    reading:    the step of reads between `unshard()` and `reshard()`.
    held:       what holds unsharded parameters from forward to backward; `reshard()` frees it.

    Of steps that it owns, as the unit of the outermost module that ran:
    last_order: units that the latest forward gathered, in order.
    orders:     the order of collectives, by phase ("forward", "backward").
    backward_ran: whether a backward has begun since the latest forward began.
    post_optim_event: event that the first gather of the next forward waits for.
    is_last_backward: False lets a backward end before its reduces have.
    carried:    reduces that were launched and not waited for, or whose gradients go to the host.
    closed_in:  number of the latest backward that `close_compiled` looked after, or -1.
    reduced_in: number of the latest backward whose end has reduced the model, or -1.
    """

    last_step: Step | None = None
    reading: Step | None = None
    held: weakref.WeakSet[Held | Tokens] = field(default_factory=weakref.WeakSet)
    last_order: tuple[Unit, ...] = ()
    orders: dict[str, CollectiveOrder] = field(default_factory=dict)
    backward_ran: bool = True
    post_optim_event: Any = None
    is_last_backward: bool = True
    carried: list[Reduction] = field(default_factory=list)
    closed_in: int = -1
    reduced_in: int = -1


def steps_of(unit: Unit) -> UnitSteps:
    """Return what the eager runtime keeps with `unit`."""
    return unit.state(UnitSteps)


def order_of(unit: Unit, phase: str) -> CollectiveOrder:
    """Return what compares the order of collectives in a `phase` of `unit`'s steps across ranks.

    It is made by the first call. phase: "forward" or "backward". Steps of `unit` are those whose
    outermost forward is that of `unit`.
    """
    orders = steps_of(unit).orders
    if phase not in orders:
        key, expect = f"{unit.identity}/{phase}", functools.partial(_EXPECTED[phase], unit)
        orders[phase] = CollectiveOrder(key, f"the {phase} of {unit.name}", unit.axes.mesh, expect)
    return orders[phase]


def _gathers_in_forward(owner: Unit) -> list[str]:
    """List the gathers of a forward that reads `owner`'s parameters in the order of modules."""
    params = (param for module in owner.modules for param in module.parameters())
    units = dict.fromkeys(known.unit for known in map(find, params) if known is not None)
    return [unit.gather for unit in units]


def _launches_in_backward(owner: Unit) -> list[str]:
    """List the gathers and reduces of a backward that goes the latest forward's way back."""
    launches = []
    for unit in reversed(steps_of(owner).last_order):
        if unit.reshards:
            launches.append(unit.gather)
        if unit.reducer.syncs and any(param.param.requires_grad for param in unit.params):
            launches.append(reduce_of(unit))
    return launches


_EXPECTED = {"forward": _gathers_in_forward, "backward": _launches_in_backward}


def reduce_of(unit: Unit) -> str:
    """Name the reduce of `unit`, as ranks compare it."""
    return f"the reduce of {unit.name}"


def take_in_order(owner: Unit, phase: str, event: str) -> None:
    """Note that `event` is about to be launched in a `phase` of a step that `owner` owns.

    Waits for other ranks if the event is new there. event: the collective in words. Raises
    RuntimeError if other ranks launch another one, or don't come in time. With `strict_order=False`
    nothing is done.
    """
    if not owner.is_unordered:
        order_of(owner, phase).take(event)


def following(
    unit: Unit, given: Sequence[Unit] | None, order: Iterable[Unit], limit: int
) -> Sequence[Unit]:
    """Select the units to prefetch when `unit` is gathered.

    They are the `given` ones; or if that is None, up to `limit` units after `unit` in `order`, and
    none if it is not there.
    """
    if given is not None:
        return given
    order = list(order)
    start = order.index(unit) + 1 if unit in order else len(order)
    return order[start : start + limit]


def take_kept(unit: Unit) -> Unsharded | None:
    """Take out of `unit`, and return, the unsharded parameters that it keeps.

    Returns None, and forgets them, if shards were written to since they were gathered. With
    `strict_order=False` the unit keeps them, too, for all of the step.
    """
    kept = unit.kept if is_kept(unit) else None
    if kept is None or not unit.is_unordered:
        unit.kept = None
    return kept


def describe_forward(owner: Unit, what: str, units: Iterable[Unit]) -> str:
    """Describe a forward that begins, in the text that ranks compare: call it once a forward.

    The text is `what`, the settings of `units`, whether messages are off, and a remark if no
    backward came since the forward before, so that a rank that left out a backward is noticed.
    `owner` then counts as having had no backward since this forward.

    owner: the unit that owns the forward's step. what: its name. units: those that it may use.
    """
    steps = steps_of(owner)
    ran, steps.backward_ran = steps.backward_ran, False
    with_setting: dict[str, list[str]] = {}
    for unit in units:
        for setting in unit.compared_settings:
            with_setting.setdefault(setting, []).append(unit.name)
    parts = [f"{setting} in {listed(names)}" for setting, names in with_setting.items()]
    if not ran:
        parts.append("no backward since the forward before")
    if not transport.may_send():
        parts.append(f"{transport.VARIABLE}=0")
    return f"{what}, with {', '.join(parts)}" if parts else what


def wait_for_optimizer(owner: Unit) -> None:
    """Wait for the event that `set_post_optim_event` has given to `owner`, if there is one; once.

    On a device, compute waits, not the host.
    """
    steps = steps_of(owner)
    if steps.post_optim_event is not None:
        steps.post_optim_event.wait()
        steps.post_optim_event = None


def reshard(unit: Unit) -> None:
    """Drop unsharded parameters of `unit`, those kept from forward for backward, too.

    Not those that a running forward or backward reads. Ends what `unshard()` began, and the lending
    of copies by `parameters()`. Backward gathers them again. Gathers in flight are waited for, and
    markers updated (`Unit.describe`). Raises RuntimeError if one of them was written to.
    """
    steps = steps_of(unit)
    unit.is_unsharded_by_user = False
    kept, unit.kept = unit.kept, None
    if steps.last_step is not None:
        steps.last_step.reshard(unit)
    try:
        for each in list(steps.held):
            each.free()
        if kept is not None:
            kept.check_unwritten()
    finally:
        if kept is not None:
            kept.drop()
        unit.update_markers()


def finish_reduces(owner: Unit) -> None:
    """Wait for reduces that backwards of `owner`'s steps have launched, and fill `.grad`.

    Runs hooks on the parameters, as `reduce.accumulate` does. The host waits for gradients that go
    to it.
    """
    carried = steps_of(owner).carried
    for reduction in carried:
        reduction.store()  # all copies are on their way before the host waits for the first
    while carried:
        carried.pop(0).accumulate()


def reset(unit: Unit) -> None:
    """Forget `unit`'s unsharded parameters, latest step, and gradients on their way to `.grad`.

    For a fresh start after an exception. Waits for gathers in flight. Ends what `unshard()` began;
    markers are updated, and ranks compare the collectives of the latest step's owner anew. `.grad`
    itself stays, but for zeros that stand for gradients that wait.
    """
    steps = steps_of(unit)
    if steps.last_step is not None:
        steps.last_step.abandon()
        steps.last_step = None
    if unit.kept is not None:
        unit.kept.drop()
    unit.kept, unit.is_unsharded_by_user = None, False
    unit.update_markers()
    steps.carried = []
    unit.reducer.partial = {}
    for param in unit.params:
        forget(param)
