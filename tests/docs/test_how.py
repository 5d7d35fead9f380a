"""Excerpts in docs/how.md are of the goldens that it names, and its figures are those drawn."""

from __future__ import annotations

import re
from pathlib import Path

import draw_how
import pytest

from autoshard import passes
from autoshard.passes.pipeline import pass_name
from autoshard.passes.planner.bound import lower_bound
from autoshard.passes.planner.per_unit import per_unit
from autoshard.passes.planner.search import search

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how.md"
EXCERPTS = re.findall(
    r"^`(golden/[\w./]+)`[^\n]*:\n\n```text\n(.*?)^```$",
    PAGE.read_text(),
    re.DOTALL | re.MULTILINE,
)
GAP = "...\n"


def test_each_block_names_its_file() -> None:
    assert len(EXCERPTS) == PAGE.read_text().count("```text")


@pytest.mark.parametrize("number", range(len(EXCERPTS)))
def test_an_excerpt_is_in_its_golden(number: int) -> None:
    """Whole lines, one after the other, and after a gap further down."""
    name, excerpt = EXCERPTS[number]
    rest = "\n" + (ROOT / name).read_text()
    for part in excerpt.split(GAP):
        _, found, rest = rest.partition("\n" + part)
        assert found, f"{name} has not, after what is quoted before it:\n{part}"
        rest = "\n" + rest


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"`((?:golden|tests|passes|runtime|benchmarks)/[\w./]*)`", PAGE.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_pass_is_told_of() -> None:
    """Those of the pipeline, each in bold once."""
    told = re.findall(r"\*\*`(\w+)`\*\*", PAGE.read_text())
    pipeline = passes.pipeline((), graph="forward", bucketing="per_unit")
    found = (*passes.joint(), *passes.parted((), None), *pipeline)
    assert sorted(told) == sorted({pass_name(each) for each in found})


def test_times_of_the_picture() -> None:
    """They are those that `draw_how.py` draws, in ms."""
    problem = draw_how.problem_of("forward")
    unit = per_unit(problem)
    found = search(problem, budget_bytes=unit.peak_bytes).timeline
    times_us = (
        draw_how.when_read(problem).time_us,
        *(unit.time_us, found.time_us, lower_bound(problem).time_us),
    )
    told = re.search(
        r"takes\s([\d.]+)\sms;\sone\sa\sunit,.*?,\s([\d.]+);\s.*?,\s([\d.]+)\.\s.*?than\s([\d.]+):",
        PAGE.read_text(),
        re.DOTALL,
    )
    assert told is not None
    assert [f"{time_us / 1e3:.1f}" for time_us in times_us] == list(told.groups())
