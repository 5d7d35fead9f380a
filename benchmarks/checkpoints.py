"""Drills of checkpoints: two jobs and four readers in one folder, and bits that flip.

    python benchmarks/checkpoints.py [--saves 200] [--flips 200] [--seed 0]

Two jobs, a process each, save to one folder in turns of their own, and four processes load from it
all the while. No save and no load may fail, each load has to give what one of the jobs has saved,
and in the end each job's latest checkpoints have to be there.

Then a checkpoint of a model and an optimizer has a random bit flipped in one of its files, again
and again, each time another one. Each has to be noticed: `load_checkpoint` raises, and changes
nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoshard

KEEP = 2
READERS = 4


def save(folder: str, job: int, saves: int, errors: Any) -> None:
    """Be a job: save `saves` checkpoints, whose parameters say of which job and step they are."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of the other job's checkpoints
    model = nn.Linear(8, 8)
    for step in range(saves):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(job * 10_000 + step)
        try:
            autoshard.save_checkpoint(folder, model, step=step, keep=KEEP)
        except Exception as error:
            errors.put(f"job {job}, step {step}: {type(error).__name__}: {error}")


def load(folder: str, over: Event, loads: Any, errors: Any) -> None:
    """Be a reader: load until `over` is set; put the number of loads into `loads`."""
    warnings.simplefilter("ignore", RuntimeWarning)
    model, count = nn.Linear(8, 8), 0
    while not over.is_set():
        try:
            step = autoshard.load_checkpoint(folder, model)
        except Exception as error:
            errors.put(f"a reader: {type(error).__name__}: {error}")
            continue
        if step is None:
            time.sleep(0.01)
            continue
        values = torch.cat([param.detach().flatten() for param in model.parameters()])
        if len(values.unique()) != 1 or int(values[0]) % 10_000 != step:
            errors.put(f"a reader found {values.unique()} in step {step}")
        count += 1
    loads.put(count)


def two_jobs(folder: Path, saves: int) -> tuple[list[str], int]:
    """Run two jobs of `saves` / 2 saves each, and READERS; return errors, and how many loads."""
    context = multiprocessing.get_context("forkserver")  # one import of torch for all processes
    context.set_forkserver_preload(["autoshard.runtime.training.checkpoint.save_and_load"])
    over, loads, errors = context.Event(), context.Queue(), context.Queue()
    jobs = [
        context.Process(target=save, args=(str(folder), job, saves // 2, errors)) for job in (1, 2)
    ]
    readers = [
        context.Process(target=load, args=(str(folder), over, loads, errors))
        for _ in range(READERS)
    ]
    for each in (*jobs, *readers):
        each.start()
    for each in jobs:
        each.join()
    over.set()
    count = sum(loads.get() for _ in readers)
    for each in readers:
        each.join()
    said = []
    while not errors.empty():
        said.append(errors.get())
    names = sorted(path.name for path in folder.iterdir())
    last = f"step_{saves // 2 - 1:08d}"
    if len(names) != 2 * KEEP or f"{last}.1" not in names or last not in names:
        said.append(f"in the end there are {names}")
    return said, count


def flips(folder: Path, number: int, seed: int) -> list[str]:
    """Flip `number` random bits of a checkpoint, one at a time; return where nobody noticed."""
    generator = random.Random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 16)).sum().backward()
    optimizer.step()
    path = autoshard.save_checkpoint(folder, model, optimizer, step=1)
    files = sorted(path.iterdir())
    unnoticed = []
    for _ in range(number):
        file = generator.choice(files)
        was = file.read_bytes()
        bit = generator.randrange(8 * len(was))
        spoiled = bytearray(was)
        spoiled[bit // 8] ^= 1 << bit % 8
        file.write_bytes(spoiled)
        before = [param.detach().clone() for param in model.parameters()]
        try:
            autoshard.load_checkpoint(folder, model, optimizer)
            unnoticed.append(f"bit {bit} of {file.name}")
        except autoshard.CheckpointError:
            same = zip(before, model.parameters(), strict=True)
            if not all(torch.equal(*each) for each in same):
                unnoticed.append(f"bit {bit} of {file.name}: the model has changed")
        file.write_bytes(was)
    assert autoshard.load_checkpoint(folder, model, optimizer) == 1
    return unnoticed


def main() -> int:
    """Run both drills; return 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=200, help="of both jobs")
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        errors, count = two_jobs(Path(folder) / "jobs", options.saves)
        print(f"{options.saves} saves of two jobs, {count} loads: {len(errors)} went wrong")
        unnoticed = flips(Path(folder) / "flips", options.flips, options.seed)
        print(f"{options.flips} bits flipped: {options.flips - len(unnoticed)} noticed")
    for each in (errors + unnoticed)[:20]:
        print(f"  {each}")
    return int(bool(errors or unnoticed))


if __name__ == "__main__":
    sys.exit(main())
