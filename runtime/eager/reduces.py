"""Reduces of a backward: which gradients are sent, which wait, and which are in flight."""

from __future__ import annotations

from collections.abc import Collection

import torch

from autoshard.runtime.eager.backward import Backward
from autoshard.runtime.eager.tokens import Grads, StepTokens
from autoshard.runtime.eager.unit_steps import reduce_of, steps_of, take_in_order
from autoshard.runtime.unit import reduce, uses
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.reduce import Reduction
from autoshard.runtime.unit.unit import Unit
from autoshard.runtime.unit.unsharded import Tensors


class Reduces:
    """Reduces that the backward of a step of `owner` launches."""

    def __init__(self, owner: Unit, tokens: StepTokens, backward: Backward) -> None:
        self._owner, self._tokens, self._backward = owner, tokens, backward
        self._in_flight: list[Reduction] = []

    def take(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Take gradients of `unit`, and launch the reduce of those that need not wait.

        A gradient waits if this backward brings more of the same parameter, until the last is in.
        All wait for a later backward if the unit doesn't sync (`no_sync()`), and for the end of
        this one with `strict_order=False`: an empty `.grad` gets zeros meanwhile. A launch may wait
        for other ranks and for earlier reduces, and fill `.grad` of their parameters.

        grads: unsharded; the dict is emptied, so that each is freed when it is copied.
        wanted: parameters whose `.grad` the running backward is to fill. Gradients of others are
            sent, as other ranks send them, and then dropped.
        Raises NotImplementedError for a sparse gradient that is sent; RuntimeError if other ranks
        launch another collective now, or if `.grad` was written to while a gradient waited.
        """
        self._join_arrived(unit, grads, wanted)
        if not unit.reducer.syncs or unit.is_unordered:
            for param in list(grads):
                grad = grads.pop(param)
                if grad is not None and param in wanted:
                    reduce.hold(param, grad, unit.reduced_member(param, grad.dtype).dtype)
        if grads:
            self._launch(unit, grads, wanted)

    def _join_arrived(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Add to `grads`, in place, what came before in this backward for the same parameters.

        If another gradient of a parameter is still to come, the sum so far waits instead, and is
        taken out of `grads`; one that is not wanted is dropped. Notes that the gradients of the
        step's use of `unit` are in. See unit/uses.py.
        """
        tokens = self._tokens.made(unit)
        if tokens is not None:
            tokens.use.end()
        may_repeat = uses.may_repeat(unit)
        for param in list(grads):
            if not may_repeat and param.arriving is None:
                continue
            dtype = _reduced_dtype(param)
            if not uses.num_to_come(param):
                grads[param] = reduce.take_arrived(param, grads[param], dtype)
                continue
            grad = grads.pop(param)
            if grad is not None and param in wanted:
                reduce.arrive(param, grad, dtype)

    def reduce_apart(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> Tensors:
        """Reduce gradients of `unit`, wait for them, and fill no `.grad`.

        Gradients that wait from earlier backwards are neither added nor sent. May wait for other
        ranks first.
        grads: unsharded; the dict is emptied.
        Returns this rank's part of the mean gradients, each in its parameter's dtype, of those
        `wanted` that have a gradient on any rank (of all `wanted` if the unit `sends_unused`).
        Raises NotImplementedError for a sparse gradient; RuntimeError if other ranks launch another
        collective now.
        """
        reduced: Tensors = {}
        for reduction in self._reductions(unit, grads, wanted, stands_alone=True):
            reduction.launch()
            reduced.update(reduction.wait())
        return {param: part.to(param.member.dtype) for param, part in reduced.items()}

    def _launch(self, unit: Unit, grads: Grads, wanted: set[ShardedParam]) -> None:
        """Launch the reduce of `grads`, with wanted gradients that waited added to them.

        grads: the dict is emptied. May wait for other ranks, and for earlier reduces, whose `.grad`
        is filled then, as `_start` does. Raises as `take`.
        """
        for param in wanted & grads.keys():
            grads[param] = reduce.take_pending(param, grads[param], _reduced_dtype(param))
        for reduction in self._reductions(unit, grads, wanted):
            self._start(reduction)

    def _reductions(
        self, unit: Unit, grads: Grads, wanted: set[ShardedParam], *, stands_alone: bool = False
    ) -> list[Reduction]:
        """Make a reduction for each dtype in which gradients are summed; launches none.

        Notes the reduce in the order that ranks compare, and waits for other ranks if it is new
        there.
        grads: the dict is emptied. stands_alone: as of a `Reduction`.
        Raises NotImplementedError for a sparse gradient; RuntimeError if other ranks launch another
        collective now.
        """
        take_in_order(self._owner, "backward", reduce_of(unit))
        by_dtype: dict[torch.dtype, Grads] = {}
        for param in list(grads):
            grad = grads.pop(param)
            if grad is not None and grad.layout != torch.strided:
                raise NotImplementedError(
                    f"the gradient of {param.name} is sparse, which can't be reduced: build the "
                    "embedding with sparse=False"
                )
            by_dtype.setdefault(_reduced_dtype(param), {})[param] = grad
        return [
            Reduction(unit, same, wanted & same.keys(), dtype, stands_alone=stands_alone)
            for dtype, same in by_dtype.items()
        ]

    def _start(self, reduction: Reduction) -> None:
        """Launch `reduction`, after waiting for the oldest ones if too many are in flight.

        Those in flight go on to their all-reduce first. The ones waited for are added to `.grad`,
        and hooks run (`reduce.accumulate`); if they go to pinned host memory, their copies begin,
        and `finish_reduces` of the owner does the rest.
        """
        queue = self._in_flight
        for earlier in queue:
            earlier.advance()  # an all-reduce runs beside the next gather and reduce-scatter
        while len(queue) >= reduction.max_in_flight:
            oldest = queue.pop(0)
            carried = steps_of(self._owner).carried
            if oldest.store():  # gradients go to the host until the end of backward
                if carried:
                    carried[-1].release()
                carried.append(oldest)
            else:
                oldest.accumulate()
        reduction.launch()
        queue.append(reduction)

    # ---- the end of backward

    def launch_what_waits(self, units: Collection[Unit]) -> None:
        """Launch what backwards have left to reduce, or to all-reduce, of `units`.

        Gradients of units that don't sync go on waiting, sums for their all-reduce among them. With
        `strict_order=False` all trainable parameters of the others are sent, waiting or not. A
        launch may wait for earlier reduces and fill `.grad` of their parameters, as in `take`; what
        is in flight at the end is left to `finish_reduces` of the owner. Raises as `take`.
        """
        for unit in units:
            self._hold_arrived(unit)
            self._launch_waiting(unit)  # used in earlier backwards, and not in this one
        for reduction in self._in_flight:
            reduction.advance()
        for unit in units:
            if unit.reducer.syncs and unit.reducer.all_reduces:
                self._launch_partial(unit)
        steps_of(self._owner).carried.extend(self._in_flight)
        self._in_flight = []

    def _hold_arrived(self, unit: Unit) -> None:
        """Move sums of gradients of `unit` that are not complete to those that wait for a reduce.

        This backward did not bring the last gradient of their parameters. An empty `.grad` gets
        zeros (`reduce.hold`). What a broken-off backward has left is dropped.
        """
        for param in unit.params:
            if param.arriving is None:
                continue
            dtype = _reduced_dtype(param)
            grad = reduce.take_arrived(param, None, dtype)
            if grad is not None:
                reduce.hold(param, grad, dtype)

    def _launch_waiting(self, unit: Unit) -> None:
        """Launch the reduce of gradients of `unit` that backwards have left to wait, if it syncs.

        All its trainable parameters are sent, with zeros for those of which none waits, and
        backward ends for the unit (`Backward.end`). If none waits, nothing is sent; but with
        `strict_order=False` all is, with zeros for what no backward of this rank has reached. Waits
        and raises as `_launch`.
        """
        if not unit.reducer.syncs:
            return
        if unit.is_unordered or any(reduce.pending_of(p) is not None for p in unit.params):
            trainable = [param for param in unit.params if param.param.requires_grad]
            if trainable:
                self._backward.end(unit)
                self._launch(unit, dict.fromkeys(trainable), set(trainable))

    def _launch_partial(self, unit: Unit) -> None:
        """Launch reduces for gradients of `unit` that were only reduce-scattered before.

        They are reduces of zeros, one for each dtype: once the reduce-scatter is done, what waits
        is added and all-reduced with it (`Reduction.advance`). Nothing is sent if none waits. May
        wait for other ranks and for earlier reduces (`_start`).
        Raises RuntimeError if other ranks launch another collective now.
        """
        left: dict[torch.dtype, list[ShardedParam]] = {}
        for param, partial in unit.reducer.partial.items():
            left.setdefault(partial.chunk.dtype, []).append(param)
        for dtype, params in left.items():
            what = f"what is left to all-reduce of {unit.name}"
            take_in_order(self._owner, "backward", what)
            self._start(Reduction(unit, dict.fromkeys(params), set(params), dtype))

    def abandon(self) -> None:
        """Drop what is in flight, after an exception: the device waits for it."""
        self._in_flight = []


def _reduced_dtype(param: ShardedParam) -> torch.dtype:
    """Dtype in which the gradient of `param` is reduced, also on ranks that have none."""
    unit = param.unit
    return unit.reduced_member(param, unit.gathered_member(param).dtype).dtype
