"""Models of which each rank may run different parts: `strict_order=False`.

A rank that leaves a layer out (layerdrop), or takes another branch than others (experts that are
modules, a head for its own task), gathers and reduces less than they do, and in another order. What
is sent must match, so here nothing is sent where it is wanted:

    a forward begins   all units of the model are gathered, in the order of its modules
    a backward begins  those are that were resharded since
    it ends            all are reduced, in that order, with zeros for what this rank did not reach

In between every rank goes its way. Unsharded parameters stay from forward to the end of backward,
and unsharded gradients until then: the memory of replicas, but for optimizer states and what is
kept between steps. All ranks must still call the model, and backward, alike.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoshard import _torch
from autoshard.runtime.unit.unit import Unit, units_below
from autoshard.runtime.unit.unsharded import keep


def begin_forward(root: Unit) -> None:
    """Begin a forward of `root`'s model: launch the gathers of all its units.

    Also forgets which parameters a hook has updated in the step before. Nothing is done in
    backward, where a checkpoint runs a part of forward again.
    """
    if _torch.autograd.in_backward():
        return
    for unit in units_below(root):
        for param in unit.params:
            param.is_updated_by_hook = False  # in a step in which this rank may not read it
    gather_all(root)


def gather_all(root: Unit) -> None:
    """Launch the gathers of all units of `root`'s model; the units keep what is gathered.

    A unit that keeps its parameters unsharded already is not gathered again, unless its shards were
    written to since. If `root` is an inner unit, only it and units inside it are gathered.
    """
    for unit in units_below(root):
        keep(unit)


def drop_all(units: Iterable[Unit]) -> None:
    """Drop what `gather_all` has gathered of `units`, unless `unshard()` has asked for it.

    Units without `strict_order=False` are left alone. Gathers in flight are waited for. Raises
    RuntimeError at the first unit of which an unsharded parameter was written to: it and those
    after it are not dropped.
    """
    for unit in units:
        if unit.is_unordered and unit.kept is not None and not unit.is_unsharded_by_user:
            unit.kept.check_unwritten()
            unit.kept.drop()
            unit.kept = None
