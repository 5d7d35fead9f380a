"""Every block of code of the README and of the pages in docs/ runs.

Files and commands of a page run in a folder of the page's own, on at most two ranks; what they
take for granted is in tests/docs/files/. A fragment runs on two ranks, in names that `names()` in
tests/docs/names/<page>.py makes anew for each, or, for a guide without such a file, in
tests/support/guides.py; after the line `<!-- goes on -->`, in those of the fragment before.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support import guides, warm
from support.pages import DOCS, ROOT, Block, blocks, commands
from support.ranks import on_ranks

LIMIT_S = 300
NAMES = Path(__file__).resolve().parent / "names"
FILES = Path(__file__).resolve().parent / "files"
LOG = DOCS / "LOG.md"  # what was tried, not a page for users

# Commands that are not run here, by how they begin, and why.
ELSEWHERE = {
    "python -m venv": "these tests run in one",
    "pip install": "what it installs is there; nothing is fetched",
    "git clone": "this is the clone",
    "make ": "continuous integration calls it",
    "autoshard parity --": "continuous integration calls it",
    "autoshard bench calibrate": "tests/parity/compiled/test_planner.py calibrates",
    "autoshard bench step": "tests/parity/tools/test_bench.py calls it, with fewer rounds",
}
OF_PAGES = {  # likewise, of one page
    "planning.md": {"autoshard explain": "guides/overlap.md has traces for it"},
    "start.md": {"torchrun": "tests/integrations/test_examples.py follows this page"},
    **{
        f"migrate/{page}.md": {"torchrun": "test_migrations.py runs both scripts, and compares"}
        for page in ("accelerate", "ddp", "deepspeed", "fsdp1", "fsdp2")
    },
}
PAGES_ELSEWHERE = {"hosts.md": "tests/integrations/test_page.py"}  # all of their code
MEASURING = re.compile(r"(OMP_NUM_THREADS=1 )?(python|torchrun .*) benchmarks/")  # for minutes


@functools.cache
def pages() -> dict[str, Path]:
    found = {
        str(path.relative_to(DOCS)): path for path in sorted(DOCS.rglob("*.md")) if path != LOG
    }
    return {"README.md": ROOT / "README.md", **found}


def of_kind(*kinds: str) -> list[str]:
    return [name for name, path in pages().items() if {b.kind for b in blocks(path)} & {*kinds}]


@pytest.mark.parametrize("name", pages())
def test_a_page_has_no_other_code(name: str) -> None:
    """Code is in fences that say what it is."""
    fenced = False
    before = ""
    for number, line in enumerate(pages()[name].read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        in_list = before.lstrip().startswith(("- ", "* ", "1. ")) or before.startswith("  ")
        is_code = line.startswith("    ") and not fenced and not before.strip() and not in_list
        assert not is_code, f"{name}, line {number}: code that is indented is not run"
        before = line if line.strip() or not before.startswith(("- ", "  ", "1. ")) else before
    assert not fenced


@pytest.mark.programs
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", sorted({*of_kind("file", "commands")} - {*PAGES_ELSEWHERE}))
def test_files_and_commands(name: str, tmp_path: Path) -> None:
    """Commands of a page succeed, after the files above them are written; each file is run."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    not_run = set()
    for block in blocks(pages()[name]):
        if block.kind == "file":
            (tmp_path / block.name).write_text(block.text)
            not_run.add(block.name)
        elif block.kind == "commands":
            for command in commands(block):
                if is_run_here(command, name):
                    run(command, tmp_path, f"{name}, line {block.line}")
                not_run = {file for file in not_run if file not in command}
    assert not not_run, f"{name}: no command runs {sorted(not_run)}"


def is_run_here(command: str, page: str) -> bool:
    elsewhere = {*ELSEWHERE, *OF_PAGES.get(page, ())}
    return not MEASURING.match(command) and not command.startswith(tuple(elsewhere))


def run(command: str, folder: Path, where: str) -> None:
    """Run a command. Fails with its errors, and the line of the page."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PATH": f"{programs()}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@functools.cache
def programs() -> str:
    """Make a folder of the programs that commands begin with; they have imported torch already."""
    folder = tempfile.TemporaryDirectory(prefix="programs")
    atexit.register(folder.cleanup)
    modules = {
        "python": "",
        "torchrun": " -m torch.distributed.run",
        "autoshard": " -m autoshard.tools.cli",
    }
    for name, module in modules.items():
        program = Path(folder.name, name)
        program.write_text(f'#!/bin/sh\nexec {warm.python()}{module} "$@"\n')
        program.chmod(0o700)
    return folder.name


def names_of(name: str) -> dict[str, Any]:
    """Make what fragments of a page take for granted."""
    file = NAMES / Path(name).with_suffix(".py")
    if not file.exists():
        return guides.names() if name.startswith("guides/") else {}
    spec = importlib.util.spec_from_file_location(f"names_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given: dict[str, Any] = module.names()
    return given


@pytest.mark.parametrize("name", sorted({*of_kind("fragment")} - {*PAGES_ELSEWHERE}))
def test_fragments(name: str, tmp_path: Path) -> None:
    needs = NAMES / Path(name).with_suffix(".py")
    for package in packages(needs):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[hosts]'")
    run_fragments(name=name, tmp_path=tmp_path)


def packages(file: Path) -> list[str]:
    """List the packages that the fragments need, as the first line of the names' file says."""
    first = file.read_text().partition("\n")[0] if file.exists() else ""
    return first.removeprefix("# needs ").split(", ") if first.startswith("# needs ") else []


@on_ranks(2)
def run_fragments(rank: int, name: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(tmp_path)
        for block in blocks(pages()[name]):
            if block.kind == "fragment":
                names = names if block.goes_on else names_of(name)
                execute(block, name, names)
    dist.barrier()


def execute(block: Block, name: str, names: dict[str, Any]) -> None:
    """Run a fragment; lines of errors are the page's."""
    code = compile("\n" * (block.line - 1) + block.text, str(pages()[name]), "exec")
    exec(code, names)
