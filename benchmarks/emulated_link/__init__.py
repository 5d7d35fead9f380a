"""A `torch.distributed` backend of one process, over a link of a latency and a bandwidth to be set.

    import emulated_link

    emulated_link.start(8, latency_us=20, gb_per_s=50)  # rank 0 of 8; the others are imagined
    emulated_link.set_link(latency_us=20, gb_per_s=25)  # from the next collective on

Imagined ranks hold what this one does. Collectives take `latency_us`, and what a rank of a ring
sends at `gb_per_s`, one after another: on a GPU on a stream of their own, on a CPU in a thread that
sleeps. So sharded training overlaps on one device as it does on several, whoever shards; see
`link.cpp`.

A GPU's stream spins for a number of its cycles, which is measured once: where the GPU slows its
clock down, the link slows down with it. The copies at the end of a collective count as a part of
its time, at the rate that they have when nothing runs beside them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import filelock
import torch
import torch.distributed as dist
from torch.utils import cpp_extension

from autoshard import _torch
from autoshard.runtime.ranks import exchange
from autoshard.tools.device import current_device, timed

NAME = "emulated_link"
SOURCE = Path(__file__).resolve().parent / "link.cpp"
COPIED = 2**24  # bytes
COPIES = 8  # of one, as a gather makes them
CYCLES = 10_000_000


def start(
    world_size: int,
    *,
    latency_us: float,
    gb_per_s: float,
    rank: int = 0,
    has_priority: bool = True,
) -> None:
    """Make a default process group of that many ranks, of which only this one exists.

    Its link has this latency and bandwidth, in 1e9 bytes a second.
    has_priority: whether a GPU prefers the link's stream to those that compute.
    Raises RuntimeError where the backend can't be built, and ValueError as `set_link` does.
    """
    install()
    _built().set_priority(has_priority)
    set_link(latency_us=latency_us, gb_per_s=gb_per_s)
    dist.init_process_group(NAME, rank=rank, world_size=world_size, store=_torch.dist.HashStore())


def install() -> None:
    """Register the backend, for `init_process_group("emulated_link")`; builds it once a machine.

    Ranks of such a default group exchange no objects from then on: the others don't exist.
    Raises RuntimeError without a C++ compiler or ninja.
    """
    dist.Backend.register_backend(NAME, _built().make_link, devices=["cpu", "cuda"])
    exchange.skip_backend(NAME)


def set_link(*, latency_us: float, gb_per_s: float) -> None:
    """Set latency and bandwidth from the next collective on, in all groups. GB are 1e9 bytes.

    The first call builds the backend, and measures how fast this device copies.
    Raises ValueError for a negative latency, or a bandwidth that is not above 0; RuntimeError where
    the backend can't be built.
    """
    if latency_us < 0 or gb_per_s <= 0:
        raise ValueError(
            f"a link of {latency_us} us and {gb_per_s} GB/s; expected 0 us or more, "
            "and more than 0 GB/s"
        )
    _built().set_link(latency_us, 1e3 * gb_per_s, _copied_bytes_per_us(), _cycles_per_us())


def missing() -> str | None:
    """Name what has to be installed before the backend can be built; None if nothing has.

    That is the compiler of the variable `CXX`, or "c++", and ninja.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"a C++ compiler: there is no {compiler}"
    if not cpp_extension.is_ninja_available():
        return "ninja: pip install ninja"
    return None


@functools.cache
def _built() -> Any:
    """Build and load the extension, once a process; what is built stays on the machine.

    Raises RuntimeError, naming what is missing, where it can't be built.
    """
    lacking = missing()
    if lacking is not None:
        raise RuntimeError(f"the emulated link is built from C++, which needs {lacking}")
    libraries = Path(torch.__file__).parent / "lib"
    has_cuda = torch.version.cuda is not None
    version = f"{torch.__version__}_{sys.implementation.cache_tag}"  # they share a cache
    name = re.sub(r"\W", "_", f"{NAME}_{version}")
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", cpp_extension.get_default_build_root()))
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / "held"):
        # torch's own lock outlives a process that is killed, and all later ones would wait for it.
        (folder / "lock").unlink(missing_ok=True)
        return cpp_extension.load(
            name,
            [str(SOURCE)],
            extra_cflags=["-O1", *(["-DEMULATED_LINK_CUDA"] if has_cuda else [])],
            extra_ldflags=[f"-L{libraries}", "-lc10_cuda", "-ltorch_cuda"] if has_cuda else [],
            build_directory=str(folder),
            with_cuda=False,  # it would want a whole CUDA toolkit
        )


@functools.cache
def _copied_bytes_per_us() -> float:
    """Measure bytes that copies, as a gather makes them, write in a microsecond; once a process."""
    part = torch.ones(COPIED // COPIES // 4, device=current_device())
    whole = part.new_empty(COPIES, part.numel())
    times_us = [timed(lambda: whole.copy_(part.expand_as(whole)))[1] for _ in range(10)]
    return whole.nbytes / statistics.median(times_us)


@functools.cache
def _cycles_per_us() -> float:
    """Measure cycles of the GPU's clock in a microsecond, while it is busy; 0 without a GPU.

    It is measured once a process.
    """
    if not torch.cuda.is_available():
        return 0.0
    times_us = [timed(lambda: _torch.device.spin_gpu(CYCLES))[1] for _ in range(3)]
    return CYCLES / times_us[-1]  # the first ones wake it up
