"""All that is to be measured on one GPU, by parts of at most eight minutes: a report for each.

    python benchmarks/on_gpu.py --list                           # parts, and what is wanted
    python benchmarks/on_gpu.py --part tests --out FOLDER        # FOLDER/tests.md
    python benchmarks/on_gpu.py --out FOLDER                     # all, what is worth most first

Needs a checkout, or its files, and an environment with torch (2.11 or newer), numpy, pytest,
hypothesis, transformers, a C++ compiler and ninja: no network, no git, and no installation, as the
backend is announced to torch by a folder on Python's path. A report is written anew after each
command, so that one that is broken off has what was measured until then; profiles go to
FOLDER/traces.tar.gz. Exits with 1 if a command failed.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MINUTES = 8.0  # of a part

# Those of tests/device for which it makes a difference that the device computes.
DEVICE_TESTS = tuple(
    f"tests/device/test_{name}.py" for name in ("one_rank", "streams", "peak", "cuda_graphs")
)

# The test suite's settings are for plugins that need not be there.
WITHOUT_PLUGINS = ("-W", "ignore::pytest.PytestConfigWarning")


@dataclass(frozen=True)
class Command:
    """Command of a part.

    wanted: what its figures are to be.
    arguments: of Python.
    minutes: after which it is ended.
    """

    title: str
    wanted: str
    arguments: tuple[str, ...]
    minutes: float


def parts(traces: Path) -> dict[str, list[Command]]:
    """List the commands of each part, by name, in the order of what is worth most.

    traces: a folder for profiles.
    """
    bit_for_bit = "bit for bit"
    overlap = ("benchmarks/overlap.py",)
    at_most = "autoshard, compiled: at most 1.05 of the bound; predicted: 0.90 to 1.10 of measured"
    return {
        "tests": [
            Command(
                "Tests",
                "all pass: parity with the plain lowering, with CUDA graphs and without, peaks",
                ("-m", "pytest", "-rs", *WITHOUT_PLUGINS, *DEVICE_TESTS),
                8,
            )
        ],
        "parity": [
            Command(
                "Two ranks on one GPU, with gloo",
                "all samples pass",
                ("benchmarks/two_ranks.py", "--samples", "12"),
                5,
            ),
            Command("On the emulated link", bit_for_bit, (*overlap, "--check"), 3),
        ],
        "one_rank": [
            Command(
                f"A world of one rank, NCCL, {dtype}",
                "autoshard, compiled: at most 1.02 of unsharded, compiled; launches at most "
                "FSDP2's; idle no more than theirs",
                ("benchmarks/one_gpu.py", "--dtype", dtype, "--models", *models),
                4,
            )
            for dtype, models in (("bf16", ("small", "medium")), ("f32", ("small",)))
        ],
        "kernels": [
            Command(
                "Kernels, and what the planner says of them",
                "predicted within 15 % of measured: steps, products, attention, memory",
                ("benchmarks/gpu_kernels.py",),
                8,
            )
        ],
        "link": [
            Command(
                "Steps on the emulated link, its stream of high priority",
                at_most,
                (*overlap, "--trace", str(traces)),
                8,
            )
        ],
        "link_priority": [
            Command(
                "Steps on the emulated link, its stream of normal priority",
                f"{at_most}; beside those of high priority",
                (*overlap, "--link-priority", "normal", "--rounds", "10"),
                8,
            )
        ],
        "peaks": [
            Command(
                "Peak memory on one of 8 and of 64 ranks",
                "autoshard, compiled: at most 0.95 of FSDP2's on 8",
                ("benchmarks/peaks.py",),
                8,
            )
        ],
        "copies": [
            Command(
                f"What is copied on one of {ranks} ranks",
                "autoshard, grouped: 0.0 MB by gathers",
                ("benchmarks/overhead.py", "--ranks", str(ranks)),
                4,
            )
            for ranks in (8, 64)
        ],
        "host": [
            Command(
                "What the host does for a step of tiny blocks",
                "autoshard, compiled: at most 0.4 of FSDP2's on 8 ranks, 1.25 of unsharded on one",
                ("benchmarks/host_time.py",),
                8,
            )
        ],
        "cuda_graph": [
            Command(
                "A whole step as one CUDA graph",
                "all pass: the losses of steps that are not captured",
                (
                    *("-m", "pytest", "-rs", "-v", *WITHOUT_PLUGINS),
                    "tests/device/test_cuda_graphs.py",
                ),
                8,
            )
        ],
    }


def announce(folder: Path) -> Path:
    """Make a folder that, on Python's path, announces this checkout as an installed package does.

    So `torch.compile(backend="autoshard")` finds the backend. `folder` is what it is made in.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = project["entry-points"]
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        )
    )
    return folder


def environment(site: Path) -> dict[str, str]:
    """Environment for commands: with this checkout and `site`, of `announce`, on Python's path."""
    paths = [str(ROOT), str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(command: Command, env: dict[str, str] | None = None) -> tuple[str, bool]:
    """Run a command; return its output and time in Markdown, and whether it ended with 0.

    It runs in the root folder, and is ended, with the processes that it has started, after its
    minutes. env: its environment; this process's unless given.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command.arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # with ranks that it starts
    )
    try:
        said = process.communicate(timeout=60 * command.minutes)[0]
        end = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        said = process.communicate()[0]
        end = f"ended after {command.minutes} minutes"
    took = time.monotonic() - started
    text = (
        f"## {command.title}\n\nWanted: {command.wanted}.\n\n    {_shown(command)}\n\n"
        f"```\n{said.strip()}\n```\n\n{end}, {took:.0f} s"
    )
    return text, end == "exit status 0"


def _shown(command: Command) -> str:
    """Format a command so that it can be typed, with "python" for the interpreter."""
    return shlex.join(["python", *command.arguments])


def heading(part: str) -> str:
    """Heading of a part's report: date, GPU, versions, and which source it was. Needs a GPU."""
    today = datetime.datetime.now(datetime.UTC).date()
    return (
        f"# On one GPU, {part}: {today}\n\n{torch.cuda.get_device_name()}, CUDA "
        f"{torch.version.cuda}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{source()}"
    )


def source() -> str:
    """Commit of this checkout, if git is there and knows it, and a digest of its Python files."""
    commit = ""
    if shutil.which("git") is not None:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    digest = hashlib.sha256()
    for folder in ("autoshard", "passes", "runtime", "tools", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return f"{commit or 'commit unknown'}, source {digest.hexdigest()[:12]}"


def pack(folder: Path, file: Path) -> None:
    """Put what is in `folder` into one compressed file; nothing if there is nothing."""
    if any(folder.iterdir()):
        with tarfile.open(file, "w:gz") as archive:
            archive.add(folder, arcname="traces")


def main() -> int:
    """Run the parts and write their reports, or list them; return the exit status.

    It is 1 if a command failed. A report is written anew after each command. Without a GPU, or
    `--out`, or with a name that no part has, the process ends with 2.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", nargs="+", metavar="NAME", help="some of them (all)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the reports")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        traces, site = Path(made, "traces"), announce(Path(made, "site"))
        traces.mkdir()
        known = parts(traces)
        wrong = [name for name in options.part or () if name not in known]
        if wrong:
            parser.error(
                f"there is no part {', '.join(wrong)}; expected some of {', '.join(known)}"
            )
        chosen = {name: known[name] for name in options.part or known}
        if options.list:
            for name, commands in chosen.items():
                for each in commands:
                    print(f"{name}: {each.title}\n    {_shown(each)}\n    wanted: {each.wanted}")
            return 0
        if options.out is None:
            parser.error("--out is missing: a folder for the reports")
        if not torch.cuda.is_available():
            parser.error("there is no GPU; --list says what would be run")
        options.out.mkdir(parents=True, exist_ok=True)
        failed = []
        for name, commands in chosen.items():
            written = [heading(name)]
            for command in commands:
                print(f"{name}: {command.title} ...", flush=True)
                text, is_done = run(command, environment(site))
                print(text, flush=True)
                written.append(text)
                (options.out / f"{name}.md").write_text("\n\n".join(written) + "\n")
                if not is_done:
                    failed.append(command.title)
            pack(traces, options.out / "traces.tar.gz")
    print(f"failed: {', '.join(failed)}" if failed else "all commands ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
