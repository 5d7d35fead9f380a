"""Output of `autoshard plan`: tables for people, or one JSON object."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.passes.ir.plan import show_bytes
from autoshard.passes.planner.search import Decision
from autoshard.passes.planner.simulate import Run
from autoshard.tools.plan.estimate import RESERVED, Configuration, Estimate, MemoryEstimate
from autoshard.tools.plan.front import best_that_fit
from autoshard.tools.plan.planning import PlanReport
from autoshard.tools.plan.ways import VALUES

CATEGORIES = tuple(field.name for field in dataclasses.fields(MemoryEstimate))


def text(report: PlanReport, *, with_buckets: bool = False) -> str:
    """Format tables: the best configurations, then memory and time of the first.

    Lines before them describe the model and the cluster, and say how many were tried, or that none
    fits, and by which category of memory.
    with_buckets: whether the buckets of the first follow, a line for those of a unit.
    """
    topology, best = report.topology, report.estimates[0]
    lines = [
        f"{report.model.name}: {model_line(report)}",
        cluster_line(report),
        "",
        verdict(report),
        *_columns(_configuration_rows(report)),
        "",
    ]
    lines += [*_columns(memory_rows(best.memory, topology.memory_bytes)), ""]
    for line in (host_line(best), tight_line(report)):
        lines += [line, ""] if line else []
    lines += [*_columns(time_rows(best)), "", interval_line(report), *margin_lines(best)]
    if any(_is_by_values(each.configuration) for each in report.tried):
        lines += ["", *_columns(_front_rows(report)), "", _ABOUT_VALUES]
    if with_buckets:
        for kind, decision in best.decisions.items():
            lines += ["", kind, *_columns(_bucket_rows(decision))]
    return "\n".join(lines) + "\n"


def model_line(report: PlanReport) -> str:
    """Describe the model that is trained, in one line, but for its name."""
    model = report.model
    return (
        f"{count(report.num_parameters)} parameters in {model.param_dtype}, "
        f"computed with in {model.dtype}; {model.optimizer}; sequences of {model.seq}"
        + ("; the loss in chunks" if model.is_loss_chunked else "")
    )


def cluster_line(report: PlanReport) -> str:
    """Describe the cluster, in one line."""
    topology = report.topology
    size = show_bytes(topology.memory_bytes)
    each = f"a budget of {size} each" if report.budget_bytes is not None else f"{size} each"
    return f"{report.gpus} x {topology.name} ({topology.title}; {each})"


def verdict(report: PlanReport) -> str:
    """Say how many configurations were estimated, or that none fits, and why."""
    tried = report.num_configurations
    if report.overflow is not None:
        return (
            f"does not fit, with {report.overflow}: of {tried} configurations this one needs least"
        )
    return f"best of {tried} configurations" if tried > 1 else "as asked for"


_ABOUT_VALUES = (
    "values:35 gives up 35 % of the bytes that forward could give up, those first that cost least "
    "time: they go to the host while compute hides copies, or are computed again"
)


def _is_by_values(configuration: Configuration) -> bool:
    """Tell whether backward computes single values again, not those of whole units."""
    return configuration.checkpointing.startswith(VALUES)


def _front_rows(report: PlanReport) -> Iterator[Sequence[str]]:
    """Yield a head, and a row for each configuration that no other one beats in memory and time."""
    yield "no other is less", "strategy", "mesh", "micro-batch", "checkpointing", "ms a sample"
    for each in (report.tried[number] for number in front_of(report)):
        about = each.configuration
        yield (
            show_bytes(each.peak_bytes),
            strategy_of(about),
            about.mesh,
            micro_batches(about),
            about.checkpointing,
            ms(each.sample_us),
        )


def front_of(report: PlanReport) -> list[int]:
    """Numbers of the configurations that were tried on the front of memory and time."""
    return best_that_fit(report.tried, report.topology.memory_bytes)


def _configuration_rows(report: PlanReport) -> Iterator[Sequence[str]]:
    """Yield a head, and a row for each of the best: settings, times in ms, speed, peak memory."""
    speed = f"{report.work.unit}/s per GPU"
    yield (
        *("", "strategy", "mesh", "micro-batch", "checkpointing", "step ms", "exposed ms"),
        *(speed, "MFU", "peak"),
    )
    for number, each in enumerate(report.estimates, start=1):
        about = each.configuration
        yield (
            str(number),
            strategy_of(about),
            about.mesh,
            micro_batches(about),
            about.checkpointing,
            ms(each.step_time_us),
            ms(each.exposed_us),
            *speeds(report, each.sample_us),
            show_bytes(each.memory.peak_bytes),
        )


def speeds(report: PlanReport, sample_us: float) -> tuple[str, str]:
    """Format tokens, or samples, a second and GPU, and MFU; "" for an MFU that is not known.

    sample_us: microseconds of a GPU for a sample.
    """
    rate, mfu = report.work.per_second(sample_us), mfu_of(report, sample_us)
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}", "" if mfu is None else percent(mfu)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def mfu_of(report: PlanReport, sample_us: float) -> float | None:
    """Share of the peak in the dtype of computation that the model's own operations reach.

    None if there are none to count. sample_us: microseconds of a GPU for a sample.
    """
    peak = report.topology.peak_flops_per_us(report.model.dtype)
    return report.work.mfu(sample_us, peak)


def memory_rows(memory: MemoryEstimate, limit: int) -> Iterator[Sequence[str]]:
    """Yield a head, a row for each category, and one for the peak: bytes and share of `limit`."""
    yield "memory at the peak", "bytes", "", "of the device"
    for name in (*CATEGORIES, "peak_bytes"):
        num_bytes = getattr(memory, name)
        share = percent(num_bytes / limit)
        yield name.replace("_bytes", ""), str(num_bytes), show_bytes(num_bytes), share


def host_line(best: Estimate) -> str:
    """Say how much lies on the host; return "" if nothing does."""
    kinds = [
        (best.host_bytes, "of values, pinned, from forward to backward"),
        (best.host_state_bytes, "of optimizer states, pinned, from step to step"),
    ]
    there = [f"{show_bytes(num_bytes)} {what}" for num_bytes, what in kinds if num_bytes]
    return f"on the host, for each device: {'; '.join(there)}" if there else ""


def tight_line(report: PlanReport) -> str:
    """Warn where the best fits, but not with what the allocator reserves; else return ""."""
    memory, limit = report.estimates[0].memory, report.topology.memory_bytes
    if not memory.peak_bytes <= limit < memory.reserved_bytes:
        return ""
    return (
        f"tight: in published runs the allocator reserved {RESERVED} times what was allocated, "
        f"which would be {show_bytes(memory.reserved_bytes)}: it will give memory back and ask "
        "again, which takes time. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps"
    )


def time_rows(best: Estimate) -> Iterator[Sequence[str]]:
    """Yield a head, and rows with times in ms: of each searched graph, the optimizer, the step."""
    yield "time", "ms", "exposed ms", "lower bound ms", "gap", "bound by", "buckets"
    for kind, decision in best.decisions.items():
        timeline, bound = decision.timeline, decision.bound
        yield (
            kind,
            ms(timeline.time_us),
            ms(timeline.exposed_us),
            ms(bound.time_us),
            f"{decision.gap:.3f}",
            bound.binding,
            str(len(timeline.runs)),
        )
    binding = "host link" if best.host_state_bytes else "memory"
    yield "optimizer", ms(best.outside.optimizer_us), "", "", "", binding, ""
    others = best.configuration.accumulate - 1
    if others:
        took, exposed = (
            others * sum(getattr(each, name) for each in best.earlier.values())
            for name in ("time_us", "exposed_us")
        )
        took += others * best.outside.between_us
        yield f"{others} microbatches before", ms(took), ms(exposed), "", "", "", ""
    if best.outside.spread_us:
        spread = ms(best.outside.spread_us)
        yield "gathers after it", spread, spread, "", "", "link", ""
    yield "step", ms(best.step_time_us), ms(best.exposed_us), "", "", "", ""


def interval(report: PlanReport) -> tuple[float, float] | None:
    """Microseconds between which nine of ten steps like the best lie; None if none was measured."""
    found, took = report.topology.residuals, report.estimates[0].step_time_us
    return None if found is None else (found.low * took, found.high * took)


def interval_line(report: PlanReport) -> str:
    """Say between which times the best step should lie, and by which published runs."""
    found, between = report.topology.residuals, interval(report)
    if found is None or between is None:
        return "no published run on such devices was compared with predictions"
    more = f"; none had more than {found.most_gpus} GPUs" if report.gpus > found.most_gpus else ""
    return (
        f"step: {ms(between[0])} to {ms(between[1])} ms, as nine of ten published runs "
        f"({found.runs} of {found.like}{more}) were {found.low} to {found.high} of predictions"
    )


def margin_lines(best: Estimate) -> Iterator[str]:
    """Yield a line for each graph that says by how much buckets are faster than one a unit.

    Yields nothing where errors of predictions are not known.
    """
    for kind, decision in best.decisions.items():
        between = decision.margin
        if between is not None:
            yield (
                f"{kind}: buckets are {100 * between.low:.1f} to {100 * between.high:.1f} % faster "
                "than one a unit, if compute and links err as much as those runs"
                if between.high > 0
                else f"{kind}: one bucket a unit, as nothing is faster wherever times may lie"
            )


def strategy_of(configuration: Configuration) -> str:
    """Name a strategy, and say if optimizer states live on the host."""
    return configuration.strategy + (", states on host" if configuration.states_on_host else "")


def micro_batches(configuration: Configuration) -> str:
    """Format a microbatch, "2", and how many a step has, "2 x 4"."""
    number = configuration.accumulate
    return f"{configuration.micro_batch}{f' x {number}' if number > 1 else ''}"


def _bucket_rows(decision: Decision) -> Iterator[Sequence[str]]:
    """Yield a head, and a line for each run of buckets of one kind that begin in one unit."""
    yield (
        *("kind", "layout", "from", "to", "buckets", "params", "bytes"),
        *("launch us", "finish us", "exposed us"),
    )
    for (kind, unit), each in itertools.groupby(
        decision.timeline.runs, key=lambda run: (run.bucket.kind, run.bucket.items[0].unit)
    ):
        runs = list(each)
        items = [item for run in runs for item in run.bucket.items]
        yield (
            kind,
            "/".join(sorted({run.bucket.layout for run in runs})),
            unit,
            items[-1].unit,
            str(len(runs)),
            str(len(items)),
            show_bytes(sum(item.num_bytes for item in items)),
            f"{runs[0].launch_us:.0f}",
            f"{runs[-1].finish_us:.0f}",
            f"{sum(run.exposed_us for run in runs):.0f}",
        )


def _columns(rows: Iterator[Sequence[str]]) -> list[str]:
    """Format rows of equal length as lines, with cells padded so that they form columns."""
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def count(number: int) -> str:
    """Format a number with its unit, "1.24 B", "M" or "k"; one below 1000 as it is."""
    for unit, power in (("B", 9), ("M", 6), ("k", 3)):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {unit}"
    return str(number)


def as_json(report: PlanReport) -> dict[str, Any]:
    """Return the report as one object for JSON: `memory` and `plans` are those of the best.

    Times are in microseconds, but for `planning_seconds`.
    """
    best = report.estimates[0]
    return {
        "model": report.model.name,
        "parameters": report.num_parameters,
        "gpus": report.gpus,
        "topology": report.topology.name,
        "planning_seconds": report.planning_s,
        "step_time_us": best.step_time_us,
        **_speed_json(report, best.sample_us),
        "fits": report.overflow is None,
        "overflow": report.overflow,
        "memory": _memory_json(best.memory),
        "reserved_bytes": best.memory.reserved_bytes,
        "host_bytes": best.host_bytes,
        "host_state_bytes": best.host_state_bytes,
        "configurations": [_configuration_json(report, each) for each in report.estimates],
        "front": [
            {
                **_settings_json(report.tried[number].configuration),
                "sample_us": report.tried[number].sample_us,
                "peak_bytes": report.tried[number].peak_bytes,
            }
            for number in front_of(report)
        ],
        "plans": [_plan_json(kind, each) for kind, each in best.decisions.items()],
    }


def _memory_json(memory: MemoryEstimate) -> dict[str, int]:
    return {name: getattr(memory, name) for name in ("peak_bytes", *CATEGORIES)}


def _speed_json(report: PlanReport, sample_us: float) -> dict[str, Any]:
    """Return the speed of a GPU, and MFU as a share of 1; None for what is not known."""
    has_tokens = report.work.tokens is not None
    return {
        "tokens_per_second_per_gpu": report.work.per_second(sample_us) if has_tokens else None,
        "samples_per_second_per_gpu": 1e6 / sample_us,
        "mfu": mfu_of(report, sample_us),
    }


def _configuration_json(report: PlanReport, found: Estimate) -> dict[str, Any]:
    """Return settings, times in microseconds, speed, and memory in bytes of a configuration."""
    return {
        **_settings_json(found.configuration),
        "step_time_us": found.step_time_us,
        "exposed_us": found.exposed_us,
        **_speed_json(report, found.sample_us),
        "memory": _memory_json(found.memory),
    }


def _settings_json(about: Configuration) -> dict[str, Any]:
    return {
        "strategy": about.strategy,
        "mesh": [about.replicas, about.shards],
        "micro_batch": about.micro_batch,
        "accumulate": about.accumulate,
        "checkpointing": about.checkpointing,
        "states_on_host": about.states_on_host,
    }


def _plan_json(kind: str, decision: Decision) -> dict[str, Any]:
    """Return times in microseconds, peak memory in bytes and buckets of one graph's plan."""
    timeline, bound = decision.timeline, decision.bound
    return {
        "graph": kind,
        "time_us": timeline.time_us,
        "lower_bound_us": bound.time_us,
        "gap": decision.gap,
        "binding": bound.binding,
        "exposed_us": timeline.exposed_us,
        "peak_bytes": timeline.peak_bytes,
        "buckets": [each for run in timeline.runs for each in _buckets_json(run)],
    }


def _buckets_json(run: Run) -> Iterator[dict[str, Any]]:
    """Yield one object for each collective of `run`'s bucket, in order.

    That is one, or for a reduce with replicas two, the second of kind "all_reduce". Exposed time is
    that of both, given with the one that ends last.
    """
    bucket = run.bucket
    kinds = [bucket.kind, "all_reduce"]
    for kind, (_, begin, end) in zip(kinds, run.turns, strict=False):
        yield {
            "kind": kind,
            "bytes": bucket.num_bytes,
            "members": [item.name for item in bucket.items],
            "layout": bucket.layout,
            "launch_us": begin,
            "finish_us": end,
            "exposed_us": run.exposed_us if end == run.finish_us else 0.0,
        }
