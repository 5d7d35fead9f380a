"""CHANGELOG.md: every change of changelog.d, and no other."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from autoshard.tools import changelog


def test_doctests() -> None:
    result = doctest.testmod(changelog)
    assert result.attempted > 0
    assert result.failed == 0


def test_a_change_makes_it_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changelog, "ROOT", tmp_path)
    (tmp_path / "changelog.d").mkdir()
    for number, text in ((1, "First.\n"), (2, "Second,\nof two lines.\n")):
        (tmp_path / "changelog.d" / f"000{number}-change.md").write_text(text)
        assert changelog.main(["--check"]) == 1
        assert "is stale" in capsys.readouterr().err
        assert changelog.main([]) == changelog.main(["--check"]) == 0
    assert (
        (tmp_path / "CHANGELOG.md").read_text().endswith("- Second,\n  of two lines.\n- First.\n")
    )
