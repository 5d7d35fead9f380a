"""Check what is installed, what is amiss, and whether ranks reach each other: `autoshard doctor`.

    checkup()     versions, devices, topology, compiler, caches, environment: of this process
    self_test()   store, collectives, one compiled step: of all ranks, in seconds, never hanging

Every line says what was found, and, where something is amiss, the remedy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.options import CompileOptions
from autoshard.passes.ir.plan import show_bytes
from autoshard.runtime.comm import transport
from autoshard.runtime.comm.mesh import device_type
from autoshard.runtime.comm.transport import Work
from autoshard.runtime.ranks import agreement
from autoshard.tools.device import current_device, synchronize
from autoshard.tools.parity.compare import parity

OLDEST, NEWEST = (2, 11), (2, 15)
SMALL = 2**30  # bytes on the disk of Inductor's cache
SENT = 2**23  # bytes of the timed gather
LIMIT_S = 30.0  # of one test: all together take a few seconds where nothing is amiss
PREFIXES = ("NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_VISIBLE", "OMP_", "AUTOSHARD_")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Finding:
    """Line of the report. level: "ok", "warn" (it works, but not as well as it could) or "FAIL"."""

    level: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:5}{self.subject:12}{self.text}"


def checkup() -> Iterator[Finding]:
    """Yield findings on this process and its machine, without communication.

    Environment variables are read first, and come last. CUDA is initialized if there is a GPU, and
    the folder of Inductor's cache is made if it is missing.
    """
    environment = list(_environment())  # torch writes some of it as it is asked
    yield from _versions()
    yield from _devices()
    yield _topology()
    yield _backend()
    yield _compiler()
    yield _cache()
    yield from environment


def _versions() -> Iterator[Finding]:
    """Yield two findings: on torch, a "FAIL" if it is too old, and on other packages.

    A torch newer than `NEWEST` is a "warn".
    """
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    text = f"torch {torch.__version__}, Python {platform.python_version()}"
    if version < OLDEST:
        yield Finding("FAIL", "versions", f"{text}: autoshard needs torch {span}; upgrade torch")
    elif version > NEWEST:
        yield Finding("warn", "versions", f"{text}: autoshard is tested with torch {span}")
    else:
        yield Finding("ok", "versions", text)
    others = (f"{name} {_version_of(name)}" for name in ("autoshard", "transformers", "numpy"))
    yield Finding("ok", "", ", ".join(others))


def _version_of(name: str) -> str:
    """Version of the package `name`, or "is not installed"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _devices() -> Iterator[Finding]:
    """Yield findings, all "ok": one for each GPU, and on CUDA and NCCL; or one on the CPU."""
    if not torch.cuda.is_available():
        yield Finding("ok", "devices", f"no GPU; {os.cpu_count()} CPU cores, gloo")
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        text = f"{about.name}, {show_bytes(about.total_memory)}"
        yield Finding("ok", "devices" if number == 0 else "", f"cuda:{number} {text}")
    versions = f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    yield Finding("ok", "", versions)


def _topology() -> Finding:
    """Name the topology that plans use on this device; it is "ok" if none is known, too."""
    found = CompileOptions().resolve(current_device()).topology
    if found is not None:
        return Finding("ok", "topology", f"{found.name}: {found.title}")
    return Finding(
        "ok",
        "topology",
        'none is known of this device: "auto" is one bucket a unit; measure one with '
        "`autoshard bench calibrate`, or name one with the option topology=",
    )


def _backend() -> Finding:
    """Find whether torch.compile knows the backend "autoshard" and is not disabled; else "FAIL"."""
    if any(
        os.environ.get(name) == "1" for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE")
    ):
        return Finding(
            "FAIL",
            "backend",
            "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set: torch.compile does nothing, and "
            "a model is not sharded by it; unset it",
        )
    if "autoshard" not in torch.compiler.list_backends():
        return Finding(
            "FAIL", "backend", "torch does not know it: install autoshard with pip, not by a path"
        )
    return Finding("ok", "backend", 'torch.compile(model, backend="autoshard") is found')


def _compiler() -> Finding:
    """Find what Inductor compiles with, triton or a C++ compiler; "warn" if it is missing."""
    if torch.cuda.is_available():
        is_there = importlib.util.find_spec("triton") is not None
        text = "triton" if is_there else "no triton"
        remedy = "pip install triton"
    else:
        wanted = [os.environ.get("CXX"), "g++", "clang++"]
        path = next((found for name in wanted if name and (found := shutil.which(name))), None)
        text, is_there = path or "no C++ compiler", path is not None
        remedy = "install g++"
    if is_there:
        return Finding("ok", "compiler", text)
    return Finding("warn", "compiler", f'{text}: {remedy}, or take options={{"lowering": "eager"}}')


def _cache() -> Finding:
    """Find the folder of Inductor's cache: "FAIL" if it can't be written, "warn" if it is full.

    It is made if it is missing, and a temporary file is put there. It is full with less than
    `SMALL` bytes free on its disk.
    """
    try:
        folder = Path(_torch.inductor.cache_folder())
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            "FAIL", "cache", f"{error}; set TORCHINDUCTOR_CACHE_DIR to a folder that you can write"
        )
    text = f"{folder}, {show_bytes(free)} free"
    if free < SMALL:
        return Finding("warn", "cache", f"{text}: a compilation may fail; make room")
    return Finding("ok", "cache", text)


def _environment() -> Iterator[Finding]:
    """Yield the variables that matter, and a "warn" if several ranks have no `OMP_NUM_THREADS`."""
    names = sorted(name for name in os.environ if name.startswith(PREFIXES) or name in TORCHRUN)
    shown = ", ".join(f"{name}={os.environ[name]}" for name in names)
    yield Finding("ok", "environment", shown or "nothing that matters is set")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = os.cpu_count() or 1
        share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        yield Finding("warn", "", f"OMP_NUM_THREADS is not set: {share} gives each rank its share")


# ---- of all ranks


def self_test(limit_s: float = LIMIT_S) -> list[Finding]:
    """Test communication and a compiled step in a process group of its own; return the findings.

    Call it on all ranks, under torchrun, before there is a process group; each returns its own
    findings. Each wait for other ranks, before a test or in it, ends after `limit_s` seconds. A
    failure is a finding, and is not raised. The group is destroyed after tests that pass; after one
    that fails the others are left out, and the process should end by `leave` of
    `autoshard.tools.ranks`, as the group may wait for ranks that are gone. A rank without a GPU,
    where there are GPUs, returns that as its one finding, and makes no group.

    For the process this sets the limit of an agreement on compilation, `TORCH_NCCL_BLOCKING_WAIT`,
    unless it is set, and the current GPU, and it reseeds torch's random generator.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_gpu = device_type() == "cuda"
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if is_gpu and local_rank >= torch.cuda.device_count():
        text = (
            f"rank {rank}: there is no GPU for it: start {torch.cuda.device_count()} on this host"
        )
        return [Finding("FAIL", "group", text)]
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # else nobody is told of a time limit
    agreement.COMPILE_TIMEOUT = timedelta(seconds=limit_s)  # this process does nothing else
    found: list[Finding] = []
    tests: dict[str, Callable[[], str]] = {
        "store": lambda: f"{world} ranks",
        "gather": _gather,
        "reduce": _reduce,
        "speed": _speed,
        "step": _step,
    }
    try:
        if is_gpu:
            torch.cuda.set_device(local_rank)
        dist.init_process_group(backend, timeout=timedelta(seconds=limit_s))
    except Exception as error:
        return [Finding("FAIL", "group", f"rank {rank}: {_first_line(error)}; {_REACH}")]
    store = _torch.dist.default_store()
    for name, test in tests.items():
        began = time.perf_counter()
        try:
            _meet(store, name, rank, world, limit_s)
            text = test()
        except Exception as error:
            found.append(Finding("FAIL", name, f"rank {rank}: {_first_line(error)}"))
            break
        found.append(Finding("ok", name, f"{text} ({time.perf_counter() - began:.1f} s)"))
    if all(each.level == "ok" for each in found):
        dist.destroy_process_group()
    return found


_BROKEN = "the network, or a driver, changes what is sent"
_REACH = "is MASTER_ADDR reached from every host, and WORLD_SIZE the number of ranks started?"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _meet(store: Any, test: str, rank: int, world: int, limit_s: float) -> None:
    """Announce in `store` that this rank begins with `test`, and wait until all ranks have.

    Raises RuntimeError, naming those that don't within `limit_s` seconds.
    """
    store.set(f"doctor/{test}/{rank}", "here")
    deadline = time.monotonic() + limit_s
    missing = list(range(world))
    while missing and time.monotonic() < deadline:
        missing = [each for each in missing if not store.check([f"doctor/{test}/{each}"])]
        if missing:
            time.sleep(0.01)
    if missing:
        raise RuntimeError(
            f"ranks {missing} did not come to it in {limit_s:.0f} s: look at what they printed, "
            "or whether their hosts reach this one"
        )


def _gather() -> str:
    """Check an all-gather of few elements over all ranks; return a line that names the backend.

    All ranks call this, and wait. Raises RuntimeError if its result is wrong.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    part = torch.full((4,), float(rank), device=current_device())
    whole = part.new_empty(4 * world)
    _wait(transport.gather([whole], [part], _torch.dist.default_group()))
    if whole.tolist() != [float(each) for each in range(world) for _ in range(4)]:
        raise RuntimeError(f"an all-gather gave {whole.tolist()}: {_BROKEN}")
    return f"all-gather over {dist.get_backend()}"


def _reduce() -> str:
    """Check a reduce-scatter of few elements over all ranks; return a line for the report.

    All ranks call this, and wait. Raises RuntimeError if its result is wrong.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(2.0 * world, device=current_device()) + rank
    part = whole.new_empty(2)
    _wait([transport.reduce(part, whole, _torch.dist.default_group())])
    ranks = world * (world - 1) / 2
    want = [world * (2.0 * rank + each) + ranks for each in range(2)]
    if part.tolist() != want:
        raise RuntimeError(f"a reduce-scatter gave {part.tolist()}, not {want}: {_BROKEN}")
    return "reduce-scatter, sums are right"


def _speed() -> str:
    """Time an all-gather of `SENT` bytes, unsharded; return a line with ms and GB/s.

    The time is that of the fastest of four on this rank. All ranks call this; each gather begins
    with a barrier, and is waited for.
    """
    world = dist.get_world_size()
    part = torch.ones(SENT // 4 // world, device=current_device())
    whole = part.new_empty(part.numel() * world)
    times = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        _wait(transport.gather([whole], [part], _torch.dist.default_group()))
        synchronize()
        times.append(time.perf_counter() - began)
    best = min(times)
    return f"{show_bytes(SENT)} gathered in {best * 1e3:.1f} ms, {SENT / best / 1e9:.2f} GB/s"


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _step() -> str:
    """Train a small model for a step, replicated, eagerly sharded and compiled; return the report.

    The report is text; compiled is by the plain lowering. All ranks of a process group call this.
    Torch's random generator is reseeded.
    Raises RuntimeError if the results differ by more than `parity` allows.
    """

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))

    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    report = parity(build, [(batch.to(current_device()),)], options={"lowering": "eager"})
    if not report.ok:
        raise RuntimeError(report.text())
    return report.text()
