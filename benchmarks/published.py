"""Predicted beside published measurements of training runs, row by row.

    python benchmarks/published.py --rows FILE.csv                # with the package's topologies
    python benchmarks/published.py --rows FILE.csv --json OUT.json
    python benchmarks/published.py --rows FILE.csv --fit          # the constants, fitted anew
    python benchmarks/published.py --rows FILE.csv --folds 5 --sources --ablate

Prints each row's error, then the median and the 90th percentile of errors, the geometric mean of
predicted over measured, the rank correlation inside each source, and how many rows can be
expressed. Rows whose numbers were read off charts are counted apart, too. With `--json`, an object
has an entry for each row, in the file's order, and the summary.

--fit       fits the constants on the rows, and prints them with their bounds.
--folds N   predicts each row with constants fitted on the others: N parts, each left out in turn.
--sources   leaves out each source in turn.
--ablate    fits again without one part of the model at a time.

The graphs are those that `autoshard plan` traces, on the CPU; a trace takes two seconds, and is
kept in the folder `--traces` if one is named. Columns are those of `published_rows.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from published_clusters import Constants, configuration, schedule
from published_fit import ABLATIONS, BOUNDS, Case, Fit, errors, fitted
from published_rows import NotExpressible, Row, Workload, model_flops, read_rows
from published_traces import PROCESSES, cpu_s, since, traced

from autoshard.tools.plan.estimate import Estimate, StepGraphs, estimate

GIB = 1 << 30
Traces = Mapping[Workload, StepGraphs | str]


@dataclass(frozen=True)
class Entry:
    """Row of the file with its prediction, or why there is none."""

    number: int
    row: Row | None
    why: str = ""
    predicted_s: float | None = None
    predicted_gib: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured seconds, less 1."""
        if self.row is None or self.predicted_s is None or self.row.measured_s is None:
            return None
        return self.predicted_s / self.row.measured_s - 1.0

    @property
    def memory_error(self) -> float | None:
        if self.row is None or self.predicted_gib is None or self.row.measured_gib is None:
            return None
        return self.predicted_gib / self.row.measured_gib - 1.0

    def as_json(self) -> dict[str, Any]:
        """Return numbers as the file has them: seconds, tokens and TFLOP/s of a GPU, GiB."""
        found: dict[str, Any] = {"row": self.number, "why": self.why or None}
        found["predicted_step_s"] = self.predicted_s
        found["predicted_memory_gib"] = self.predicted_gib
        if self.row is not None:
            shape, seq = self.row.workload.shape, self.row.workload.seq
            if self.predicted_s is not None:
                rate = self.row.tokens / self.predicted_s
                found["predicted_tokens_s_gpu"] = rate
                found["predicted_tflops_gpu"] = model_flops(shape, seq) * rate / 1e12
            found["source"] = self.row.source
            found["measured_step_s"] = self.row.measured_s
            found["measured_memory_gib"] = self.row.measured_gib
            found["error"] = self.error
            found["memory_error"] = self.memory_error
        return found


def predict(row: Row, traces: Traces, constants: Constants) -> tuple[float, float]:
    """Predict seconds of a step, and GiB at the peak. Raises NotExpressible."""
    topology = constants.topology(row)
    seconds = memory = 0.0
    for share, workload in row.workloads:
        step = traces[workload]
        if isinstance(step, str):
            raise NotExpressible(step)
        if row.is_fp8:
            vocabulary = workload.shape.vocabulary
            graphs = {kind: graph.in_float8(vocabulary) for kind, graph in step.graphs.items()}
            step = dataclasses.replace(step, graphs=graphs)
        found: Estimate = estimate(
            step,
            configuration(row),
            topology,
            searched=False,
            schedule=lambda problem: schedule(row, problem),
        )
        seconds += share * found.step_time_us / 1e6
        reported = found.memory.reserved_bytes if row.is_reserved else found.memory.peak_bytes
        memory += share * reported / GIB
    return seconds, memory


def entries(
    rows: Sequence[Row | NotExpressible], traces: Traces, constants: Constants
) -> Iterator[Entry]:
    """Yield an entry for each row, in order."""
    for number, row in enumerate(rows):
        if isinstance(row, NotExpressible):
            yield Entry(number, None, str(row))
            continue
        try:
            yield Entry(number, row, "", *predict(row, traces, constants))
        except NotExpressible as error:
            yield Entry(number, row, str(error))


# ---- summaries


def summary(found: Sequence[Entry]) -> dict[str, Any]:
    """Return counts and errors of all entries, and of each source."""
    timed = [each for each in found if each.error is not None]
    plain = [each for each in timed if each.row is not None and not each.row.is_chart]
    memory = [abs(each.memory_error) for each in found if each.memory_error is not None]
    expressed = sum(each.predicted_s is not None for each in found)
    return {
        "rows": len(found),
        "expressible": expressed / max(1, len(found)),
        "all": _errors(timed),
        "without_charts": _errors(plain),
        "memory_median": float(np.median(memory)) if memory else None,
        "sources": {
            name: {**_errors(mine), "rank_correlation": _rank_correlation(mine)}
            for name, mine in _by_source(timed).items()
        },
    }


def _by_source(found: Sequence[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for each in found:
        assert each.row is not None
        groups.setdefault(each.row.source, []).append(each)
    return groups


def _errors(found: Sequence[Entry]) -> dict[str, Any]:
    values = np.array([each.error for each in found], dtype=float)
    if not len(values):
        return {"rows": 0}
    return {
        "rows": len(values),
        "median": float(np.median(abs(values))),
        "p90": float(np.quantile(abs(values), 0.9)),
        "geometric_mean": float(np.exp(np.log1p(values).mean())),
    }


def _rank_correlation(found: Sequence[Entry]) -> float | None:
    """Spearman's: of predicted and measured tokens a second of a GPU; None for fewer than three."""
    if len(found) < 3:
        return None
    rates = np.array(
        [
            (each.row.tokens / each.predicted_s, each.row.tokens / each.row.measured_s)
            for each in found
            if each.row is not None and each.predicted_s and each.row.measured_s
        ]
    )
    ranks = rates.argsort(axis=0).argsort(axis=0)
    return float(np.corrcoef(ranks.T)[0, 1])


def as_text(label: str, found: Mapping[str, Any]) -> str:
    if not found["rows"]:
        return f"{label:32}   0 rows"
    text = (
        f"{label:32} {found['rows']:3} rows, |error| median {100 * found['median']:5.1f} %, "
        f"90th percentile {100 * found['p90']:5.1f} %, mean ratio {found['geometric_mean']:.3f}"
    )
    if found.get("rank_correlation") is not None:
        text += f", ranks {found['rank_correlation']:.3f}"
    return text


def print_summary(found: Mapping[str, Any]) -> None:
    print(f"{found['rows']} rows, {100 * found['expressible']:.1f} % of them expressible")
    print(as_text("all", found["all"]))
    print(as_text("without those off charts", found["without_charts"]))
    for name, each in found["sources"].items():
        print(as_text(f"  {name}", each))
    if found["memory_median"] is not None:
        print(f"memory: |error| median {100 * found['memory_median']:.1f} %")


def best_in_sweeps(found: Sequence[Entry]) -> list[tuple[str, int, float]]:
    """List sweeps with what is lost in each by taking the configuration that is predicted best.

    A sweep is rows of one source, system, model, length, dtypes, kind and number of GPUs that
    differ in microbatch, strategy or checkpointing. Lost is the share of the most tokens a second
    that were measured.
    """
    sweeps: dict[tuple[Any, ...], list[Row]] = {}
    predicted: dict[int, float] = {}
    for each in found:
        if each.row is None or each.error is None or each.predicted_s is None:
            continue
        row, work = each.row, each.row.workload
        key = (
            *(row.source, row.system, work.shape, work.seq, row.gpu, row.gpus, row.is_fp8),
            *(work.is_amp, work.param_dtype, work.reduce_dtype, work.is_compiled),
        )
        sweeps.setdefault(key, []).append(row)
        predicted[id(row)] = row.tokens / each.predicted_s
    lost = []
    for (source, system, shape, seq, gpu, gpus, *_), rows in sweeps.items():
        if len(rows) > 1:
            rates = {id(row): row.tokens / (row.measured_s or 1.0) for row in rows}
            chosen = max(rows, key=lambda row: predicted[id(row)])
            label = f"{source}, {system}: {shape.hidden} x {shape.layers}, {seq}, {gpus} {gpu}"
            lost.append((label, len(rows), 1.0 - rates[id(chosen)] / max(rates.values())))
    return lost


def print_sweeps(found: Sequence[Entry]) -> None:
    lost = best_in_sweeps(found)
    within = sum(share <= 0.03 for _, _, share in lost)
    print(
        f"{within} of {len(lost)} sweeps: the best by the plan is within 3 % of the best measured"
    )
    for label, number, share in lost:
        if share > 0.03:
            print(f"  {label}: {100 * share:.1f} % below, of {number} rows")


def print_rows(found: Sequence[Entry]) -> None:
    for each in found:
        if each.row is None or each.predicted_s is None:
            print(f"{each.number:4} {each.why}")
            continue
        row, work = each.row, each.row.workload
        error = "" if each.error is None else f"{100 * each.error:+6.1f} %"
        memory = "" if each.memory_error is None else f" memory {100 * each.memory_error:+5.1f} %"
        print(
            f"{each.number:4} {row.source[:20]:20} {work.shape.hidden:5} x {work.shape.layers:2} "
            f"{row.gpus:4} {row.gpu:10} {row.strategy:13} seq {work.seq:5} x {work.micro_batch:3} "
            f"x {row.accumulate:2} {work.checkpointing:5} {each.predicted_s:9.3f} s {error}{memory}"
        )


# ---- fits


def check(fit: Fit, traces: Traces, constants: Constants) -> None:
    """Raise AssertionError if a cut graph takes another time than the whole one."""
    for case, seconds in zip(fit.cases, fit.seconds(constants), strict=True):
        want, _ = predict(case.row, traces, constants)
        assert abs(seconds / want - 1.0) < 0.005, f"{case.row}: {seconds} s, not {want} s"


def print_constants(found: Constants) -> None:
    for name, bound in BOUNDS.items():
        print(
            f"{name:26} {found.values[name]:9.4g} {bound.unit:12} "
            f"{bound.low:g} to {bound.high:g}: {bound.source}"
        )


def left_out(fit: Fit, groups: Sequence[Sequence[int]]) -> Iterator[tuple[list[Case], Any]]:
    """Yield the cases of each group, and their errors with constants fitted on all others."""
    fits = [partial(_without, fit, group) for group in groups]
    for group, found in zip(groups, side_by_side(fits), strict=True):
        yield [fit.cases[at] for at in group], found


def _without(fit: Fit, group: Sequence[int]) -> Any:
    own = set(group)
    others = [case for at, case in enumerate(fit.cases) if at not in own]
    return errors(fit, fitted(fit, others), [fit.cases[at] for at in group])


def side_by_side(what: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """Yield what each of `what` returns, in order; each runs in a copy of this process."""
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        yield from pool.imap(_run, what)


def _run(what: Callable[[], Any]) -> Any:
    return what()


def show_errors(label: str, values: Any) -> None:
    size = abs(np.asarray(values))
    print(
        f"{label:32} {len(size):3} rows, |error| median {100 * np.median(size):5.1f} %, "
        f"90th percentile {100 * np.quantile(size, 0.9):5.1f} %",
        flush=True,
    )


def run_folds(fit: Fit, number: int) -> None:
    order = np.random.default_rng(0).permutation(len(fit.cases))
    groups = [order[part::number].tolist() for part in range(number)]
    found = [
        (case, error)
        for mine, each in left_out(fit, groups)
        for case, error in zip(mine, each, strict=True)
    ]
    show_errors(f"{number} parts, each left out", [error for _, error in found])
    plain = [error for case, error in found if not case.row.is_chart]
    show_errors("  without those off charts", plain)


def run_sources(fit: Fit) -> None:
    names = sorted({case.row.source for case in fit.cases})
    groups = [[at for at, case in enumerate(fit.cases) if case.row.source == n] for n in names]
    for name, (_, found) in zip(names, left_out(fit, groups), strict=True):
        show_errors(f"without {name}", found)


def run_ablations(fit: Fit, whole: Constants) -> None:
    show_errors("with all parts", errors(fit, whole, fit.cases))
    parts = [partial(_ablated, fit, name) for name in ABLATIONS]
    for name, found in zip(ABLATIONS, side_by_side(parts), strict=True):
        show_errors(f"without {name}", found)


def _ablated(fit: Fit, name: str) -> Any:
    part = ABLATIONS[name]
    found = fitted(fit, fit.cases, without=part.without, change=part.change)
    return errors(fit, found, fit.cases)


def timed(what: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    found = what()
    print(f"({since(began)}, {cpu_s():.0f} s of CPU so far)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted beside published measurements")
    parser.add_argument("--rows", type=Path, required=True, help="a CSV file")
    parser.add_argument("--json", type=Path, help="file to write entries and the summary to")
    parser.add_argument("--traces", type=Path, help="folder in which traces are kept")
    parser.add_argument("--fit", action="store_true", help="fit the constants, and predict by them")
    parser.add_argument("--folds", type=int, help="number of parts that are left out in turn")
    parser.add_argument("--sources", action="store_true", help="leave out each source in turn")
    parser.add_argument("--ablate", action="store_true", help="fit without a part at a time")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    workloads = [each for row in rows if isinstance(row, Row) for _, each in row.workloads]
    with tempfile.TemporaryDirectory() as other:
        folder = options.traces or Path(other)
        folder.mkdir(parents=True, exist_ok=True)
        traces = timed(lambda: traced(workloads, folder))
    constants = Constants.shipped()
    if options.fit or options.folds or options.sources or options.ablate:
        fit = Fit(_measured(rows, traces), traces)
        check(fit, traces, constants)
        if options.fit or options.ablate:
            constants = timed(lambda: fitted(fit, fit.cases))
            print_constants(constants)
        if options.folds:
            timed(lambda: run_folds(fit, options.folds))
        if options.sources:
            timed(lambda: run_sources(fit))
        if options.ablate:
            timed(lambda: run_ablations(fit, constants))
    found = list(entries(rows, traces, constants))
    print_rows(found)
    print_summary(summary(found))
    print_sweeps(found)
    if options.json:
        text = {"rows": [each.as_json() for each in found], "summary": summary(found)}
        options.json.write_text(json.dumps(text, indent=1) + "\n")


def _measured(rows: Sequence[Row | NotExpressible], traces: Traces) -> Iterator[Row]:
    for row in rows:
        if not isinstance(row, Row) or row.measured_s is None:
            continue
        if not any(isinstance(traces[each], str) for _, each in row.workloads):
            yield row


if __name__ == "__main__":
    main()
