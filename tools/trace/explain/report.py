"""Report on exposed communication: a table for people, and the same as JSON."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from autoshard.tools.trace.explain import intervals
from autoshard.tools.trace.explain.costs import costs_of
from autoshard.tools.trace.explain.device import device_lanes
from autoshard.tools.trace.explain.host import host_lanes
from autoshard.tools.trace.explain.lanes import Lanes
from autoshard.tools.trace.explain.reader import DEVICE, Event
from autoshard.tools.trace.explain.reasons import (
    CAUSES,
    COPY,
    HOST,
    LATE,
    LINK,
    OTHER,
    QUEUE,
    SKEW,
    SMALL,
    Piece,
    explain_step,
    gains,
)

SIGNIFICANT = 0.05
"""Share of a step, from which on a reason is worth a remedy."""

WORST = 3

ADVICE = {
    LATE: "Launch these earlier, or wait for them later: the link was idle before. Prefetch one "
    "unit more, if there is memory for it.",
    QUEUE: "Give these a process group or a stream of their own, or launch them before what they "
    "wait behind: that isn't needed as soon.",
    HOST: "The host doesn't keep ahead: compile the model, use CUDA graphs, or take out what makes "
    "it wait (.item(), prints, data loading).",
    COPY: "Copies into and out of buffers are in the way: use larger parameters or fewer per unit, "
    "dtypes that need no cast, or a layout that needs no copy.",
    SKEW: "A rank comes late, and the others wait for it: balance what ranks compute and load.",
    SMALL: "Start-up dominates: put more parameters into a collective, by larger units or buckets.",
    LINK: "The link is too slow for so little computation: send less (dtype, strategy), compute "
    "more a step (batch, accumulation), or use a faster link.",
    OTHER: "Computation waited for something that the trace doesn't show.",
}


@dataclass(frozen=True)
class Finding:
    """Exposed communication of one reason: milliseconds a step, and where most of it is.

    share: of the step. places: name and milliseconds a step, the worst first.
    """

    reason: str
    exposed_ms: float
    share: float
    gain_ms: float
    places: list[tuple[str, float]]
    advice: str


@dataclass(frozen=True)
class Report:
    """Exposed communication of some ranks, as means over their steps, in milliseconds a step.

    idle_ms: neither computation nor communication. findings: the largest first.
    """

    ranks: int
    steps: int
    step_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    idle_ms: float
    findings: list[Finding]

    @property
    def causes(self) -> list[str]:
        """Reasons that can be removed and are SIGNIFICANT, the largest first."""
        return [
            each.reason
            for each in self.findings
            if each.reason in CAUSES and each.share >= SIGNIFICANT
        ]


def lanes_of(title: str, events: Sequence[Event]) -> Lanes:
    """Sort the spans of a rank into lanes, of its device if it has one."""
    on_device = any(each.category in DEVICE for each in events)
    return device_lanes(title, events) if on_device else host_lanes(title, events)


def report_on(ranks: Sequence[Lanes]) -> Report:
    """Explain the exposed communication of ranks of one run.

    Raises ValueError if none of them has a collective in a step.
    """
    pieces: list[Piece] = []
    sums: defaultdict[str, float] = defaultdict(float)
    gained: defaultdict[str, float] = defaultdict(float)
    number = 0
    for costs in costs_of(ranks):
        for begin, end in costs.lanes.steps:
            own = explain_step(costs, (begin, end))
            pieces += own
            _add(gained, gains(own))
            _add(sums, _times(costs.lanes, begin, end))
            number += 1
    if not sums["communication"]:
        titles = ", ".join(lanes.title for lanes in ranks)
        raise ValueError(
            f"{titles}: no collective in {number} steps; expected a trace of sharded training, "
            "with kernels of NCCL, or works of c10d on a CPU"
        )
    per_step = 1e3 * number
    findings = _findings(pieces, gained, per_step, sums["step"])
    return Report(
        ranks=len(ranks),
        steps=number // len(ranks),
        step_ms=sums["step"] / per_step,
        compute_ms=sums["compute"] / per_step,
        communication_ms=sums["communication"] / per_step,
        exposed_ms=sum(each.exposed_ms for each in findings),
        idle_ms=sums["idle"] / per_step,
        findings=findings,
    )


def _add(sums: defaultdict[str, float], more: Mapping[str, float]) -> None:
    """Add the numbers of `more` to `sums`, by their keys."""
    for key, each in more.items():
        sums[key] += each


def _times(lanes: Lanes, begin: float, end: float) -> dict[str, float]:
    """Sum up the microseconds of a step, of what runs in it, and of when nothing does."""
    on_links = intervals.merge((each.begin, each.end) for each in lanes.collectives)
    copied = intervals.merge((each.begin, each.end) for each in lanes.copies)
    computing = intervals.clip(lanes.busy, begin, end)
    sent = intervals.clip(on_links, begin, end)
    anything = intervals.merge([*computing, *sent, *intervals.clip(copied, begin, end)])
    return {
        "step": end - begin,
        "compute": intervals.total(computing),
        "communication": intervals.total(sent),
        "idle": end - begin - intervals.total(anything),
    }


def _findings(
    pieces: Sequence[Piece], gained: Mapping[str, float], per_step: float, total: float
) -> list[Finding]:
    """Sum up pieces by their reason, the largest first. Reasons without time are left out."""
    times: defaultdict[str, float] = defaultdict(float)
    places: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for piece in pieces:
        times[piece.reason] += piece.time
        places[piece.reason][piece.place] += piece.time
    return [
        Finding(
            reason=reason,
            exposed_ms=time / per_step,
            share=time / total,
            gain_ms=gained[reason] / per_step,
            places=[(name, each / per_step) for name, each in _largest(places[reason])[:WORST]],
            advice=ADVICE[reason],
        )
        for reason, time in _largest(times)
        if time > 0
    ]


def _largest(times: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort times by their size, the largest first."""
    return sorted(times.items(), key=lambda pair: -pair[1])


def as_json(report: Report) -> dict[str, object]:
    """Return a report as an object of JSON, with its `causes`."""
    return {**asdict(report), "causes": report.causes}


def text(report: Report) -> str:
    """Format a report for people: a table, the worst places, and a line of advice a reason."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report."""
    share = report.exposed_ms / report.step_ms
    yield f"steps: {report.steps}, ranks: {report.ranks}; a step on average:"
    yield f"  {report.step_ms:10.2f} ms, of which"
    sent = f"{report.communication_ms:.2f} ms collectives"
    yield f"  {report.compute_ms:10.2f} ms computation, {sent}"
    yield f"  {report.exposed_ms:10.2f} ms exposed communication, {share:.1%} of the step"
    yield f"  {report.idle_ms:10.2f} ms neither"
    if report.idle_ms >= SIGNIFICANT * report.step_ms:
        yield "  (that is no communication: see what the host does then)"
    if not report.findings:
        return
    yield ""
    yield f"{'reason':32}{'exposed':>12}{'of a step':>11}{'to gain':>12}"
    for each in report.findings:
        gain = f"{each.gain_ms:9.2f} ms" if each.reason in CAUSES else ""
        yield f"{each.reason:32}{each.exposed_ms:9.2f} ms{each.share:11.1%}{gain:>12}".rstrip()
        if each.share >= SIGNIFICANT:
            yield from (f"    {time:8.2f} ms  {name}" for name, time in each.places)
    yield ""
    for each in report.findings:
        if each.share >= SIGNIFICANT:
            yield f"{each.reason}: {each.advice}"
    if not report.causes:
        yield f"No reason that can be removed takes {SIGNIFICANT:.0%} of a step."
