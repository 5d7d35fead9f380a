"""Ranks that are killed, and runs that go on from their last checkpoint, to the same parameters.

    OMP_NUM_THREADS=1 python benchmarks/faults.py [--kills 30] [--save-kills 10] [--seed 0]

Two ranks train a small model with dropout for 60 steps, with a checkpoint every 5, under torchrun,
which starts them anew when one is gone. Three runs: one that nobody disturbs; one in which a rank
kills itself (SIGKILL) within a phase of a step, at a random time in it: before the first step, in
forward, in backward, in the optimizer, while it saves; and one in which that is always while it
saves. Each restart has to resume from the latest checkpoint that was complete, or from the one that
was being written; in the end all parameters and the optimizer's averages have to be those of the
first run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STEPS, EVERY = 60, 5
PHASES = {"start": 0.0, "forward": 0.02, "backward": 0.02, "optimizer": 0.005, "save": 0.15}
"""In which a rank is killed, and within how many seconds of its beginning."""
TIMEOUT_S = 60


@dataclass(frozen=True)
class Kill:
    """Plan of a kill: `rank` kills itself `delay_s` seconds after `phase` has begun.

    That is in `step`, or the first one after it which has that phase; "start" is before all steps.
    """

    rank: int
    step: int
    phase: str
    delay_s: float


def kills(count: int, seed: int, *, phases: tuple[str, ...], steps: int = STEPS) -> list[Kill]:
    """Draw `count` kills, one an attempt, in the order of their steps: the same for the same seed.

    Steps are in order so that each attempt comes to its own kill. One in the phase "save" is at the
    next step that saves.
    phases: names of `PHASES` to choose from.
    steps: of the run; kills are drawn from all but the last `EVERY`.
    """
    generator = random.Random(seed)
    found = []
    for step in sorted(generator.randrange(steps - EVERY) for _ in range(count)):
        phase = generator.choice(phases)
        at = -(-(step + 1) // EVERY) * EVERY - 1 if phase == "save" else step
        delay_s = generator.uniform(0, PHASES[phase])
        found.append(Kill(generator.randrange(2), at, phase, delay_s))
    return sorted(found, key=lambda kill: (kill.step, kill.phase == "save"))


def train(folder: Path, form: str, steps: int) -> None:
    """Train as one rank, from the last checkpoint on; kill this process if that is planned.

    Kills are read from `folder`, "kills.json", a kill an attempt. Rank 0 notes in "attempts.jsonl"
    where the attempt began, and each checkpoint; at the end it writes the parameters and averages
    of the optimizer, unsharded, to "final.pt". Runs under torchrun.
    form: "compiled", with the plain lowering, or "eager".
    steps: to train in all.
    """
    import torch
    import torch.distributed as dist

    import autoshard

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    planned = json.loads((folder / "kills.json").read_text())
    mine = Kill(**planned[attempt]) if attempt < len(planned) else None
    begin = _killer(mine if mine is not None and mine.rank == rank else None, folder)
    begin("start", 0)

    torch.manual_seed(0)
    model: Any = autoshard.shard(_net())
    if form == "compiled":
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    resumed = autoshard.load_checkpoint(folder / "checkpoints", model, optimizer) or 0
    if rank == 0:
        with (folder / "attempts.jsonl").open("a") as log:
            log.write(json.dumps({"attempt": attempt, "resumed": resumed}) + "\n")
    for step in range(resumed, steps):
        begin("forward", step)
        loss = model(torch.randn(4, 16)).square().mean()
        begin("backward", step)
        loss.backward()
        begin("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            begin("save", step)
            autoshard.save_checkpoint(folder / "checkpoints", model, optimizer, step=step + 1)
            if rank == 0:
                with (folder / "attempts.jsonl").open("a") as log:
                    log.write(json.dumps({"attempt": attempt, "saved": step + 1}) + "\n")
    state = [parameter.full_tensor() for parameter in model.parameters()]
    state += [each["exp_avg"].full_tensor() for each in optimizer.state.values()]
    if rank == 0:
        torch.save(state, folder / "final.pt")
    dist.barrier()
    dist.destroy_process_group()


def _net() -> Any:
    """Build a small model with dropout, with random weights."""
    from torch import nn

    layers = [
        nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.1), nn.Linear(24, 16)) for _ in range(3)
    ]
    return nn.Sequential(*layers)


def _killer(kill: Kill | None, folder: Path) -> Callable[[str, int], None]:
    """Return a function to call when a phase of a step begins, which kills this process as planned.

    That is once, in a thread, after the delay of `kill`; never for None. The kill is noted before
    in `folder`, "killed.txt".
    """
    pending = [] if kill is None else [kill]

    def end() -> None:
        with (folder / "killed.txt").open("a") as log:
            log.write(f"{kill}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    def begin(phase: str, step: int) -> None:
        """Start the timer that kills, if `phase` is the planned one, in its step or after it."""
        if not pending or phase != pending[0].phase:
            return
        if phase != "start" and step < pending[0].step:
            return
        delay_s = pending.pop().delay_s
        if delay_s == 0:
            end()
        threading.Timer(delay_s, end).start()

    return begin


def run(folder: Path, form: str, planned: list[Kill], steps: int = STEPS) -> list[int]:
    """Train under torchrun on two ranks to the end; return the steps from which attempts began.

    folder: is made, with all files of the run; must not exist.
    form: "eager" or "compiled".
    planned: a kill for each attempt but the last.
    Raises RuntimeError with the end of the output where the run fails or hangs; AssertionError
    where not all kills took place, or as `check` does.
    """
    folder.mkdir(parents=True)
    (folder / "kills.json").write_text(json.dumps([asdict(kill) for kill in planned]))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(f"--max-restarts={len(planned)}", "--monitor-interval=0.1", __file__),
        *("--train", str(folder), "--form", form, "--steps", str(steps)),
    ]
    limit = TIMEOUT_S * (len(planned) + 1)
    with (folder / "output.txt").open("w") as output:
        # Else the store of an attempt has what the one before left there: gloo's old addresses.
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = None
    if code != 0:
        tail = (folder / "output.txt").read_text()[-3000:]
        raise RuntimeError(f"{'it hangs' if code is None else f'exit code {code}'}: {tail}")
    killed = (folder / "killed.txt").read_text().splitlines() if planned else []
    assert killed == [str(kill) for kill in planned], f"{len(killed)} of {len(planned)} kills"
    return check(folder)


def check(folder: Path) -> list[int]:
    """Return the steps from which the attempts of a run in `folder` began, by its log.

    Raises AssertionError if an attempt began elsewhere than from the last complete checkpoint or
    the one after it, over which a rank may have been killed.
    """
    latest, found = 0, []
    for line in map(json.loads, (folder / "attempts.jsonl").read_text().splitlines()):
        if "resumed" in line:
            found.append(line["resumed"])
            assert found[-1] in (latest, latest + EVERY), f"{line}, and {latest} was complete"
        latest = line.get("saved", found[-1])
    return found


def main() -> None:
    """Make the undisturbed run and those with kills, and print a line for each.

    Ends with 1 at the first run whose final state differs. With `--train`, this is a rank of a run.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--save-kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--form", choices=["eager", "compiled"], default="compiled")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.form, options.steps)
        return

    import torch

    everywhere = kills(options.kills, options.seed, phases=tuple(PHASES), steps=options.steps)
    while_saving = kills(options.save_kills, options.seed, phases=("save",), steps=options.steps)
    with tempfile.TemporaryDirectory() as root:
        began = time.monotonic()
        run(Path(root) / "whole", options.form, [], options.steps)
        want = torch.load(Path(root) / "whole" / "final.pt")
        print(f"undisturbed: {time.monotonic() - began:.0f} s", flush=True)
        for name, planned in (("anywhere", everywhere), ("while saving", while_saving)):
            began = time.monotonic()
            folder = Path(root) / name
            resumed = run(folder, options.form, planned, options.steps)
            got = torch.load(folder / "final.pt")
            equal = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            phases = ", ".join(
                f"{sum(kill.phase == phase for kill in planned)} {phase}" for phase in PHASES
            )
            print(
                f"killed {name}: {len(planned)} kills ({phases}), {len(resumed)} attempts from "
                f"steps {resumed}; final state "
                f"{'equal, bit for bit' if equal else 'DIFFERS'}; "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            if not equal:
                raise SystemExit(1)


if __name__ == "__main__":
    main()
