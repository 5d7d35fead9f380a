"""`autoshard explain`: its rules on imagined traces of a GPU, and what it refuses."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from cuda_traces import Run, as_json, record, record_ranks
from hypothesis import given
from hypothesis import strategies as st

from autoshard.tools.cli import main
from autoshard.tools.trace.explain import intervals, names
from autoshard.tools.trace.explain.intervals import Interval
from autoshard.tools.trace.explain.reader import read
from autoshard.tools.trace.explain.reasons import (
    CAUSES,
    COPY,
    HOST,
    LATE,
    LINK,
    QUEUE,
    SKEW,
    SMALL,
)
from autoshard.tools.trace.explain.report import ADVICE, Report, lanes_of, report_on, text

SPAN = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 9}


def explained(folder: Path, *ranks: list[dict[str, Any]]) -> Report:
    paths = [folder / f"{number}.json" for number in range(len(ranks))]
    for path, events in zip(paths, ranks, strict=True):
        path.write_text(as_json(events))
    return report_on([lanes_of(path.name, read(path)) for path in paths])


@pytest.mark.parametrize(
    ("fault", "library", "form"),
    [
        *((LATE, "FSDP2", 0), (LATE, "FSDP2", 1), (LATE, "FSDP1", 0), (LATE, "DDP", 0)),
        *((QUEUE, "FSDP2", 0), (QUEUE, "FSDP1", 1), (HOST, "FSDP2", 0), (HOST, "FSDP2", 1)),
        *((COPY, "FSDP2", 0), (COPY, "FSDP2", 1), (SKEW, "FSDP2", 0), (SKEW, "FSDP1", 0)),
        *((SMALL, "FSDP2", 0), (SMALL, "FSDP1", 1), (SMALL, "DDP", 0)),
    ],
)
def test_a_fault_is_named(fault: str, library: str, form: int, tmp_path: Path) -> None:
    run = Run(library=library, fault=fault, form=form, is_annotated=form == 0, strength=1.3)
    report = explained(tmp_path, record(run))
    assert report.causes[0] == fault
    for each in report.findings:
        assert 0 <= each.gain_ms <= each.exposed_ms
        assert sum(time for _, time in each.places) <= each.exposed_ms * (1 + 1e-9)
    assert report.exposed_ms <= report.step_ms
    assert ADVICE[fault] in text(report)


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    """It is seen in the traces of both; the clock of one is 5 s ahead."""
    report = explained(tmp_path, *record_ranks(Run(fault=SKEW, form=1)))
    assert report.ranks == 2
    assert report.causes == [SKEW]


@pytest.mark.parametrize("library", ["FSDP2", "FSDP1", "DDP"])
@pytest.mark.parametrize("slow_link", [1, 4])
def test_nothing_is_wrong(library: str, slow_link: int, tmp_path: Path) -> None:
    report = explained(tmp_path, record(Run(library=library, us_per_mb=8.0 * slow_link)))
    assert not report.causes
    assert slow_link == 1 or report.findings[0].reason == LINK


def test_a_trace_without_steps(tmp_path: Path) -> None:
    """All of it is one step then."""
    events = [e for e in record(Run(fault=LATE)) if not e["name"].startswith("ProfilerStep")]
    report = explained(tmp_path, events)
    assert report.steps == 1
    assert report.causes == [LATE]


def cpu_event(name: str, begin: float, end: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    category = "cpu_op" if name.startswith(("aten", "c10d")) else "user_annotation"
    span = {"name": name, "cat": category, "ts": begin, "dur": end - begin, "tid": thread}
    return {**SPAN, **span, "args": args}


def test_a_gap_on_a_cpu(tmp_path: Path) -> None:
    """It is a wait if a work ends it, and the host's own if none does."""
    waited = [
        cpu_event("aten::mm", 0, 10_000),
        cpu_event("c10d::_allgather_base_", 10_100, 10_150),
        cpu_event("gloo:all_gather", 10_200, 14_000, thread=2),
        cpu_event("aten::mm", 14_100, 20_000),
    ]
    report = explained(tmp_path, waited)
    assert report.causes == [LATE]
    assert report.findings[0].exposed_ms == pytest.approx(3.8)
    report = explained(tmp_path, [*waited[:3], cpu_event("aten::mm", 18_000, 24_000)])
    assert report.causes == [HOST]
    assert report.findings[0].places == [("before aten::mm", pytest.approx(3.8))]


def test_messages_of_one_annotation_are_one_collective(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[[1024]]], "Input type": ["TensorList"]}
    events = [cpu_event("autoshard::launch_grouped_gather 0", 0, 900)]
    for number in range(2):
        begin = 100 + 100 * number
        events.append(cpu_event("c10d::recv_", begin, begin + 5, **shapes))
        events.append(cpu_event("gloo:recv", begin + 1, 5000 + number))
    events.append(cpu_event("aten::mm", 1000, 9000))
    path = tmp_path / "trace.json"
    path.write_text(as_json(events))
    (found,) = lanes_of("", read(path)).collectives
    assert (found.kind, found.num_bytes, found.begin, found.end) == ("gather", 8192, 101, 5001)


def test_what_is_nested(tmp_path: Path) -> None:
    """An annotation that ends a rounding after the next launch begins is not around that."""
    note = cpu_event("FSDP::all_gather (0)", 0, 100.001)
    path = tmp_path / "trace.json"
    path.write_text(
        as_json([note, cpu_event("aten::copy_", 9, 90), cpu_event("aten::mm", 100, 300)])
    )
    lanes = lanes_of("", read(path))
    assert [copy.name for copy in lanes.copies] == ["FSDP::all_gather (0)"]
    assert [kernel.name for kernel in lanes.kernels] == ["aten::mm"]


def test_names() -> None:
    kinds = {
        "gather": ("_allgather_base", "ncclDevKernel_AllGather_RING_LL", "gloo:all_gather"),
        "reduce": ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"),
        "all_reduce": ("allreduce", "c10d::allreduce_", "gloo:all_reduce"),
        "exchange": ("c10d::alltoall_base_",),
    }
    for kind, texts in kinds.items():
        assert [names.kind_of(each) for each in texts] == [kind] * len(texts)
    assert names.is_work("link:all_gather")
    assert not names.is_work("aten::gather")
    assert names.kernel_bytes({"In msg nelems": 4, "Out msg nelems": 32, "dtype": "BFloat16"}) == 64


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(as_json(record(Run(fault=COPY))).encode()))
    assert main(["explain", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "FSDP::all_gather_copy_out (layers." in printed
    assert main(["explain", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["causes"] == [COPY]
    assert report["findings"][0]["gain_ms"] <= report["exposed_ms"] <= report["step_ms"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"traceEvents": [', "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        (b"\x1f\x8b\x08broken", "is not a whole file of gzip"),
        (b'{"events": []}', "has no list 'traceEvents'"),
        (b"3", "has no list 'traceEvents'"),
        (b'{"traceEvents": []}', "no operation, kernel or annotation in 0 events"),
        (b'{"traceEvents": [4]}', "event 0 is 4; expected an object"),
        *(
            (json.dumps({"traceEvents": [{**SPAN, key: value}]}).encode(), message)
            for key, value, message in [
                ("ts", "now", "has ts='now' and dur=9; expected microseconds"),
                ("ts", None, "has ts=None"),
                ("dur", -1, "'dur' not below 0"),
                ("dur", float("nan"), "has ts=0 and dur=nan"),
                ("name", 7, "expected a text as 'name'"),
                ("args", [], "an object as 'args'"),
                ("tid", {}, "expected numbers or texts as 'pid' and 'tid'"),
                ("dur", 9, "no collective in 1 steps"),
                ("cat", "cuda_runtime", "no collective in 1 steps"),
            ]
        ),
    ],
)
def test_what_is_no_trace(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as exit_status:
        main(["explain", str(path)])
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert message in error


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["explain", str(tmp_path / "none.json")])
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["args", "stream", "correlation", "Out msg nelems", "dtype"])
@pytest.mark.parametrize("value", [None, "x", -1, [], {}])
def test_odd_arguments(key: str, value: Any, tmp_path: Path) -> None:
    """What a kernel says of itself may be anything: there is a report, or an error that says so."""
    events = record(Run(layers=2, kernels=2))
    for event in events[::3]:
        if key == "args" and isinstance(value, dict):
            event["args"] = value
        elif key != "args" and key in event["args"]:
            event["args"][key] = value
    assert explained(tmp_path, events).steps


def test_reasons_have_advice() -> None:
    assert set(CAUSES) < set(ADVICE)


times = st.integers(0, 40)
spans = st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair))), max_size=12)


def points(found: list[Interval]) -> set[int]:
    return {at for begin, end in found for at in range(int(begin), int(end))}


@given(spans, spans, times, times)
def test_sets_of_times(first: list[Interval], second: list[Interval], low: int, high: int) -> None:
    """As sets of whole numbers, and sorted, without overlaps."""
    one, two = intervals.merge(first), intervals.merge(second)
    inside = set(range(low, high))
    for found, want in [
        (one, points(first)),
        (intervals.subtract(one, two), points(first) - points(second)),
        (intervals.clip(one, low, max(low, high)), points(first) & inside),
        (intervals.gaps(one, low, high), inside - points(first)),
    ]:
        assert points(found) == want
        assert intervals.total(found) == len(want)
        assert all(begin < end for begin, end in found)
        assert found == sorted(found)


@given(spans, st.integers(0, 10))
def test_near_spans_are_one(found: list[Interval], gap: int) -> None:
    merged = intervals.merge(found, gap)
    assert points(found) <= points(merged)
    apart = itertools.pairwise(merged)
    assert all(after[0] - before[1] > gap for before, after in apart)
