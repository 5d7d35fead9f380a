"""Gathers of a backward: which units it wants again, and which it has gathered."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard import _torch
from autoshard.runtime.eager.tokens import StepTokens
from autoshard.runtime.eager.unit_steps import following, take_kept
from autoshard.runtime.unit.unit import Unit
from autoshard.runtime.unit.unsharded import Parts, Unsharded


class Backward:
    """Unsharded parameters that the backward of a step of `owner` wants, or has.

    order:     units in the order in which forward has first gathered them.
    gathered:  unsharded parameters of each unit, here or in flight.
    needed:    units that backward gathers again, for tensors that forward has saved.
    run_again: units that checkpoints run again, in steps of their own.
    """

    def __init__(self, owner: Unit, tokens: StepTokens) -> None:
        """Begin with nothing gathered or wanted; nothing is launched."""
        self.order: list[Unit] = []
        self.gathered: dict[Unit, Unsharded] = {}
        self.needed: set[Unit] = set()
        self.run_again: set[Unit] = set()
        self._owner, self._tokens = owner, tokens
        self._read: dict[Unit, int] = {}  # of `gathered`; by which autograd graph task
        self._parts: dict[Unit, Parts] = {}  # what is gathered, of units that have `smaller`

    @property
    def wants_some(self) -> bool:
        """Tell whether backward wants any unit that forward has had."""
        return bool(self.needed or self.run_again)

    def has_read(self, unit: Unit) -> bool:
        """Tell whether backward uses `unit` now: gathered, and not just prefetched."""
        return unit in self._read

    def gather(self, unit: Unit) -> Unsharded:
        """Gather `unit`, which is wanted now, wait for it, and prefetch what is wanted next.

        Before that, `end` is called for each unit that the running backward has used and will not
        reduce. With `prefetches_after_backward` nothing is prefetched here.
        """
        task = _torch.autograd.graph_task()
        # A unit that is not reduced has no end of its own: the next gather is it.
        for other, gathered_by in list(self._read.items()):
            if gathered_by == task != -1 and not self._will_reduce(other):
                self.end(other)
        self._launch(unit)
        self._read[unit] = task
        whole = self.gathered[unit]
        whole.tensors()
        if not unit.settings.prefetches_after_backward:
            self.prefetch(unit)
        return whole

    def _launch(self, unit: Unit) -> None:
        """Start gathering `unit`, unless it is gathered or on its way.

        Unsharded parameters that the unit keeps are taken instead, unless shards were written to
        since. If `keep_parts` has kept parts, these are gathered, not the shards, once. The host
        may wait for `limiter`; raises as the constructor of `Unsharded`.
        """
        if unit not in self.gathered:
            kept = take_kept(unit)
            self.gathered[unit] = kept or Unsharded(unit, self._parts.pop(unit, None))

    def _will_reduce(self, unit: Unit) -> bool:
        """Tell whether the running backward reduces `unit`.

        It does if a parameter of `unit` that this step has read gets a gradient in that backward.
        """
        tokens = self._tokens.made(unit)
        return tokens is not None and tokens.will_reduce()

    def prefetch(self, unit: Unit | None) -> None:
        """Launch the gathers that backward needs after `unit`, or, for None, first.

        Units that are gathered, or on their way, are not gathered again; nor those that neither
        backward nor a checkpoint wants. A unit that only a checkpoint runs again keeps what was
        gathered (`Unit.kept`): that step finds it there.
        """
        for each in self._ahead(unit):
            if each in self.needed:
                self._launch(each)
            elif each in self.run_again and each.kept is None:
                each.kept = Unsharded(each)  # that step finds it there

    def _ahead(self, unit: Unit | None) -> Sequence[Unit]:
        """List the units to prefetch at `unit`, or, for None, as backward begins.

        They are those the user has set for it (for None, for the owner), wanted or not. If none are
        set, they are the next ones that backward wants, in the reverse of forward's order, at most
        `backward_prefetch`; units with `unshard_in_backward=False` are passed over, and after a
        unit that is one of these, or is not wanted itself, none come.
        """
        wanted = self.needed | self.run_again
        coming = [
            each
            for each in reversed(self.order)
            if each in wanted and each.settings.unshard_in_backward
        ]
        at = unit or self._owner
        given, limit = at.settings.next_in_backward, at.settings.backward_prefetch
        if unit is None and given is None:
            return coming[:limit]
        return following(at, given, coming, limit)

    def keep_parts(self, unit: Unit, whole: Unsharded) -> None:
        """Keep this rank's part of `whole`, cut over fewer ranks, from which backward gathers.

        Only for a unit that reshards to fewer ranks than it is sharded over, that backward needs,
        and of which nothing is kept yet; for another one nothing is done. Waits for the gather.

        whole: unsharded parameters, which forward is about to drop.
        """
        smaller = unit.settings.smaller
        if smaller is not None and unit in self.needed and unit not in self._parts:
            self._parts[unit] = whole.cut(smaller)

    def reshard(self, unit: Unit) -> None:
        """Drop what was gathered of `unit`, unless backward is using it; waits if it is in flight.

        Parts that were kept of it stay.
        """
        if unit not in self._read:
            whole = self.gathered.pop(unit, None)
            if whole is not None:
                whole.drop()

    def end(self, unit: Unit) -> None:
        """End backward for `unit`: drop its unsharded parameters, or have the unit keep them.

        The unit keeps them if it is configured so, or after `unshard()`. A gather in flight that is
        dropped is waited for. Nothing is done if none were gathered.
        """
        whole = self.gathered.pop(unit, None)
        self._read.pop(unit, None)
        if whole is None or whole is unit.kept:
            return
        if unit.keeps_after_backward or unit.is_unsharded_by_user:
            unit.kept = whole
        else:
            whole.drop()

    def drop_fetched_ahead(self) -> None:
        """Drop units that were prefetched for a checkpoint, and not run again after all.

        Gathers in flight are waited for. Units that `unshard()` keeps are left, and those that stay
        unsharded after forward.
        """
        for unit in self.run_again:
            if unit.kept is not None and not unit.is_unsharded_by_user and unit.reshards:
                unit.kept.drop()
                unit.kept = None

    def abandon(self) -> None:
        """Drop all unsharded parameters after an exception, waiting for gathers in flight.

        What backward still wants, and parts that were kept for it, stay noted.
        """
        for whole in self.gathered.values():
            whole.drop()
        self.gathered, self._read = {}, {}
