"""A rank of the runs of `faults.py`: trains, and has the faults that are planned for it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard

RANKS = 2
EVERY = 3  # steps between two checkpoints
FORMS = ("eager", "lowered eagerly", "Inductor")
EARLY = ("init", "load")  # phases
STOP_S, HANG_S, HANG_TIMEOUT_S, TIMEOUT_S = 2, 16, 12, 60
LIMIT_S = 200  # for an attempt: then ranks say where they are, and end
_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "hang": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
}


@dataclass(frozen=True)
class Fault:
    """Plan of a fault: `rank` does it to itself `delay_s` seconds after `phase` has begun.

    That is in `step`, or the first one after it which has that phase; or, in an early phase, in the
    attempt that follows what was planned before.
    """

    kind: str
    rank: int
    phase: str
    step: int
    delay_s: float

    def name(self) -> str:
        """Describe it in a line."""
        where = self.phase if self.is_early() else f"{self.phase} from step {self.step} on"
        return f"{self.kind} rank {self.rank} in {where}, after {1e3 * self.delay_s:.0f} ms"

    def is_early(self) -> bool:
        """Tell whether it is before the first step of an attempt."""
        return self.phase in EARLY

    def ends(self) -> bool:
        """Tell whether it ends the attempt."""
        return self.kind != "stop"


class Striker:
    """Faults of this rank in this attempt, and what does them.

    first: the step that the attempt began with, once it is known.
    """

    def __init__(self, planned: dict[int, Fault], log: Callable[..., None]) -> None:
        """Take faults by number; `log` is told before each is done."""
        self._planned, self._log = planned, log
        self.first: int | None = None

    def begin(self, phase: str, step: int = 0) -> None:
        """Note that `phase` begins; do what is planned, now or in a thread after its delay.

        None hangs in the first step, in which others wait for ten minutes, as it may compile.
        """
        for number, fault in list(self._planned.items()):
            is_due = fault.step <= step and (fault.kind != "hang" or step > (self.first or 0))
            if fault.phase == phase and (fault.is_early() or is_due):
                del self._planned[number]
                if fault.delay_s:
                    threading.Timer(fault.delay_s, self._do, (number, fault, step)).start()
                else:
                    self._do(number, fault, step)

    def _do(self, number: int, fault: Fault, step: int) -> None:
        """Note the fault, and send this process its signal."""
        self._log(fault=number, step=step, first=self.first)
        if fault.kind in ("stop", "hang"):
            seconds = STOP_S if fault.kind == "stop" else HANG_S
            wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), _SIGNALS[fault.kind])


def train(arguments: list[str]) -> None:
    """Train as one rank, from the last checkpoint on, with the faults that are planned.

    arguments: the run's folder, its form, its number of steps.
    """
    folder, form, steps = Path(arguments[0]), arguments[1], int(arguments[2])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    attempt = f"{os.environ['TORCHELASTIC_RUN_ID']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"

    with (folder / f"output.{attempt}.{rank}").open("w") as output:
        for place in (1, 2):
            os.dup2(output.fileno(), place)

    def log(**what: Any) -> None:
        """Write a line to the run's log, in one piece."""
        line = json.dumps({"at": time.time(), "attempt": attempt, "rank": rank, **what}) + "\n"
        with (folder / "log.jsonl").open("a") as file:
            file.write(line)

    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    armed = _armed(folder, attempt, rank)
    striker = Striker({at: each for at, each in armed.items() if each.rank == rank}, log)
    striker.begin("init")
    hangs = any(each.kind == "hang" for each in armed.values())
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=HANG_TIMEOUT_S if hangs else TIMEOUT_S)
    )
    model, optimizer = _model(form)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(rank)
    striker.begin("load")
    first = autoshard.load_checkpoint(folder / "checkpoints", model, optimizer) or 0
    striker.first = first
    log(began=first)
    is_preempted = _steps(range(first, steps), model, optimizer, striker, folder, log)
    if not is_preempted:
        torch.save(_state(model, optimizer), folder / f"final_{rank}.pt")


def _steps(
    steps: range,
    model: Any,
    optimizer: torch.optim.Optimizer,
    striker: Striker,
    folder: Path,
    log: Callable[..., None],
) -> bool:
    """Train for `steps`, saving to `folder`; return whether a signal has ended that."""
    pending: tuple[int, autoshard.PendingCheckpoint] | None = None
    for step in steps:
        if pending is not None and pending[1].done():
            log(saved=pending[0])
            pending = None
        striker.begin("forward", step)
        scale = random.random() + numpy.random.rand()
        loss = model(scale * torch.randn(4, 16)).square().mean()
        striker.begin("backward", step)
        loss.backward()
        striker.begin("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()
        log(step=step, loss=loss.item().hex())
        stops = autoshard.preempted()
        if stops or (step + 1) % EVERY == 0:
            waits = stops or (step + 1) % (2 * EVERY) == 0
            log(saves=step + 1)
            if waits:
                striker.begin("before", step)
                striker.begin("save", step)
            found = autoshard.save_checkpoint(
                folder / "checkpoints", model, optimizer, step=step + 1, wait=waits
            )
            if waits:
                log(saved=step + 1)
            pending = None if isinstance(found, Path) else (step + 1, found)
            striker.begin("after" if waits else "write", step)
        if stops:
            log(ended=step + 1)
            return True
    return False


def _armed(folder: Path, attempt: str, rank: int) -> dict[int, Fault]:
    """Return the faults of this attempt by number: those left, up to the first that ends it.

    The first rank to come looks, and others do as it did: one may have its fault at once.
    """
    planned = [Fault(**each) for each in json.loads((folder / "faults.json").read_text())]
    done = {each["fault"] for each in read_log(folder) if "fault" in each}
    left = [number for number in range(len(planned)) if number not in done]
    last = next((at for at, number in enumerate(left) if planned[number].ends()), len(left))
    own, common = folder / f"own_{rank}.{attempt}", folder / f"armed.{attempt}"
    own.write_text(json.dumps(left[: last + 1]))
    with contextlib.suppress(FileExistsError):
        os.link(own, common)
    return {number: planned[number] for number in json.loads(common.read_text())}


def _model(form: str) -> tuple[Any, torch.optim.Optimizer]:
    """Build a small sharded model with dropout and running statistics, and its optimizer."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.1), nn.Linear(24, 16)) for _ in range(2)
    ]
    model: Any = autoshard.shard(nn.Sequential(nn.BatchNorm1d(16), *layers))
    if form != "eager":
        lowering = "inductor" if form == "Inductor" else "eager"
        model.compile(backend="autoshard", options={"lowering": lowering, "strict": True})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's state by name: shards, the optimizer's state, buffers, generators."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    found = {f"parameter {name}": _local(param) for param, name in names.items()}
    for param, state in optimizer.state.items():
        found.update({f"{key} of {names[param]}": _local(it) for key, it in state.items()})
    found.update({f"buffer {name}": buffer for name, buffer in model.named_buffers()})
    found["torch's generator"] = torch.get_rng_state()
    found["Python's generator"] = torch.tensor(random.getstate()[1])
    numbers: Any = numpy.random.get_state()
    found["NumPy's generator"] = torch.tensor([*numbers[1].tolist(), numbers[2]])
    return found


def _local(value: Any) -> Tensor:
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.detach()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks of the run in `folder` have noted, in order."""
    path = folder / "log.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
