"""`autoshard opt`: passes from the shell, over a graph's text."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from autoshard.tools.cli import main

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
NAMES = GOLDEN / "name_params" / "dotted.txt"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["opt", *arguments]) == 0
    return capsys.readouterr().out


def test_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "name_params", str(NAMES)) == NAMES.read_text().partition("params\n")[2]


def test_what_comes_out_goes_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass after another gives what both give at once, the plan as comments."""
    first = printed(capsys, "name_params,hoist_shards", str(NAMES))
    monkeypatch.setattr("sys.stdin", io.StringIO(first))
    last = printed(capsys, "name_params,plan_buckets,insert_collectives", "-")
    assert last == printed(capsys, "pipeline", str(NAMES))
    assert "autoshard.launch_gather(" in last
    assert "# forward: 1 gathers, 0 reduces" in last


def test_ranks_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    case = str(GOLDEN / "drop_local_markers" / "casts.txt")
    assert "autoshard." in printed(capsys, "drop_local_markers", case)
    assert "autoshard." not in printed(capsys, "drop_local_markers", case, "--ranks", "alone=1")


def test_tags(capsys: pytest.CaptureFixture[str]) -> None:
    case = str(GOLDEN / "tag_recompute" / "resharded.txt")
    assert "# recompute: " in printed(capsys, "joint", case)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no_such_pass", str(NAMES)], "no pass 'no_such_pass'; there are keep_overwritten, "),
        (["name_params", "no_such_file"], "no_such_file"),
        (["name_params", str(NAMES), "--ranks", "shard"], "as shard=8"),
        (["name_params", str(NAMES), "--keep", "a"], "as 0,2"),
        (["name_params", str(GOLDEN / "transformer" / "bucketing_none.txt")], "error: "),
    ],
)
def test_bad_input(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["opt", *arguments])
    assert said in capsys.readouterr().err


def test_a_pass_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 1, and what the pass says; another number of ranks is not what the text was for."""
    assert main(["opt", "plan_buckets", str(NAMES)]) == 1
    assert "run name_params first" in capsys.readouterr().err
    copies = str(GOLDEN / "insert_collectives" / "copies.txt")
    assert main(["opt", "pipeline", copies, "--ranks", "shard=4"]) == 1
    assert "insert_collectives broke the graph" in capsys.readouterr().err
