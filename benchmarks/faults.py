"""Ranks that are killed, stopped and told to end, in runs that come to the same state bit for bit.

    OMP_NUM_THREADS=1 python benchmarks/faults.py [--attempts 60] [--seed 0]

Two gloo ranks train a small model with dropout and running statistics under torchrun's agent. A
checkpoint is written every few steps, in turns by a save that waits and by one that does not. Ten
times a run one rank does to itself, at a random time in a phase of a step,

    kill         SIGKILL: the agent ends the other one, and the next attempt goes on
    stop         SIGSTOP, and SIGCONT after STOP_S: the attempt goes on
    hang         the same after HANG_S: the group's timeout of HANG_TIMEOUT_S has ended the attempt
    terminate    SIGTERM: `autoshard.preempted()` has all ranks save after the same step, and end;
                 a rank that has not called it yet just ends

by eager and compiled code, over two kinds of store. Over torchrun's default one, which outlives an
attempt, ranks that are started anew may find addresses of those that are gone, in gloo: so there
each attempt has an agent of its own, as if a scheduler started the job again. With
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 rank 0 has the store, and `max_restarts` starts ranks anew.

An attempt has to begin at the last complete checkpoint, or at one that was being written. The loss
of each step, in all attempts, and in the end the parameters, AdamW's state, buffers and random
number generators of each rank have to be those of a run that nobody disturbed, bit for bit. A run
may have no other attempts than those that its faults make.

A rank that waits in the store for one that was killed does not see that: the agent kills it 30 s
after it has sent SIGTERM, which `preempted` only notes. That is most of the time that runs take.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
import unittest.mock
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import warm_ranks
from faulty_ranks import FORMS, RANKS, Fault, read_log, train
from torch import Tensor
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

STORES = ("default store", "own store")
KINDS = (*("kill", "stop", "terminate") * 3, "hang")
"""Kinds of ten faults in a row."""
PHASES = {
    "init": 0.05,
    "load": 0.05,
    "forward": 0.01,
    "backward": 0.01,
    "optimizer": 0.01,
    "before": 0.01,
    "save": 0.05,
    "write": 0.05,
    "after": 0.01,
}
"""In which a rank has its fault, and within how many seconds of its beginning.

"init" is before ranks have met, "load" before the first step. "before", "save" and "after" are of
saves that wait; "write" begins once one has returned that does not.
"""
STEPS_A_FAULT, STEPS_AFTER = 6, 16


@dataclass(frozen=True)
class Run:
    """Plan of a run: its form, its store, and its faults, in their order."""

    form: str
    store: str
    faults: tuple[Fault, ...]


def draw(count: int, seed: int) -> list[Run]:
    """Draw `count` faults, in a run for each form and store; the same for the same seed.

    Kinds and phases take turns, so that each kind meets each phase in time.
    """
    generator = random.Random(seed)
    whole = list(itertools.product(STORES, FORMS))
    ends = [count * (number + 1) // len(whole) for number in range(len(whole))]
    found = []
    for (store, form), begin, end in zip(whole, [0, *ends], ends, strict=False):
        each = [
            (KINDS[at % len(KINDS)], list(PHASES)[at % len(PHASES)]) for at in range(begin, end)
        ]
        found.append(Run(form, store, tuple(_in_order(each, generator))))
    return found


def _in_order(each: list[tuple[str, str]], generator: random.Random) -> list[Fault]:
    """Make faults of kinds and phases, in an order in which none comes too late for its attempt."""
    while True:
        generator.shuffle(each)
        found = [
            Fault(
                kind,
                generator.randrange(RANKS),
                phase,
                STEPS_A_FAULT * at + generator.randint(1, 4),
                generator.choice([0.0, generator.uniform(0, PHASES[phase])]),
            )
            for at, (kind, phase) in enumerate(each)
        ]
        if all(a.ends() or a.is_early() or not b.is_early() for a, b in itertools.pairwise(found)):
            return found


def steps_of(num_faults: int) -> int:
    """Return how many steps a run with `num_faults` faults takes: they come at their places."""
    return STEPS_A_FAULT * num_faults + STEPS_AFTER


def serving() -> contextlib.AbstractContextManager[list[str]]:
    """Fork ranks, in a context that has the command that starts one."""
    return warm_ranks.serving([sys.executable, __file__, "--serve"])


def run(folder: Path, plan: Run, steps: int, command: Sequence[str]) -> list[int]:
    """Train to the end; return the steps from which attempts began, by rank 0's log.

    folder: is made, with all files of the run; must not exist.
    steps: of the run.
    command: starts a rank, as `serving` gives it.
    Raises RuntimeError, with the end of the output, where the run does not come to its end in an
    attempt for each fault that ends one, and one more; AssertionError as `check` does.
    """
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps([asdict(each) for each in plan.faults]))
    num_ends = sum(each.ends() for each in plan.faults)
    own = plan.store == "own store"
    variable = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if own else "0"}
    words = [*command, str(folder), plan.form, str(steps)]
    with unittest.mock.patch.dict(os.environ, variable):
        while not (folder / "final_0.pt").exists() and len(_attempts(folder)) <= num_ends:
            _launch(folder, words, num_ends - len(_attempts(folder)) if own else 0)
    finals = [(folder / f"final_{rank}.pt").exists() for rank in range(RANKS)]
    if not all(finals) or len(_attempts(folder)) != num_ends + 1:
        raise RuntimeError(
            f"{len(_attempts(folder))} attempts for {num_ends} faults that end one, and the end "
            f"was reached by {sum(finals)} ranks:\n{_outputs(folder)}"
        )
    return check(folder, plan)


def _launch(folder: Path, words: Sequence[str], max_restarts: int) -> None:
    """Have an agent, as torchrun has one, start ranks, until they end or can't be started anew."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=RANKS,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "agent")),
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    try:
        with contextlib.suppress(ChildFailedError):  # who calls sees what is left to do
            elastic_launch(config, words[0])(*words[1:])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # by an agent


def _attempts(folder: Path) -> list[Path]:
    return sorted(folder.glob("armed.*"), key=lambda path: path.stat().st_mtime)


def _outputs(folder: Path) -> str:
    """Return the end of what ranks wrote in the last attempts."""
    files = sorted(folder.glob("output.*"), key=lambda path: path.stat().st_mtime)
    return "\n".join(f"{file}:\n{file.read_text()[-3000:]}" for file in files[-2 * RANKS :])


def check(folder: Path, plan: Run) -> list[int]:
    """Return the steps from which the attempts of a run in `folder` began, by rank 0's log.

    Raises AssertionError if a fault was not done; if an attempt began elsewhere than at the last
    complete checkpoint or at one that was being written; or if a signal to a rank that has called
    `preempted` before did not have all ranks save after the same step.
    """
    log = read_log(folder)
    done = {each["fault"]: each for each in log if "fault" in each}
    assert len(done) == len(plan.faults), f"{sorted(done)} of {len(plan.faults)} faults"
    found, saved, begun = [], 0, {0}
    for each in log:
        if "began" in each and each["rank"] == 0:
            found.append(each["began"])
            assert saved <= found[-1] in begun, f"{each}, and {saved} was saved, of {begun}"
        saved = each.get("saved", saved)
        begun.add(each.get("saves", 0))
    for number, each in done.items():
        is_heard = each["first"] is not None and each["step"] > each["first"]
        if plan.faults[number].kind == "terminate" and is_heard:
            ends = [it["ended"] for it in log if "ended" in it and it["attempt"] == each["attempt"]]
            assert len(ends) == RANKS, f"{plan.faults[number]}: {len(ends)} ranks saved and ended"
            assert len(set(ends)) == 1, f"{plan.faults[number]}: ranks ended after steps {ends}"
    return found


def difference(whole: Path, folder: Path) -> str:
    """Name the first thing in which a run in `folder` differs from the one in `whole`, or ""."""
    wanted = {(it["rank"], it["step"]): it["loss"] for it in read_log(whole) if "loss" in it}
    seen = [((it["rank"], it["step"]), it["loss"]) for it in read_log(folder) if "loss" in it]
    if dict(seen).keys() != wanted.keys():
        return "steps without a loss"
    for (rank, step), loss in seen:
        if loss != wanted[rank, step]:
            return f"the loss of step {step} on rank {rank}"
    for rank in range(RANKS):
        want, got = (torch.load(each / f"final_{rank}.pt") for each in (whole, folder))
        if want.keys() != got.keys():
            return f"names on rank {rank}: {sorted(want.keys() ^ got.keys())}"
        for name, value in want.items():
            if _bits(value) != _bits(got[name]):
                return f"{name} on rank {rank}"
    return ""


def _bits(value: Tensor) -> bytes:
    return value.contiguous().numpy().tobytes()


def each_run(count: int, seed: int, root: Path, say: Callable[[str], None]) -> int:
    """Make runs with `count` faults, saying of each what came of it; return how many are wrong."""
    plans = draw(count, seed)
    steps, wrong = steps_of(max(len(plan.faults) for plan in plans)), 0
    with serving() as command:
        for form in FORMS:
            began = time.monotonic()
            run(root / form, Run(form, STORES[0], ()), steps, command)
            say(f"{form}, undisturbed: {steps} steps in {time.monotonic() - began:.0f} s")
        for plan in plans:
            folder, began = root / f"{plan.form}, {plan.store}", time.monotonic()
            try:
                resumed = run(folder, plan, steps, command)
                found = difference(root / plan.form, folder)
                said = f"DIFFERS in {found}" if found else "equal, bit for bit"
                wrong += len(plan.faults) if found else 0
                say(f"{plan.form}, {plan.store}: attempts from {resumed}; {said}")
            except (RuntimeError, AssertionError) as error:
                wrong += len(plan.faults)
                say(f"{plan.form}, {plan.store}: WRONG: {error}")
            for each in plan.faults:
                say(f"    {each.name()}")
            say(f"    {len(plan.faults)} faults in {time.monotonic() - began:.0f} s")
    return wrong


def main() -> int:
    """Make the runs; return 1 if one differs. With `--serve`, fork ranks of these."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attempts", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        for name in ("torch._inductor.compile_fx", "autoshard.backend"):
            importlib.import_module(name)
        gc.freeze()
        warm_ranks.serve(options.serve, train)
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        wrong = each_run(
            options.attempts, options.seed, Path(root), lambda text: print(text, flush=True)
        )
    print(
        f"{options.attempts - wrong} of {options.attempts} faults in runs that end equal, bit for "
        f"bit; {time.monotonic() - began:.0f} s"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
