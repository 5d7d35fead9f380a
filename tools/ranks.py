"""Start ranks for a tool, and end the process of a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NoReturn


def launch(
    arguments: Sequence[str],
    ranks: int,
    *,
    program: Sequence[str] = ("-m", "autoshard.tools.cli"),
) -> int:
    """Run a program with `arguments` on `ranks` processes of this machine, under torchrun.

    They have one thread each, unless `OMP_NUM_THREADS` is set, and can import from this folder.
    arguments: a command line, without the program's name.
    program: as torchrun takes it: `autoshard`, unless given.
    Returns the exit status of torchrun, when all ranks have ended.
    """
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.getcwd(), *filter(None, [environment.get("PYTHONPATH")])]
    )
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(ranks)),
        *program,
        *arguments,
    ]
    return subprocess.run(command, env=environment, check=False).returncode


def leave(status: int) -> NoReturn:
    """End this process with exit status `status`; a rank at once, without Python's shutdown.

    Standard output and error are flushed first. A process is a rank if `RANK` is set; another one
    ends by SystemExit.

    A thread of gloo's may release a tensor of the last collective while the interpreter is shut
    down, which aborts the process (torch 2.11 to 2.15); and the end of a group may wait for ranks
    that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(status)
    sys.exit(status)
