"""docs/features.md: which tests claim which rows, and in which form they run."""

from __future__ import annotations

import doctest
import textwrap
from pathlib import Path

import pytest

from autoshard.tools import features
from autoshard.tools.features import FEATURES, TRAPS, claims, problems, table


def test_doctests() -> None:
    result = doctest.testmod(features)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_row_has_a_title() -> None:
    titles = {**FEATURES, **TRAPS}
    assert all(titles.values())
    assert len(set(titles.values())) == len(titles)


FORMS: dict[str, tuple[str, set[str]]] = {
    "eager": ("def test_x(rank): shard(model)", {"eager"}),
    "both by a parameter": ("def test_x(rank, form): ...", {"eager", "compiled"}),
    "both by a value": (
        """
        @parametrize("saved", ["eager", "compiled"])
        def test_x(rank, saved): ...
        """,
        {"eager", "compiled"},
    ),
    "compiled by a parameter": ("def test_x(rank, *, lowering): ...", {"compiled"}),
    "compiled by a call": ("def test_x(rank): torch.compile(model)", {"compiled"}),
    "compiled in a script": ("def test_x(): run('torch.compile(model)')", {"compiled"}),
    "compiled by what it calls": (
        """
        def run(): model.compile()
        def test_x(rank): run()
        """,
        {"compiled"},
    ),
    "compared with each other": (
        """
        def test_x(rank):
            for run in (sharded, compiled): run(model)
        """,
        {"eager", "compiled"},
    ),
    "as told by the test": (
        """
        def built(kind): torch.compile(model)
        def test_x(rank): built("eager")
        """,
        {"eager"},
    ),
    "only spoken of": (
        '''
        def test_x(rank):
            """A3: also if it is compiled."""
        ''',
        {"eager"},
    ),
    "about passes": (
        """
        from autoshard import passes
        def test_x(): ...
        """,
        {"compiled"},
    ),
    "about the arithmetic of shards": (
        """
        from autoshard.passes.ir.layout import Member
        def test_x(): ...
        """,
        {"eager"},
    ),
}


@pytest.mark.parametrize("case", FORMS)
def test_forms(case: str, tmp_path: Path) -> None:
    text, forms = FORMS[case]
    (tmp_path / "test_some.py").write_text(textwrap.dedent(text))
    (claim,) = claims(tmp_path)
    assert claim.test == "test_some.py::test_x"
    assert claim.forms == forms


def test_rows_without_a_test_and_tests_without_a_row(tmp_path: Path) -> None:
    text = 'def test_a1_first(form):\n    """D-2 to D-4."""\n'
    (tmp_path / "test_some.py").write_text(text)
    found = list(claims(tmp_path))
    assert problems(["A1", "D-2", "D-3", "D-5"], found) == [
        "no test claims D-5",
        "test_some.py::test_a1_first claims D-4, which is no row",
    ]
    assert table({"A1": "one", "D-5": "none"}, found).splitlines()[2:] == [
        "| A1 | one | test_some.py::test_a1_first | test_some.py::test_a1_first |",
        "| D-5 | none |  |  |",
    ]
