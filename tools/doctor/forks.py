"""Ranks for the self test that this process forks: they have imported torch already.

Under torchrun each rank, and torchrun itself, would import it again, which takes longer than all
tests. A process that has initialized CUDA can't be forked: fork before anything asks for a GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch

from autoshard import _torch
from autoshard.tools.doctor.checks import Finding, self_test
from autoshard.tools.ranks import leave

_HOST = "127.0.0.1"


@contextlib.contextmanager
def forked(ranks: int) -> Iterator[Callable[[], list[Finding]]]:
    """Fork `ranks` processes, and have them take the self test while the block runs.

    Gives a function that waits for all of them, and returns findings: those of rank 0, and what
    fails on others. A rank that ends without any is a "FAIL". What is left of them is killed at
    the end of the block.
    """
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        process = context.Process(target=_test, args=(rank, ranks, there), daemon=True)
        process.start()
        there.close()  # or the end of that process would not be seen
        pipes.append(here)
        processes.append(process)
    store = _torch.dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    try:
        for pipe in pipes:
            pipe.send(store.port)
        yield lambda: [each for rank, pipe in enumerate(pipes) for each in _findings(rank, pipe)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _findings(rank: int, pipe: Connection) -> list[Finding]:
    """Wait for what a rank has found; leave out what rank 0 says as well."""
    try:
        found: list[Finding] = pipe.recv()
    except EOFError:
        return [Finding("FAIL", "group", f"rank {rank} ended: look at what it printed")]
    return [each for each in found if rank == 0 or each.level == "FAIL"]


def _test(rank: int, ranks: int, pipe: Connection) -> None:
    """Take the self test as one of `ranks`, over the store at the port that comes first."""
    os.environ.update(
        MASTER_ADDR=_HOST,
        MASTER_PORT=str(pipe.recv()),
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store is the first process's, as torchrun's is
    )
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
    pipe.send(self_test())
    leave(0)
