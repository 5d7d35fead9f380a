"""Pages of docs/migrate/: both scripts of each print the same losses, and all lines are tried.

A line stands in one of the page's scripts, or in tests/docs/migrations/<page>_before.py or
<page>_after.py, whose functions run here, too: those of one name return the same on both sides.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp as fsdp
from support import warm
from support.pages import DOCS, ROOT, blocks

PAGES = {"ddp": "", "fsdp1": "", "fsdp2": "", "deepspeed": "deepspeed", "accelerate": "accelerate"}
"""Pages, and the package that each needs beside ours."""

SIDES = ("before", "after")
SNIPPETS = Path(__file__).resolve().parent / "migrations"
LIMIT_S = 300
THE_SAME = "the same"

ROUNDED_BY_DEEPSPEED = (
    "started",
    "own_optimizer",
    "stage_3",
    "accumulation",
    "clipping",
    "buckets",
    "buckets_of_stage_2",
    "secondary_shards",
    "checkpoints",
    "whole_state",
    "leaves",
)
COMPILED_IN_ACCELERATE = ("replicas", "units", "unused_parameters")  # Inductor rounds otherwise
_NORM = 1e-6  # squares are summed in another order
_SUM = 1e-6  # DeepSpeed sums gradients, and squares for their norm, in another order
ROUNDED = {
    ("ddp", "buckets"): 1e-6,  # Inductor rounds otherwise
    ("ddp", "clipping"): _NORM,
    ("fsdp1", "clipping"): _NORM,
    **dict.fromkeys((("deepspeed", name) for name in ROUNDED_BY_DEEPSPEED), _SUM),
    ("deepspeed", "communication"): 1e-5,  # stage 1 on a CPU reduces in float32 all the same
    ("deepspeed", "autocast"): 1e-4,  # DeepSpeed reduces in bf16, too
    **dict.fromkeys((("accelerate", name) for name in COMPILED_IN_ACCELERATE), 1e-6),
    ("accelerate", "precision"): 1e-4,  # Accelerate reduces in bf16, too
    ("accelerate", "precision_by_config"): 1e-4,
}
"""Relative differences between what snippets of one name return; where nothing is said, none."""


TRIES, ABORTED = 4, "terminate called without an active exception"
"""How often a script of others is run that aborts as Python ends: torch's own threads of gloo may
do so, where they let go of a collective's Python objects (torch 2.13, without autoshard)."""


def needs(page: str) -> None:
    if page == "fsdp2" and not hasattr(fsdp, "DataParallelMeshDims"):
        pytest.skip("the page has the methods of torch 2.13")
    if PAGES[page] and importlib.util.find_spec(PAGES[page]) is None:
        pytest.skip(f"{PAGES[page]} is not installed")


def scripts(page: str) -> dict[str, str]:
    """Find the text of both scripts of a page, by side."""
    found = {each.name: each.text for each in blocks(path(page)) if each.kind == "file"}
    return {side: found[f"{side}.py"] for side in SIDES}


def path(page: str) -> Path:
    return DOCS / "migrate" / f"{page}.md"


def torchrun(side: str, folder: Path, *arguments: str) -> str:
    """Run a program on two ranks in `folder`; return what it prints to standard output.

    On the side before in a Python that has not imported autoshard, as its users have it.
    """
    folder.mkdir()
    python = sys.executable if side == "before" else warm.python()
    paths = [str(ROOT), str(SNIPPETS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for _ in range(TRIES if side == "before" else 1):
        done = subprocess.run(
            [python, *launcher, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if ABORTED not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-8000:]
    return done.stdout


def test_all_pages_are_here() -> None:
    assert {each.stem for each in (DOCS / "migrate").glob("*.md")} == {*PAGES}


@pytest.mark.programs
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("page", PAGES)
def test_scripts_print_the_same_losses(page: str, tmp_path: Path) -> None:
    """To the last printed digit, and after a checkpoint was loaded the same again."""
    needs(page)
    said = {}
    for side, text in scripts(page).items():
        script = tmp_path / f"{side}.py"
        script.write_text(text)
        lines = torchrun(side, tmp_path / side, str(script)).splitlines()
        said[side] = [line for line in lines if re.fullmatch(r"step \d+: loss \d+\.\d{4}", line)]
    assert said["after"] == said["before"]
    assert len(said["before"]) == 8
    assert said["before"][4:6] == said["before"][6:]


@pytest.mark.programs
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("page", PAGES)
def test_snippets_return_the_same(page: str, tmp_path: Path) -> None:
    """Losses, norms, or sums of saved parameters."""
    needs(page)
    returned: list[dict[str, Any]] = []
    for side in SIDES:
        said = torchrun(side, tmp_path / side, str(SNIPPETS / "run.py"), f"{page}_{side}")
        returned.append(json.loads(said.splitlines()[-1]))
    before, after = returned
    compared = [name for name in before if before[name] is not None and after.get(name) is not None]
    for name in compared:
        rounding = ROUNDED.get((page, name), 0.0)
        assert after[name] == pytest.approx(before[name], rel=rounding, abs=rounding), name
    assert {name for of_page, name in ROUNDED if of_page == page} <= {*compared}


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_a_table_is_run(page: str) -> None:
    """Each piece of code in its first column stands on the side before, in its second after."""
    of_page = scripts(page)
    run = {
        side: [
            *tokens(of_page[side]),
            *tokens((SNIPPETS / f"{page}_{side}.py").read_text()),
            *tokens((SNIPPETS / "common.py").read_text()),
        ]
        for side in SIDES
    }
    rows = list(table(path(page)))
    assert len(rows) > 20
    for before, after in rows:
        for side, cell in zip(SIDES, (before, after), strict=True):
            pieces = code_in(before if cell == THE_SAME else cell)
            assert pieces or is_in_words(side, cell), f"{page}: {cell!r} has no code"
            for piece in pieces:
                assert occurs(piece, run[side]), f"{page}: {piece!r} was not run {side}"


def table(page: Path) -> list[tuple[str, str]]:
    """List the first two cells of each row, without the head and rows that are titles."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line[1:-1].split(" |")] for line in lines]
    assert rows[0] == ["before", "with autoshard", "notes"]
    assert {len(row) for row in rows} == {3}
    return [(row[0], row[1]) for row in rows[1:] if not row[0].startswith("**")]


def is_in_words(side: str, cell: str) -> bool:
    """Tell whether a cell may be without code: a feature by name, or that there is none."""
    return side == "before" or cell.startswith(("not offered", "not needed"))


def code_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def tokens(code: str) -> list[str]:
    """Split code into tokens: what is left is the same however its lines are broken."""
    layout = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    found: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type not in layout:
            if token.string in (")", "]", "}") and found and found[-1] == ",":
                found.pop()  # a comma that the formatter adds
            found.append(token.string)
    return found


def occurs(piece: str, run: list[str]) -> bool:
    """Tell whether the tokens of a piece stand in `run`, or a line of a text there is the piece."""
    if any(piece in map(str.strip, token.splitlines()) for token in run if "\n" in token):
        return True
    wanted = tokens(piece)
    starts = range(len(run) - len(wanted) + 1)
    return any(run[start : start + len(wanted)] == wanted for start in starts)
