"""Page of `autoshard plan --html`: timeline, memory and all configurations, in one file.

It loads nothing from elsewhere, and can be read without its script. Module names may hold anything:
all text is escaped.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autoshard.passes.ir import markup, svg
from autoshard.passes.ir.picture import LEGEND, Phase, Sent, draw
from autoshard.passes.ir.plan import show_bytes
from autoshard.passes.planner.simulate import Run
from autoshard.tools.plan.estimate import Configuration, Estimate
from autoshard.tools.plan.front import Tried
from autoshard.tools.plan.planning import PlanReport
from autoshard.tools.plan.report import (
    cluster_line,
    front_of,
    host_line,
    interval_line,
    memory_rows,
    micro_batches,
    model_line,
    ms,
    speeds,
    strategy_of,
    tight_line,
    time_rows,
    verdict,
)

STACKED = {
    "parameters": "shards of parameters",
    "optimizer": "optimizer states",
    "gradients": "shards of gradients",
    "activations": "activations",
    "gathered": "gathered parameters",
    "unreduced": "unreduced gradients",
    "temporaries": "temporaries",
}
"""Categories of memory from the bottom up: first those that change least."""

SETTINGS = ("strategy", "mesh", "micro-batch", "checkpointing")
COLUMNS = 400  # of the picture of memory
FAR = 2  # times a device's memory, from which on dots would crowd out the others
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def write(report: PlanReport, path: Path) -> None:
    """Write the page to a file. Raises OSError if that can't be done."""
    path.write_text(page(report), encoding="utf-8", errors="xmlcharrefreplace")


def page(report: PlanReport) -> str:
    """Make the whole page, a document of HTML."""
    title = f"{report.model.name} on {report.gpus} x {report.topology.name}"
    return markup.page(title, content(report))


def content(report: PlanReport) -> str:
    """Make what is on the page, as a piece of HTML that a notebook can show."""
    parts = [*_head(report), *_step(report), *_memory(report)]
    if report.num_configurations > 1:
        parts += _others(report)
    parts += [markup.tag("p", note) for note in _notes(report)]
    return markup.fragment(parts)


def _head(report: PlanReport) -> Iterator[str]:
    """Yield the title, and the figures of the best configuration."""
    best, limit = report.estimates[0], report.topology.memory_bytes
    about = zip(SETTINGS, settings_of(best.configuration), strict=True)
    speed, mfu = speeds(report, best.sample_us)
    yield markup.tag("h1", f"{report.model.name} on {report.gpus} x {report.topology.name}")
    yield markup.tag("p", model_line(report))
    yield markup.tag("p", cluster_line(report))
    shown = {
        "ms a step": ms(best.step_time_us),
        "ms of it exposed": ms(best.exposed_us),
        f"{report.work.unit}/s per GPU": speed,
        "MFU": mfu,
        f"at the peak, of {show_bytes(limit)}": show_bytes(best.memory.peak_bytes),
        "fits": "yes" if report.overflow is None else "no",
    }
    bad = [] if report.overflow is None else ["fits"]
    yield markup.cards({name: value for name, value in shown.items() if value}, bad)
    words = ", ".join(f"{name} {value}" for name, value in about)
    yield markup.tag("p", f"{verdict(report)}: {words}")


def settings_of(configuration: Configuration) -> tuple[str, ...]:
    """Format what a configuration chooses, in the order of `SETTINGS`."""
    return (
        strategy_of(configuration),
        configuration.mesh,
        micro_batches(configuration),
        configuration.checkpointing,
    )


def _step(report: PlanReport) -> Iterator[str]:
    """Yield the timeline of the best configuration."""
    best = report.estimates[0]
    yield markup.tag("h2", "One step")
    yield markup.legend({**LEGEND, "optimizer-step": "optimizer"})
    yield draw(list(_phases(best)))


def _phases(best: Estimate) -> Iterator[Phase]:
    """Yield forward, backward and the optimizer's step."""
    for kind, timeline in best.timelines.items():
        sent = [each for run in timeline.runs for each in _sent(run)]
        yield Phase(kind, timeline.time_us, timeline.compute, sent)
    took = best.outside.optimizer_us
    yield Phase("optimizer", took, ((0.0, took, 0, 0),), (), "optimizer-step")


def _sent(run: Run) -> Iterator[Sent]:
    """Yield the collectives of a bucket, one for each link; the last has what is exposed."""
    bucket = run.bucket
    names = tuple(item.name for item in bucket.items)
    for kind, (link, begin, end) in zip((bucket.kind, "all_reduce"), run.turns, strict=False):
        exposed = run.exposed_us if end == run.finish_us else 0.0
        yield Sent(kind, link, names, bucket.num_bytes, bucket.layout, begin, end, exposed)


def _memory(report: PlanReport) -> Iterator[str]:
    """Yield memory by category over the step, and tables of times and of memory at the peak."""
    best, limit = report.estimates[0], report.topology.memory_bytes
    peak = best.memory.peak_bytes
    is_near = peak > limit / 3
    unit, end_us = _unit_of(peak), sum(each.time_us for each in _phases(best))
    yield markup.tag("h2", "Memory over the step")
    yield markup.legend(STACKED)
    yield svg.areas(
        list(_columns(best, UNITS[unit])),
        end_us / 1e3,
        ("ms", unit),
        most=1.04 * max(peak, limit if is_near else 0) / UNITS[unit],
        line=(limit / UNITS[unit], f"the device has {show_bytes(limit)}") if is_near else None,
        title=functools.partial(_column_title, unit),
    )
    times = markup.table(time_rows(best), words={0, 5})
    memory = markup.table(memory_rows(best.memory, limit), words={0})
    yield f'<div class="columns">{times}{memory}</div>'
    for line in (interval_line(report), host_line(best), tight_line(report)):
        if line:
            yield markup.tag("p", line)


def _unit_of(num_bytes: int) -> str:
    """Unit in which so many bytes are a number that can be read, one of `UNITS`."""
    return next((name for name, size in UNITS.items() if num_bytes >= size), "KiB")


def _columns(best: Estimate, unit: int) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Yield (ms, memory by category): from then on, the most in use in a short part of the step.

    unit: bytes of one unit of memory.
    """
    starts = list(itertools.accumulate((each.time_us for each in _phases(best)), initial=0.0))
    end_us = starts.pop()
    samples = [
        (start + time_us, memory)
        for start, found in zip(starts, best.usage.values(), strict=True)
        for time_us, memory in found
    ]
    width = end_us / COLUMNS
    for _, group in itertools.groupby(samples, key=lambda sample: sample[0] // width):
        found = list(group)
        most = max((memory for _, memory in found), key=lambda memory: memory.peak_bytes)
        yield found[0][0] / 1e3, {name: getattr(most, name) / unit for name in STACKED}


def _column_title(unit: str, begin: float, values: Mapping[str, float]) -> str:
    """Describe memory at one time, a line for each category that is not empty."""
    lines = [f"at {begin:.1f} ms: {sum(values.values()):.2f} {unit}"]
    lines += [f"{value:.2f} {unit} {STACKED[name]}" for name, value in values.items() if value]
    return "\n".join(lines)


def _others(report: PlanReport) -> Iterator[str]:
    """Yield all configurations that were estimated, as points and as a table."""
    limit = report.topology.memory_bytes
    front = front_of(report)
    fits = report.overflow is None
    near = [n for n, each in enumerate(report.tried) if each.peak_bytes <= FAR * limit or not fits]
    unit = _unit_of(max(report.tried[number].peak_bytes for number in near))
    dots = {number: _point(report, number, front, UNITS[unit]) for number in near}
    far = len(report.tried) - len(near)
    scope = "none that fits" if fits else "none"
    more = f"; {far} need more than {FAR} times the device's memory, and have no dot"
    yield markup.tag("h2", f"All configurations ({len(report.tried)})")
    yield markup.legend(
        {
            "front": f"Pareto front: {scope} is as fast with less memory",
            "fits": "others that fit",
            "beyond": "do not fit" + (more if far else ""),
        }
    )
    yield svg.points(
        list(dots.values()),
        [dots[number] for number in front],
        (unit, f"{report.work.unit}/s per GPU"),
        (limit / UNITS[unit], "device"),
    )
    yield _table(report, front)


def _point(report: PlanReport, number: int, front: Sequence[int], unit: int) -> svg.Point:
    """Make the dot of configuration `number`, with memory in units of so many bytes."""
    tried = report.tried[number]
    pairs = zip(_heads(report), _cells(report, tried), strict=True)
    is_beyond = tried.peak_bytes > report.topology.memory_bytes
    return svg.Point(
        tried.peak_bytes / unit,
        report.work.per_second(tried.sample_us),
        "front" if number in front else "beyond" if is_beyond else "fits",
        "\n".join(f"{name}: {value}" for name, value in pairs),
    )


def _heads(report: PlanReport) -> tuple[str, ...]:
    speed = f"{report.work.unit}/s per GPU"
    return (*SETTINGS, "step ms", speed, "MFU", "peak", "fits", "buckets")


def _cells(report: PlanReport, tried: Tried) -> tuple[str, ...]:
    """Format a configuration, in the order of `_heads`."""
    return (
        *settings_of(tried.configuration),
        ms(tried.step_time_us),
        *speeds(report, tried.sample_us),
        show_bytes(tried.peak_bytes),
        "yes" if tried.peak_bytes <= report.topology.memory_bytes else "no",
        "searched" if tried.is_searched else "one a unit",
    )


def _table(report: PlanReport, front: Sequence[int]) -> str:
    """Make the table of all configurations; those of the front are marked."""
    limit = report.topology.memory_bytes
    rows = [
        (str(number + 1), *_cells(report, each), "front" if number in front else "")
        for number, each in enumerate(report.tried)
    ]
    kinds = {
        number: "marked" if number in front else "plain" if each.peak_bytes <= limit else "faint"
        for number, each in enumerate(report.tried)
    }
    head = ("", *_heads(report), "Pareto")
    return markup.table([head, *rows], words={1, 4, 9, 10, 11}, kinds=kinds)


def _notes(report: PlanReport) -> Iterator[str]:
    """Yield sentences that say what the figures are."""
    yield (
        "All figures are predictions. Buckets are searched for in the best few configurations, and "
        "are one a unit in the others."
    )
    if report.work.flops:
        peak = report.topology.peak_flops_per_us(report.model.dtype) / 1e6
        yield (
            f"MFU counts {report.work.flops:.4g} operations a sample, those of the model itself: "
            "6 for each parameter that a token is multiplied with, and for attention 12 x layers "
            "x heads x size of a head x length of the sequence (Chowdhery et al., PaLM, 2022, "
            f"appendix B). The peak is the data sheet's, {peak:g} TFLOP/s of {report.model.dtype}."
        )
