"""A pass is added to a copy of the project as `passes/README.md` says, word for word."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACE = "        part_markers,"  # in the tuple
IMPORT = "from autoshard.passes.name_params import"  # in the order of the alphabet


def instructions() -> list[tuple[str, str]]:
    """List each sentence of the section that has code below it, and the code."""
    section = (ROOT / "passes" / "README.md").read_text().partition("## Add a pass\n")[2]
    parts = re.split(r"(?m)((?:^(?: {4}.*)?\n)+)", section)  # text and code in turn
    found = [(parts[n], textwrap.dedent(parts[n + 1])) for n in range(0, len(parts) - 1, 2)]
    return [(said, code.strip("\n") + "\n") for said, code in found if code.strip()]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Copy of the checkout, with what is not yet committed, as Git would carry it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name, follow_symlinks=False)
    return tmp_path


def run(command: str, folder: Path) -> str:
    """Run a line of the shell in `folder`, with its package; what it prints."""
    *settings, line = re.split(r"(?<=\d) (?=python)", command)
    words = line.split()
    program = {
        "python": [sys.executable],
        "autoshard": [sys.executable, "-m", "autoshard.tools.cli"],
    }
    done = subprocess.run(
        [*program[words[0]], *words[1:]],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
            "PYTHONPATH": str(folder),
            **dict(each.split("=") for each in settings),
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def changes(folder: Path) -> list[str]:
    """Names of the files of a copy that differ from the checkout's, or are new."""
    found = []
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix in (".py", ".txt"):
            was = ROOT / name
            if not was.exists() or path.read_bytes() != was.read_bytes():
                found.append(name.as_posix())
    return sorted(found)


@pytest.mark.timeout(600)
def test_three_files_and_a_line(project: Path) -> None:
    picture, source, test, place, statement, shell = instructions()
    for said, code in (picture, source, test):
        path = project / re.findall(r"`([\w/]+\.\w+)`", said)[0]
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    pipeline = project / "passes" / "__init__.py"
    text = pipeline.read_text()
    for before, line in ((PLACE, textwrap.indent(place[1], " " * 8)), (IMPORT, statement[1])):
        assert text.count(before) == 1
        text = text.replace(before, line + before)
    pipeline.write_text(text)
    for line in shell[1].splitlines():
        printed = run(line, project)
        if line.startswith("autoshard"):
            assert printed.splitlines()[-1] == "return [%a]"
    assert changes(project) == [
        "golden/merge_relus/twice.txt",
        "passes/__init__.py",
        "passes/merge_relus.py",
        "tests/property/test_merge_relus.py",
    ]
