"""First minutes with the command: versions, and errors that say what to type instead."""

from __future__ import annotations

import re

import pytest

from autoshard.tools.cli import main


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status of the command, and all that it prints."""
    try:
        status = main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    found = capsys.readouterr()
    return status, found.out + found.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = said_by(capsys, "--version")
    assert status == 0
    assert re.fullmatch(r"autoshard \d\S*, torch \d\S*, Python 3\.\d+\.\d+\n", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "autoshard: error: the following arguments are required: command"),
        (["plans"], "invalid choice: 'plans'"),
        (["plan", "--no"], "autoshard plan: error: "),
        (
            ["plan", "--model", "some-one/Some-8B", "--gpus", "8xH100", "--seq", "128"],
            "hf download some-one/Some-8B config.json",
        ),
    ],
)
def test_an_error_is_a_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not below a page of usage."""
    status, text = said_by(capsys, *arguments)
    assert status == 2
    assert message in text
    assert "usage:" not in text
    assert len(text.splitlines()) == 2


def test_gpus_that_are_known(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "tests:build", "--gpus", "64xH1000", "--seq", "128"]
    status, text = said_by(capsys, *arguments)
    assert status == 2
    assert "no topology is known of 'H1000', but of " in text
    assert "h100" in text
