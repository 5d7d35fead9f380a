"""Compile frames so that all ranks have the same plans: ranks compare plans, and follow one."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard import _torch, plan_cache
from autoshard.compilation import Compilation, has_backward
from autoshard.deciding import Decider
from autoshard.handed import Handed, Parts
from autoshard.options import CompileSettings
from autoshard.passes.ir.plan import Plan
from autoshard.passes.planner.update import HostStates
from autoshard.passes.plans.prices import Prices
from autoshard.runtime.compiled.frame import make_frame
from autoshard.runtime.compiled.unit_graphs import graphs_of
from autoshard.runtime.ranks.agreement import (
    CompileOutcome,
    PlansDiffer,
    agree,
    first_difference,
    share,
)
from autoshard.runtime.unit.param import ShardedParam

log = logging.getLogger(__name__)


class Attempt:
    """Compilation of one frame, done when the attempt is made; failures are kept, not raised.

    compilation: missing if Dynamo's graph could not be made a frame.
    compiled: the compiled frame; missing after a failure.
    failure: the exception on this rank; Dynamo's RestartAnalysis alone is raised.
    reason: why the result can't be used, here or on another rank; None if it can.
    plans: of the graphs with collectives; none after a failure.
    """

    compilation: Compilation
    compiled: Callable[..., Any]
    failure: Exception | None = None
    reason: str | None = None
    plans: tuple[Plan, ...] = ()

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        settings: CompileSettings,
        known: Sequence[Plan] = (),
        handed: Handed | None = None,
        decider: Decider | None = None,
    ) -> None:
        """Compile the frame of Dynamo's `gm`; a failure is kept in `failure` and `reason`.

        Dynamo's RestartAnalysis is raised. `gm` is changed. There is a backward if gradients are
        enabled now. Plans are logged and dumped, but not recorded, nor compared with other ranks.

        known, handed, decider: as of `Compilation`.
        """
        self.compared = settings.compared
        try:
            frame = make_frame(gm, example_inputs)
            self.compilation = Compilation(frame, settings, known, handed, decider)
            self.compiled = self.compilation.compile()
            self.plans = tuple(self.compilation.plans)
        except _torch.dynamo.RestartAnalysis:  # ours, or Dynamo's: as where a float has changed
            raise
        except Exception as error:
            self.failure = error
            self.reason = f"{type(error).__name__}: {str(error).strip() or 'no message'}"

    @property
    def outcome(self) -> CompileOutcome:
        """Outcome that ranks compare: the reason, the digests of plans, the settings as text."""
        return CompileOutcome(
            self.reason,
            tuple(plan.digest for plan in self.plans),
            self.compared,
        )

    def explained(self, error: PlansDiffer, name: str, mesh: DeviceMesh) -> PlansDiffer:
        """Return a copy of `error` that says in which collective ranks differ first.

        All ranks of `mesh` call this, as they exchange lists of their collectives.
        name: of the frame, the same on every rank.
        """
        lines = [line for plan in self.plans for line in plan.launches()]
        difference = first_difference(name, lines, mesh)
        return PlansDiffer(f"{error}. Collective {difference}")


def agreed_attempt(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: CompileSettings,
    params: Sequence[ShardedParam],
    code: str,
) -> Attempt:
    """Compile a frame so that all ranks have the same plans, or none can use the result.

    A search for plans depends on the batch at hand, which may differ from rank to rank, or in a
    later call on one rank alone. So plans that ranks have agreed on are kept for the frame, and
    later compilations follow them. If searches on ranks found different plans, all ranks trace the
    frame again and follow the first rank's plans. For a frame with a backward, under a memory
    budget, the first rank decides what forward hands to backward, once, where it parts the frame's
    graph. Where something is new ranks wait for each other, at the first time for ten minutes, or
    the group's timeout if that is longer. `gm` is changed.

    params: the sharded parameters that the frame reads, one or more.
    code: name of the frame, the same on every rank.

    Returns an attempt with a `reason` if any rank failed.
    Raises TraceAgain to have Dynamo trace the frame again; PlansDiffer if plans differ without a
    search, or though the first rank's were followed; RuntimeError if a rank has other options or
    does not answer in time.
    """
    unit = params[0].unit
    name, mesh = f"{unit.identity}/{code}", unit.axes.mesh
    topology = settings.topology.name if settings.topology is not None else None
    key = f"{name} {settings.lowering} {topology} {settings.budget_bytes}"
    graphs = graphs_of(unit)
    known = graphs.known_plans.setdefault(key, [])
    decider: _SharedDecider | None = None
    decides = settings.searches and settings.budget_bytes is not None
    if decides and key not in graphs.handed and has_backward(example_inputs):
        keep = functools.partial(graphs.handed.__setitem__, key)
        decider = graphs.deciders.setdefault(key, _SharedDecider(name, mesh, keep))
    text = graphs.handed.get(key, "")
    handed = Handed.from_json(text) if text else None
    attempt = Attempt(gm, example_inputs, settings, known, handed, decider)
    if decider is not None:
        del graphs.deciders[key]
        decider.end()
    try:
        attempt.reason = agree(name, attempt.outcome, mesh, graphs.agreed)
    except PlansDiffer as error:
        if not settings.searches:
            raise attempt.explained(error, name, mesh) from None
        found = [dataclasses.replace(plan, figures=None) for plan in attempt.plans]
        is_followed = {plan.digest for plan in found} <= {plan.digest for plan in known}
        # The first rank says for all whether there is anything new to follow.
        text = "" if is_followed else json.dumps([plan.to_json() for plan in found])
        text = share(name, text, mesh)
        if not text:  # one of them has another graph
            raise attempt.explained(error, name, mesh) from None
        known[:0] = map(Plan.from_json, json.loads(text))
        raise _torch.dynamo.TraceAgain(restart_reason="ranks follow the first one's plan") from None
    if settings.searches and attempt.reason is None:
        digests = {plan.digest for plan in known}
        new = (plan for plan in attempt.plans if plan.digest not in digests)
        known += [dataclasses.replace(plan, figures=None) for plan in new]
    return attempt


class _SharedDecider(Decider):
    """Decider of which all ranks ask, and of which the first one's decision holds for all.

    All ranks of `mesh` share twice: what the first one knows, and, if that is nothing, what it has
    decided. A rank whose compilation did not come to that shares in `end`, so that no other waits
    in vain. Where Dynamo traces a frame again in between, this goes on with the same decider.
    """

    def __init__(self, name: str, mesh: DeviceMesh, keep: Callable[[str], object]) -> None:
        """Share nothing yet.

        name: of the frame, the same on every rank. keep: takes the decision, as text.
        """
        self.name, self.mesh, self.keep = name, mesh, keep
        self.is_first = mesh.get_rank() == int(mesh.mesh.flatten()[0])
        self.has_asked = self.is_done = False
        self.failure: Exception | None = None  # of sharing: then there is nobody to agree with

    def known(self, key: str | None) -> Handed | None:
        """Return the decision that the first rank finds beside torch's caches, if there is one."""
        if self.has_asked:
            return None
        found = plan_cache.load_decision(key) if key is not None and self.is_first else None
        try:
            text = Handed.from_json(found).to_json() if found else ""
        except ValueError:  # a file that is none of ours
            text = ""
        self.has_asked = True
        text = self._share("known", text)
        return self._decided(text) if text else None

    def decide(
        self,
        part: Callable[[Handed], Parts],
        prices: Prices,
        states: HostStates | None = None,
        key: str | None = None,
    ) -> Handed:
        """Return what the first rank decides, which keeps it beside torch's caches.

        The others decide meanwhile, too: parts that are made for that are not made again.
        """
        text = super().decide(part, prices, states).to_json()
        if key is not None and self.is_first:
            plan_cache.save_decision(key, text)
        self.is_done = True
        with _torch.tensors.unset_fake_temporarily():  # the mode of what is compiled
            text = self._share("decided", text)
        return self._decided(text) if text else Handed()

    def end(self) -> None:
        """Share what this rank has not, as it failed before, or had nothing to part.

        If the first rank does so, nothing is decided, and it may be when the frame is compiled
        next. Raises what sharing has raised before, which is no failure of a compilation.
        """
        if self.failure is not None:
            raise self.failure
        if not self.has_asked:
            self.known(None)
        if not self.is_done:
            self.is_done = True
            text = self._share("decided", "")
            if text:
                self._decided(text)

    def _share(self, topic: str, text: str) -> str:
        try:
            return share(f"{self.name}/{topic}", text, self.mesh, is_first=True)
        except Exception as error:
            self.failure = error
            raise

    def _decided(self, text: str) -> Handed:
        self.is_done = True
        self.keep(text)
        log.info("%s hands to backward: %s", self.name, text)
        return Handed.from_json(text)
