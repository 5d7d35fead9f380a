"""SIGTERM in any phase of a step: a checkpoint, from which training goes on bit for bit.

    OMP_NUM_THREADS=1 python benchmarks/preemption.py [--attempts 20] [--seed 0]

Two gloo ranks train a small model with dropout and running statistics for 20 steps, and save
asynchronously every 4. In each attempt one rank, or each, sends itself SIGTERM within a phase of a
step, at a random time in it. All have to end after the same step, with a checkpoint of it. A run
that goes on from there, or from an asynchronous save, has to come to the state of one that nobody
disturbed: parameters, averages of the optimizer, statistics and generators of each rank. Attempts
take turns with phases, and half of them are compiled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STEPS, EVERY, FIRST, LAST = 20, 4, 2, 10  # the signal comes in a step from FIRST to LAST
PHASES = ("forward", "backward", "optimizer", "between", "save", "writing")
LIMIT_S = 240
RANKS = 2

End = tuple[int, list[list[float]]]
"""What a rank came to: its step, and the values of its state."""


@dataclass(frozen=True)
class Signal:
    """Plan of a SIGTERM: `ranks` send it to themselves `delay_s` after `phase` of `step` begins."""

    ranks: tuple[int, ...]
    step: int
    phase: str
    delay_s: float

    def begin(self, rank: int, phase: str, step: int) -> None:
        """Send it, if it is planned for `rank` in this phase."""
        if rank in self.ranks and (phase, step) == (self.phase, self.step):
            send = (os.getpid(), signal.SIGTERM)
            if self.delay_s:
                threading.Timer(self.delay_s, os.kill, send).start()
            else:
                os.kill(*send)


def signals(count: int, seed: int) -> list[Signal]:
    """Draw `count` signals, of all phases in turns; the same for the same seed."""
    generator = random.Random(seed)
    found = []
    for number in range(count):
        phase = PHASES[number % len(PHASES)]
        step = generator.randint(FIRST, LAST)
        if phase in ("save", "writing"):
            step = step // EVERY * EVERY + EVERY - 1
        ranks = generator.choice([(0,), (1,), (0, 1)])
        found.append(
            Signal(ranks, step, phase, generator.choice([0.0, generator.uniform(0, 0.01)]))
        )
    return found


def train(rank: int, port: int, folder: str, form: str, planned: Signal | None, pipe: Any) -> None:
    """Train as one rank, from the last checkpoint on, until the end or a signal; send an `End`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    import autoshard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = autoshard.shard(_net())
    if form == "compiled":
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)

    def begin(phase: str, step: int) -> None:
        """Note that `phase` begins."""
        if planned is not None:
            planned.begin(rank, phase, step)

    step = autoshard.load_checkpoint(folder, model, optimizer) or 0
    pending = None
    autoshard.preempted()  # signals are noted from here on
    while step < STEPS:
        begin("forward", step)
        loss = model(torch.randn(4, 16)).square().mean()
        loss.register_hook(lambda grad, step=step: begin("backward", step))
        loss.backward()
        begin("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()
        begin("between", step)
        if (step + 1) % EVERY == 0:
            begin("save", step)
            pending = autoshard.save_checkpoint(folder, model, optimizer, step=step + 1, wait=False)
            begin("writing", step)
        step += 1
        if autoshard.preempted():
            autoshard.save_checkpoint(folder, model, optimizer, step=step)
            break
    if pending is not None:
        assert pending.wait().is_dir()
    state = [param.to_local() for param in model.parameters()]
    state += [each[name].to_local() for each in optimizer.state.values() for name in _AVERAGES]
    state += [*model.buffers(), torch.get_rng_state()]
    pipe.send((step, [each.flatten().tolist() for each in state]))
    threading.Event().wait(LIMIT_S)  # it is killed: one that ends would break what others wait for


_AVERAGES = ("exp_avg", "exp_avg_sq")


def _net() -> Any:
    """Build a small model with dropout and running statistics, with random weights."""
    from torch import nn

    layers = [
        nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.1), nn.Linear(24, 16)) for _ in range(2)
    ]
    return nn.Sequential(nn.BatchNorm1d(16), *layers)


def run(folder: Path, form: str, planned: Signal | None) -> list[End]:
    """Train on two ranks, each a process of its own; return what each came to.

    Raises TimeoutError if a rank does not come to an end, EOFError if one fails.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "autoshard.backend"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes: list[Connection] = []
    ranks = []
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        arguments = (rank, port, str(folder), form, planned, there)
        ranks.append(context.Process(target=train, args=arguments, daemon=True))
        ranks[-1].start()
        there.close()
        pipes.append(here)
    try:
        return [_end(pipe) for pipe in pipes]
    finally:
        for each in ranks:
            each.kill()
            each.join()


def _end(pipe: Connection) -> End:
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"no end within {LIMIT_S} s")
    found: End = pipe.recv()
    return found


def attempt(folder: Path, form: str, planned: Signal, wanted: list[End]) -> str:
    """Have a run get `planned`, and another one go on; return what is wrong, "" if nothing."""
    stopped = {step for step, _ in run(folder, form, planned)}
    if len(stopped) != 1:
        return f"ranks ended after steps {sorted(stopped)}"
    (step,) = stopped
    if not planned.step < step < STEPS:
        return f"ended after step {step}"
    saved = sorted(path.name for path in folder.glob("step_*"))[-1:]
    if saved != [f"step_{step:08d}"] and saved != [f"step_{step:08d}.1"]:
        return f"ended after step {step}, and {saved} was saved"
    return "" if run(folder, form, None) == wanted else "another state in the end"


def from_the_one_before(folder: Path, form: str, wanted: list[End]) -> str:
    """Have a run go on from the last but one of an undisturbed run's asynchronous saves.

    Returns what is wrong, "" if nothing.
    """
    saved = sorted(path.name for path in folder.glob("step_*"))
    if saved != [f"step_{step:08d}" for step in (STEPS - EVERY, STEPS)]:
        return f"{saved} were saved"
    shutil.rmtree(folder / saved[-1])
    return "" if run(folder, form, None) == wanted else "another state in the end"


def each_attempt(count: int, seed: int, say: Callable[[str], None]) -> int:
    """Make `count` attempts, saying of each what came of it; return how many went wrong."""
    wrong = 0
    with tempfile.TemporaryDirectory() as root:
        forms = ("eager", "compiled")
        wanted = {form: run(Path(root) / form, form, None) for form in forms}
        for form in forms:
            said = from_the_one_before(Path(root) / form, form, wanted[form])
            wrong += bool(said)
            say(f"{form}, from the checkpoint before the last: {said or 'goes on, bit for bit'}")
        for number, planned in enumerate(signals(count, seed)):
            form = forms[(number // len(PHASES) + number) % 2]
            began = time.monotonic()
            said = attempt(Path(root) / str(number), form, planned, wanted[form])
            wrong += bool(said)
            took_s = time.monotonic() - began
            say(f"{form}, {planned}: {said or 'goes on, bit for bit'} ({took_s:.0f} s)")
    return wrong


def main() -> int:
    """Make the attempts; return 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attempts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wrong = each_attempt(options.attempts, options.seed, lambda text: print(text, flush=True))
    print(f"{options.attempts - wrong} of {options.attempts} go on, bit for bit")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
