"""All that is to be measured on one GPU, in one call: a report, and profiles beside it.

    python benchmarks/on_gpu.py --out benchmarks/reports/2026-12-01-gpu.md [--traces FOLDER]
    python benchmarks/on_gpu.py --list    # what it runs, and what is wanted of each

Each part is a command that can be run by itself. The report is written anew after each, so that one
that is broken off has what was measured until then. Exits with 1 if a command failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Part:
    """Command of the report.

    wanted: what its figures are to be.
    minutes: after which it is ended.
    """

    title: str
    wanted: str
    command: tuple[str, ...]
    minutes: float


def parts(traces: Path) -> list[Part]:
    """List the commands in the order in which they are run: what all else rests on is first.

    traces: a folder for profiles.
    """
    python = sys.executable
    cli = (python, "-m", "autoshard.tools.cli")
    alone = ("--contestants", "unsharded, compiled", "autoshard, eager", "autoshard, compiled")
    return [
        Part(
            "Tests",
            "all pass: parity with the plain lowering, with CUDA graphs and without, peak memory",
            (python, "-m", "pytest", "-q", "-rs", "tests/device"),
            10,
        ),
        *(
            Part(
                f"A world of one rank, {dtype}",
                "autoshard, compiled: at most 1.02 of unsharded, compiled",
                (*cli, "bench", "step", "--ranks", "1", "--dtype", dtype, *alone),
                8,
            )
            for dtype in ("f32", "bf16")
        ),
        Part(
            "Peak memory on one of 8 and of 64 ranks",
            "autoshard, compiled: at most 0.95 of FSDP2's on 8",
            (python, "benchmarks/peaks.py"),
            8,
        ),
        *(
            Part(
                f"What is copied on one of {ranks} ranks",
                "autoshard, grouped: 0.0 MB by gathers",
                (python, "benchmarks/overhead.py", "--ranks", str(ranks)),
                5,
            )
            for ranks in (8, 64)
        ),
        Part(
            "Parity on the emulated link",
            "bit for bit",
            (python, "benchmarks/overlap.py", "--check"),
            5,
        ),
        Part(
            "Steps on the emulated link",
            "autoshard, compiled: at most 1.05 of the bound; predicted: 0.90 to 1.10 of measured",
            (python, "benchmarks/overlap.py", "--trace", str(traces)),
            10,
        ),
    ]


def run(part: Part) -> tuple[str, bool]:
    """Run a part's command; return its output and time in Markdown, and whether it ended with 0.

    It runs in the root folder, and is ended, with the processes that it has started, after its
    minutes.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # with ranks that it starts
    )
    try:
        said = process.communicate(timeout=60 * part.minutes)[0]
        end = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        said = process.communicate()[0]
        end = f"ended after {part.minutes} minutes"
    took = time.monotonic() - started
    text = (
        f"## {part.title}\n\nWanted: {part.wanted}.\n\n    {_shown(part.command)}\n\n"
        f"```\n{said.strip()}\n```\n\n{end}, {took:.0f} s"
    )
    return text, end == "exit status 0"


def _shown(command: Sequence[str]) -> str:
    """Format a command so that it can be typed, with "python" for the interpreter."""
    return shlex.join(["python", *command[1:]])


def heading() -> str:
    """Heading of the report: the date, the GPU, versions, and the commit. Needs a GPU."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"# On one GPU: {today}\n\n{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {commit}"
    )


def main() -> int:
    """Run all parts and write the report, or list them; return the exit status, 1 if a part failed.

    The report is written anew after each part. Without a GPU, or `--out`, the process ends with 2.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the report, a Markdown file")
    parser.add_argument("--traces", type=Path, default=Path("gpu_traces"), help="for profiles")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    options = parser.parse_args()
    found = parts(options.traces.resolve())
    if options.list:
        for part in found:
            print(f"{part.title}\n    {_shown(part.command)}\n    wanted: {part.wanted}")
        return 0
    if options.out is None:
        parser.error("--out is missing: a file for the report")
    if not torch.cuda.is_available():
        parser.error("there is no GPU; --list says what would be run")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    written, failed = [heading()], []
    for part in found:
        print(f"{part.title} ...", flush=True)
        text, is_done = run(part)
        written.append(text)
        options.out.write_text("\n\n".join(written) + "\n")
        if not is_done:
            failed.append(part.title)
    print(f"failed: {', '.join(failed)}" if failed else "all commands ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
