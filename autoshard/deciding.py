"""Decide what forward hands to backward: values, on the device or the host, and whole parameters.

    joint graph --> parts, as the partitioner makes them --> peak under the budget?
        no:   values lie on the host meanwhile, as far as copies are hidden, or are computed again,
              until there is room
        then: parameters stay unsharded, where there is room left for them and time to win

What a decision does is forecast from parts that were made without one, and simulated; of the best,
parts are made.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping

from autoshard.handed import KINDS, Handed, Parts, Run
from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.keep import with_kept
from autoshard.passes.planner.save import Need, least_us
from autoshard.passes.planner.update import HostStates
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.saved import SavedValues
from autoshard.search_handed import WORTH, Search, asked, first_of, limits_of

log = logging.getLogger(__name__)

MADE = 5  # decisions whose parts are made, at most
FOR_KEPT = (0.25, 0.5, 1.0)  # of what backward gathers: given up for parameters that are kept
MADE_FOR_KEPT = 2  # decisions with parameters kept whose parts are made, at most


class Decider:
    """Decider of what a frame's forward hands to backward, of which a compilation asks once.

    It asks what is known, before anything is traced, and if that is nothing, for a decision, where
    it parts the joint graph; it may never come to that. This one decides by itself, where there are
    no other ranks.

    is_first: whether what it decides counts, and its failures are told.
    """

    is_first = True

    def known(self, key: str | None) -> Handed | None:
        """Return a decision that is known before the frame's joint graph is; None if none is.

        key: of frames that are alike in all that a decision depends on; None: of none.
        """
        return None

    def decide(
        self,
        part: Callable[[Handed], Parts],
        prices: Prices,
        states: HostStates | None = None,
        key: str | None = None,
    ) -> Handed:
        """Decide as the function `decide` does; nothing is decided if that fails.

        key: as of `known`.
        """
        try:
            return decide(part, prices, states)
        except Exception as error:  # the compilation may meet it, too, and will tell all ranks
            log.log(
                logging.WARNING if self.is_first else logging.DEBUG,
                "the memory budget is not kept to, as deciding what to save failed: %s",
                error,
            )
            return Handed()


def decide(
    part: Callable[[Handed], Parts], prices: Prices, states: HostStates | None = None
) -> Handed:
    """Decide what forward hands to backward, so that a step is fastest within the budget.

    If a step as the partitioner makes it is not within it, as few bytes of what is saved are given
    up as it takes, in the least time: they go to the host, or values are computed again. What that
    does is forecast, then parts are made; by how much they need more or less than forecast is left
    out of the budget of the next choice. If nothing fits, the decision with the lowest peak is
    taken. At last parameters are kept unsharded where there is room left.

    part: makes the parts, given a decision; called up to 1 + `MADE` + `MADE_FOR_KEPT` times.
    prices: with a budget. If other frames save beside this one (`beside`), each byte given up
        counts for theirs, too.
    states: that go to the host if a step is faster so, by forecast: what they leave is for values.
    """
    budget_bytes = prices.budget_bytes
    assert budget_bytes is not None
    parts = part(Handed())
    search = Search(parts, prices)
    near, far = search.cost(budget_bytes), (math.inf, math.inf)
    if states is not None and search.without(budget_bytes).over(limits_of(budget_bytes)):
        over, time_us = search.cost(budget_bytes + states.num_bytes)
        far = over, time_us + states.more_us
    if states is None or near <= far:
        return _within(budget_bytes, part, search)
    log.info("optimizer states live on the host: a step of %.0f us, for %.0f", far[1], near[1])
    handed = _within(budget_bytes + states.num_bytes, part, search)
    return dataclasses.replace(handed, has_host_states=True)


def _within(budget_bytes: int, part: Callable[[Handed], Parts], search: Search) -> Handed:
    """Decide as `decide` does, wherever states live."""
    budgets, best_parts = limits_of(budget_bytes), search.parts
    best, found = Handed(), search.without(budget_bytes)
    limits, seen = dict(budgets), {best}
    for number in range(MADE if found.over(budgets) else 0):
        new = (each for each in search.best(limits) if each.handed not in seen)
        chosen = next(new, None)
        if chosen is None:
            break
        is_faster = chosen.run.time_us < WORTH * found.time_us
        if not (found.over(budgets) or is_faster):
            break
        seen.add(chosen.handed)
        made = part(chosen.handed)
        run = Run.of(made.problems, budget_bytes)
        log.info(
            "parts %d: given up for %.0f us; a step of %.0f us, forecast %.0f; beyond it by %s",
            number,
            sum(choice.time_us for choice, _, _ in chosen.values.chosen(chosen.taken)),
            run.time_us,
            chosen.run.time_us,
            run.over(budgets) or "nothing",
        )
        if run.cost(budgets) < found.cost(budgets):
            best, found, best_parts = chosen.handed, run, made
        for kind in KINDS:  # what parts need beyond their forecast is not there
            limits[kind] = budget_bytes - (run.peaks[kind][1] - chosen.run.peaks[kind][1])
    decided, run = _with_kept(best, best_parts, found, part, search, limits, budget_bytes)
    if log.isEnabledFor(logging.INFO) and decided.saved is not None:
        prices = dataclasses.replace(search.prices, budget_bytes=budget_bytes)
        log.info("a step of %.0f us, at least %.0f", run.time_us, bound_us(search.parts, prices))
    return decided


def _with_kept(
    decided: Handed,
    parts: Parts,
    found: Run,
    part: Callable[[Handed], Parts],
    search: Search,
    limits: Mapping[str, float],
    budget_bytes: float,
) -> tuple[Handed, Run]:
    """Add to a decision on values the parameters that are kept, or give up more for them.

    Returns it, and how it runs. parts, found: as the decision has them made, and simulated.
    part: as of `decide`. limits: of forecasts, so that parts keep to the budget.
    """
    tries = [search.keeping(decided, parts.problems, budget_bytes)]
    gathers, least_us = search.without_gathers(parts.problems)
    if least_us < WORTH * tries[0].run.time_us:
        for share in FOR_KEPT:
            more = share * gathers * search.counts
            chosen = search.best({kind: limit - more for kind, limit in limits.items()})[0]
            if chosen.run.over(limits):
                break
            problems = search.forecast.problems(chosen.values, chosen.taken)
            tries.append(search.keeping(chosen.handed, problems, budget_bytes))
    budgets = limits_of(budget_bytes)
    for handed, forecast in sorted(tries, key=lambda each: each.run.cost(budgets))[:MADE_FOR_KEPT]:
        is_worth_it = decided == Handed() or forecast.time_us < WORTH * found.time_us
        if not (handed.params and is_worth_it):
            continue
        made = part(handed)
        run = Run.of(made.problems, budget_bytes)
        log.info(
            "%d parameters kept: a step of %.0f us, forecast %.0f, without %.0f; beyond it by %s",
            len(handed.params),
            run.time_us,
            forecast.time_us,
            found.time_us,
            run.over(budgets) or "nothing",
        )
        if run.cost(budgets) < found.cost(budgets):
            return dataclasses.replace(handed, num_bytes=made.num_bytes), run
    return dataclasses.replace(decided, num_bytes=parts.num_bytes), found


def bound_us(parts: Parts, prices: Prices) -> float:
    """Microseconds of a step that no choice for its blocks beats within the budget.

    They are the bounds of forward and backward, of compute and links, though parameters be kept,
    and that of what blocks have to give up: as much as the step is beyond the budget with one
    bucket a unit. Choices are those of `SavedValues`: no block computes another one's values again,
    and copies are hidden.

    parts: that were made without a decision. prices: with a budget.
    """
    budget_bytes = prices.budget_bytes
    assert budget_bytes is not None
    problems = parts.problems
    run = Run.of(problems, budget_bytes)
    host = prices.topology.host_link
    values = SavedValues(parts.joint, parts.saved, prices, parts.table).near(host)
    first = first_of(parts, values)
    counts = 1 + prices.beside
    needs = [
        Need(asked(kind, run.peaks[kind][0], first[kind], values), num_bytes / counts)
        for kind, num_bytes in run.over(limits_of(budget_bytes)).items()
    ]
    kept = with_kept(*problems, parts.forward.priced.candidates)
    made_us = sum(lower_bound(problem).time_us for problem in kept)
    return made_us + least_us(values.curves, needs)
