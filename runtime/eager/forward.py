"""Gathers of a forward: which units it has gathered, and which come next."""

from __future__ import annotations

import torch

from autoshard.runtime.eager.backward import Backward
from autoshard.runtime.eager.saved import Sources, in_checkpoint, in_recomputation
from autoshard.runtime.eager.unit_steps import following, steps_of, take_kept
from autoshard.runtime.unit.unit import Unit
from autoshard.runtime.unit.unsharded import Unsharded


class Forward:
    """Unsharded parameters that a forward of `owner` has read, or gathers ahead.

    order:    units in the order in which they were first gathered.
    gathered: unsharded parameters of each unit, here or in flight.
    read:     units of `gathered` that were read; the others were only prefetched.
    sources:  storages of the unsharded parameters of units that were read.
    """

    def __init__(self, owner: Unit, backward: Backward, *, has_grad: bool) -> None:
        """Begin with nothing gathered, and expect the order of the owner's last forward.

        `order` is one list with that of `backward`.
        """
        self.order = backward.order
        self.gathered: dict[Unit, Unsharded] = {}
        self.read: set[Unit] = set()
        self.sources = Sources()
        self._backward, self._has_grad = backward, has_grad
        self._expected = steps_of(owner).last_order  # what the step before gathered

    def gather(self, unit: Unit) -> Unsharded:
        """Gather `unit` for its first read, wait for it, and prefetch the units that follow.

        What was prefetched of `unit` before its shards were written to is gathered anew; what the
        unit keeps is taken, not gathered. Its storages are added to `sources`; inside a checkpoint
        it is noted as one that backward runs again. With `strict_order=False` nothing is
        prefetched.
        """
        ahead = self.gathered.get(unit)
        if ahead is not None and ahead.is_stale:  # written to since, as a momentum encoder is
            self.gathered.pop(unit).drop()
        self._launch(unit)
        self.read.add(unit)
        whole = self.gathered[unit]
        self.sources.add(whole)
        if self._is_checkpointed(unit):
            self._backward.run_again.add(unit)
        if not unit.is_unordered:
            self._prefetch(unit)
        return whole

    def _prefetch(self, unit: Unit) -> None:
        """Launch the gathers of the units that the user put after `unit`, or that are read next.

        The latter, `forward_prefetch` of them at most, are known from the step before, and not
        launched if this forward had them before; of a unit that was not read there, none are.
        """
        given = unit.settings.next_in_forward
        ahead = following(unit, given, self._expected, unit.settings.forward_prefetch)
        for each in ahead:
            if each not in self.order or given is not None:
                self._launch(each)

    def _launch(self, unit: Unit) -> None:
        """Start gathering `unit`, unless it is gathered or on its way.

        Unsharded parameters that the unit keeps are taken instead, unless shards were written to
        since. The host may wait for `limiter`; raises as the constructor of `Unsharded`.
        """
        if unit not in self.gathered:
            self.gathered[unit] = take_kept(unit) or Unsharded(unit)

    def _is_checkpointed(self, unit: Unit) -> bool:
        """Tell whether `unit` seems to be read inside a checkpoint, to be read again in backward.

        For a reentrant checkpoint that is a guess: a trainable unit is read under no_grad. While a
        checkpoint runs again, only a unit that keeps its parameters after backward counts. False if
        the step began without gradients.
        """
        if not self._has_grad:
            return False
        if not torch.is_grad_enabled():  # as in a reentrant one, or for a teacher, which is frozen
            return any(param.param.requires_grad for param in unit.params)
        if in_recomputation():  # the last time, unless the next forward finds it there
            return unit.keeps_after_backward
        return in_checkpoint()

    def keep_for_backward(self, unit: Unit) -> None:
        """Hand unsharded parameters on to backward if `unit` keeps them until the next forward.

        That is a unit that reshards neither after forward nor after backward. For others nothing is
        done: backward gathers them again, or autograd holds what it has saved. Nor is it for units
        that checkpoints run again: `drop` keeps those.
        """
        # What a checkpoint runs again is kept by `drop`.
        keeps = unit.keeps_after_backward and unit not in self._backward.run_again
        if keeps and not unit.reshards:
            self._backward.gathered.setdefault(unit, self.gathered[unit])

    def drop(self, unit: Unit, *, check: bool = True) -> None:
        """Drop forward's unsharded parameters of `unit`, unless backward or the unit keeps them.

        The unit keeps them after `unshard()`, and for a checkpoint that runs it again if it doesn't
        reshard after forward. Of a unit that reshards to fewer ranks, backward keeps this rank's
        part if it needs the unit. A gather in flight, prefetched and not read, is waited for.

        check: raise RuntimeError, even if they are to be kept, if one of them was written to.
        """
        whole = self.gathered.pop(unit, None)
        self.read.discard(unit)
        if whole is None:
            return
        if whole.is_here:
            self.sources.remove(whole)
            if check:
                whole.check_unwritten()
        if whole is self._backward.gathered.get(unit) or whole is unit.kept:
            return
        # Autograd holds what is not freed, but for what a checkpoint runs again.
        is_run_again = unit in self._backward.run_again and not unit.reshards
        if unit.is_unsharded_by_user or is_run_again:
            unit.kept = whole
            return
        self._backward.keep_parts(unit, whole)
        whole.drop()

    def abandon(self) -> None:
        """Drop all unsharded parameters after an exception, waiting for gathers in flight."""
        for whole in self.gathered.values():
            whole.drop()
        self.gathered, self.read = {}, set()
        self.sources.clear()
