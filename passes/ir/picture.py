"""Timeline of a step or of a plan as a picture: compute, collectives, and what compute waits for.

compute          |######|  |########|    one after the other: forward, backward, optimizer
gathers, node    |===|===|   |====|      a lane for each kind of collective and link, or axis
exposed                 |xx|             compute waits
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.passes.ir import markup
from autoshard.passes.ir.plan import Figures, Plan, show_bytes
from autoshard.passes.ir.svg import Bar, Lane, lanes

KINDS = {"gather": "gathers", "reduce": "reduces", "all_reduce": "all-reduces"}
LEGEND = {
    "compute": "compute",
    "copies": "copies and calls around collectives",
    "gather": "gathers",
    "reduce": "reduces",
    "all_reduce": "all-reduces",
    "exposed": "exposed: compute waits",
}
FINEST = 2000  # parts of a picture's width; shorter gaps between bars of compute are not shown


@dataclass(frozen=True)
class Sent:
    """Collective of a bucket, with times in microseconds from the start of its graph.

    kind: one of `KINDS`.
    where: the link or the mesh axis that it runs over.
    exposed_us: for how long compute waits for it, up to its end.
    """

    kind: str
    where: str
    names: Sequence[str]
    num_bytes: int
    layout: str
    begin_us: float
    end_us: float
    exposed_us: float

    def about(self, phase: str) -> str:
        """Describe the collective in lines: what it is, its times, and its parameters.

        phase: name of the one that it is in, from whose start times are counted.
        """
        number = len(self.names)
        took = f"{self.begin_us / 1e3:.2f} to {self.end_us / 1e3:.2f} ms of {phase}"
        lines = [
            f"{self.kind.replace('_', '-')} of {number} parameter{'s' if number > 1 else ''}, "
            f"{show_bytes(self.num_bytes)}, {self.layout}, over {self.where}",
            f"{took}: {_ms(self.end_us - self.begin_us)}, {_ms(self.exposed_us)} of it exposed",
        ]
        return "\n".join([*lines, *show_names(self.names)])


@dataclass(frozen=True)
class Phase:
    """Part of a step, a graph for instance.

    compute: (begin us, end us, first op, one after the last), from the start of the phase.
    color: of compute, a class of `markup.STYLE`.
    """

    name: str
    time_us: float
    compute: Sequence[tuple[float, float, int, int]]
    sent: Sequence[Sent]
    color: str = "compute"


def show_plan(plan: Plan) -> str:
    """Make a piece of HTML of a plan: its text, under its timeline if it has figures."""
    parts = [markup.tag("pre", plan.text())]
    if plan.figures is not None:
        parts = [draw([_phase_of(plan, plan.figures)]), markup.legend(LEGEND), *parts]
    return markup.fragment(parts)


def _phase_of(plan: Plan, figures: Figures) -> Phase:
    """Return the predicted timeline of a plan."""
    sent = tuple(
        Sent(
            bucket.kind,
            bucket.axis,
            bucket.names,
            bucket.num_bytes,
            bucket.layout,
            times.launch_us,
            times.finish_us,
            times.exposed_us,
        )
        for bucket, times in zip(plan.buckets, figures.buckets, strict=True)
    )
    return Phase(plan.graph, figures.makespan_us, figures.compute, sent)


def draw(phases: Sequence[Phase]) -> str:
    """Draw phases one after the other, with an axis in ms, as SVG."""
    starts = list(itertools.accumulate((each.time_us for each in phases), initial=0.0))
    end = starts.pop()
    spans: list[Bar] = []
    compute: list[Bar] = []
    exposed: list[Bar] = []
    sent: dict[tuple[str, str], list[Bar]] = {}
    for start, phase in zip(starts, phases, strict=True):
        words = f"{phase.name} {_ms(phase.time_us)}"
        spans.append(_bar(start, 0.0, phase.time_us, "phase", words, words))
        compute += _compute(phase, start, end / FINEST)
        for each in phase.sent:
            bars = sent.setdefault((each.kind, each.where), [])
            about = each.about(phase.name)
            bars.append(_bar(start, each.begin_us, each.end_us, each.kind, about))
            if each.exposed_us:
                words = f"compute waits {_ms(each.exposed_us)} for the\n{about}"
                begin = each.end_us - each.exposed_us
                exposed.append(_bar(start, begin, each.end_us, "exposed", words))
    order = sorted(sent, key=lambda key: (list(KINDS).index(key[0]), key[1]))
    rows = [
        Lane("", spans),
        Lane("compute", [*compute, *exposed]),
        *(Lane(f"{KINDS[kind]}, {where}", sent[kind, where]) for kind, where in order),
        Lane("exposed", exposed),
    ]
    return lanes(rows, end / 1e3, "ms")


def _compute(phase: Phase, start: float, gap: float) -> Iterator[Bar]:
    """Yield bars of a phase's compute, on one that stands for copies and calls between them.

    gap: microseconds below which neighbours are one bar.
    """
    worked = sum(end - begin for begin, end, *_ in phase.compute)
    waited = sum(each.exposed_us for each in phase.sent)
    words = f"copies and calls around collectives: {_ms(phase.time_us - worked - waited)} in all"
    yield _bar(start, 0.0, phase.time_us, "copies", f"{phase.name}, {words}")
    for begin, end, first, after in _merged(phase.compute, gap):
        ops = f", ops {first} to {after - 1}" if after > first else ""
        words = f"{phase.name}{ops}: {_ms(end - begin)}"
        yield _bar(start, begin, end, phase.color, words)


def _merged(
    pieces: Iterable[tuple[float, float, int, int]], gap: float
) -> Iterator[tuple[float, float, int, int]]:
    """Yield pieces of compute, those that are less than `gap` apart as one."""
    last: tuple[float, float, int, int] | None = None
    for begin, end, first, after in pieces:
        if last is not None and begin - last[1] < gap:
            last = (last[0], end, last[2], after)
        else:
            if last is not None:
                yield last
            last = (begin, end, first, after)
    if last is not None:
        yield last


def _bar(start: float, begin: float, end: float, color: str, title: str, text: str = "") -> Bar:
    """Make a bar in ms, from microseconds after `start`."""
    return Bar((start + begin) / 1e3, (start + end) / 1e3, color, title, text)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"


def show_names(names: Sequence[str]) -> list[str]:
    """Format parameters in few lines: one for a block, or for neighbours with the same parameters.

    >>> show_names(["embed", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "layers.2.a"])
    ['embed', 'layers.0 to 1: a, b', 'layers.2: a']
    """
    runs: list[tuple[str, list[int], list[str]]] = []  # path, numbers, parameters of each
    for (path, number), found in itertools.groupby(names, key=lambda name: _split(name)[:2]):
        inner = [_split(name)[2] for name in found]
        last = runs[-1] if runs else ("", [0], [])
        if path and last[0] == path and last[2] == inner and abs(last[1][-1] - number) == 1:
            last[1].append(number)
        else:
            runs.append((path, [number], inner))
    lines = []
    for path, numbers, inner in runs:
        until = f" to {numbers[-1]}" if len(numbers) > 1 else ""
        lines.append((f"{path}.{numbers[0]}{until}: " if path else "") + ", ".join(inner))
    return lines


def _split(name: str) -> tuple[str, int, str]:
    """Split a name at its first number: "layers", 0 and "a"; or "", 0 and the whole."""
    found = re.match(r"(.*?)\.(\d+)\.(.*)", name, re.DOTALL)
    return (found[1], int(found[2]), found[3]) if found else ("", 0, name)
