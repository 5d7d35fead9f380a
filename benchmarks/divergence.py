"""Drills of ranks that part: each has to end with an error on every rank, or train as replicated.

    OMP_NUM_THREADS=1 python benchmarks/divergence.py [--only NAME] [--form eager|compiled]

In each drill two gloo ranks (three, where the name says so) train a small model with default
settings, and one of them does something else than the others. Printed are, for each rank, after how
many seconds it ended, and with what. A drill passes if all ranks name another rank, or their own,
within LIMIT_S, or if all come to the end with the parameters of the replicated model. The rank that
is told to leave (`leaves`) need not say anything. Exits with 1 if a drill has failed.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 30.0  # from when a rank parts
START_S = 120.0  # until then
STEPS, AT = 30, 3  # steps, and the one in which a rank parts
COUNT = 4  # of a batch


@dataclass(frozen=True)
class Drill:
    """What the last rank does, that others don't, and how that is to end.

    at:      run in place of its step AT.
    first:   run before the model is sharded.
    tells:   words of the error on each rank but those that leave, as a regular expression.
    leaves:  whether that rank ends by itself.
    is_equal: whether all are to train as the replicated model does, instead.
    on_all:  whether all ranks do it.
    """

    at: Callable[[Any], object] | None = None
    first: Callable[[Any], object] | None = None
    tells: str = r"rank \d"
    leaves: bool = False
    is_equal: bool = False
    forms: tuple[str, ...] = ("eager", "compiled")
    on_all: bool = False
    world: int = 2


class Loop:
    """Training of one rank."""

    def __init__(self, rank: int, form: str, drill: Drill) -> None:
        import torch
        import torch.distributed as dist
        from torch import Tensor, nn

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
                self.drop = nn.Dropout(0.0)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.drop(self.down(torch.relu(self.up(x))))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(Block() for _ in range(3))
                self.head = nn.Linear(8, 3)
                self.skipped: int | None = None
                self.fails = self.breaks = False

            def forward(self, x: Tensor) -> Tensor:
                for number, layer in enumerate(self.layers):
                    if number == 1 and self.fails:
                        raise ValueError("a batch that can't be read")
                    if number == 1 and self.breaks:
                        torch._dynamo.graph_break()
                    if number != self.skipped:
                        x = layer(x)
                return self.head(x)

        self.rank, self.form, self.drill = rank, form, drill
        self.wraps_layers = True
        self.lr, self.step_number, self.counts = 1e-2, 0, dict.fromkeys(range(STEPS), COUNT)
        torch.manual_seed(0)
        self.casts = set[int]()  # steps whose forward runs under autocast
        self.model: Any = Model()
        self.make_optimizer: Any = torch.optim.AdamW
        self.is_other = drill.on_all or rank == drill.world - 1
        if not dist.is_initialized():
            dist.init_process_group("gloo")

    def apart(self) -> None:
        """Say that this rank parts from the others now."""
        print(json.dumps({"apart": time.time()}), flush=True)

    def run(self) -> None:
        """Train, apart from the others where the drill says so."""
        if self.is_other and self.drill.first is not None:
            self.apart()
            self.drill.first(self)
        self.shard()
        for number in range(STEPS):
            self.step_number = number
            if number == AT and self.is_other and self.drill.at is not None:
                self.apart()
                self.drill.at(self)
            else:
                self.step()
        print(json.dumps({"equal": self.is_replicated()}), flush=True)

    def shard(self) -> None:
        """Shard the model, and make the optimizer."""
        import torch

        import autoshard

        if self.wraps_layers:
            for layer in self.model.layers:
                autoshard.fully_shard(layer)
        autoshard.fully_shard(self.model)
        self.call = self.model
        if self.form == "compiled":
            torch._dynamo.config.automatic_dynamic_shapes = False
            options = {"lowering": "eager"}
            self.call = torch.compile(self.model, backend="autoshard", options=options)
        self.optimizer = self.make_optimizer(self.model.parameters(), lr=self.lr)

    def batch(self) -> Any:
        """Batch of this rank in this step; the replicated model gets the same."""
        import torch

        generator = torch.Generator().manual_seed(100 * self.step_number + self.rank)
        return torch.randn(self.counts[self.step_number], 8, generator=generator)

    def forward(self, call: Any = None) -> Any:
        """Run the forward of this step, of `call` if that is given, and return the loss."""
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=self.step_number in self.casts):
            return (call or self.call)(self.batch()).square().mean()

    def backward(self) -> None:
        self.forward().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.update()

    def is_replicated(self) -> bool:
        """Tell whether the parameters are those of the replicated model after the same steps."""
        import torch
        import torch.distributed as dist

        mine = [param.full_tensor().detach() for param in self.model.parameters()]
        torch.manual_seed(0)
        model = type(self.model)()
        optimizer = self.make_optimizer(model.parameters(), lr=self.lr)
        for self.step_number in range(STEPS):
            self.forward(model).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(mine, model.parameters(), strict=True)
        return all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


def evaluate(loop: Loop) -> None:
    import torch

    with torch.no_grad():
        loop.forward()
    loop.step()


def save(loop: Loop) -> None:
    import autoshard

    autoshard.save_checkpoint(Path(os.environ["DRILL_FOLDER"]), loop.model, loop.optimizer, step=1)
    loop.step()


def load(loop: Loop) -> None:
    import autoshard

    autoshard.load_checkpoint(Path(os.environ["DRILL_FOLDER"]), loop.model, loop.optimizer)
    loop.step()


def freeze(loop: Loop) -> None:
    loop.model.layers[1].requires_grad_(False)


def without_sync(loop: Loop) -> None:
    with loop.model.no_sync():
        loop.backward()
    loop.update()


def take_a_branch(loop: Loop) -> None:
    loop.model.skipped = 1
    loop.step()


def go_on_after_an_error(loop: Loop) -> None:
    loop.model.fails = True
    with contextlib.suppress(ValueError):
        loop.forward()
    loop.model.fails = False


def fail_in_forward(loop: Loop) -> None:
    loop.model.fails = True
    loop.forward()


def autocast(loop: Loop) -> None:
    loop.casts.add(AT)
    loop.step()


def change_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.5
    loop.step()


def one_batch_more_then_fewer(loop: Loop) -> None:
    loop.backward()
    loop.step()
    loop.step_number += 1
    loop.optimizer.step()


def clip(loop: Loop) -> None:
    loop.backward()
    loop.model.clip_grad_norm_(1.0)
    loop.update()


def clip_by_torch(loop: Loop) -> None:
    import torch

    loop.backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0).full_tensor()
    loop.update()


def full_tensor(loop: Loop) -> None:
    loop.model.head.weight.full_tensor()
    loop.step()


def full_state_dict(loop: Loop) -> None:
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    state_dict.get_model_state_dict(loop.model, options=options)
    loop.step()


def all_reduce(loop: Loop) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    loop.step()


def barrier(loop: Loop) -> None:
    import torch.distributed as dist

    dist.barrier()
    loop.step()


def fail(loop: Loop) -> None:
    raise ValueError("a file is missing")


def leave(loop: Loop) -> None:
    sys.exit(0)


def leave_at_once(loop: Loop) -> None:
    os._exit(1)


def kill(loop: Loop) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_forward(loop: Loop) -> None:
    loop.model.layers[1].register_forward_pre_hook(lambda *_: kill(loop))
    loop.forward()


def backward_twice(loop: Loop) -> None:
    loss = loop.call(loop.batch()).sum()  # a sum saves nothing: torch finds out in the model
    loss.backward()
    loss.backward()
    loop.update()


def lose_gradient(loop: Loop) -> None:
    import torch

    loop.forward()
    torch.ones(1, requires_grad=True).sum().backward()
    loop.update()


def break_graph(loop: Loop) -> None:
    loop.model.breaks = True
    loop.step()


def skip_by_scaler(loop: Loop) -> None:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(loop.forward()).backward()
    loop.model.head.weight.grad._local_tensor.fill_(float("inf"))
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()


def sync_no_more(loop: Loop) -> None:
    loop.model.set_requires_gradient_sync(False)
    loop.step()


def other_optimizer(loop: Loop) -> None:
    import torch

    loop.make_optimizer = torch.optim.SGD


def change_dtype(loop: Loop) -> None:
    loop.model.layers[1].up.double()


def fewer_units(loop: Loop) -> None:
    loop.wraps_layers = False


def other_form(loop: Loop) -> None:
    loop.form = "compiled"


def larger_batch(loop: Loop) -> None:
    loop.counts[AT] = 7
    loop.step()


def evaluation_mode(loop: Loop) -> None:
    loop.model.eval()
    loop.step()
    loop.model.train()


def leave_out_a_step(loop: Loop) -> None:
    loop.backward()
    loop.optimizer.zero_grad()


def exhaust(loop: Loop) -> None:
    sys.exit(0)


def extra_forward(loop: Loop) -> None:
    loop.forward()
    loop.step()


DRILLS: dict[str, Drill] = {
    "an extra forward": Drill(extra_forward),
    "an extra evaluation": Drill(evaluate),
    "an extra save": Drill(save),
    "an extra load": Drill(load),
    "frozen from the start": Drill(first=freeze),
    "frozen later": Drill(lambda loop: (freeze(loop), loop.step())),
    "no_sync": Drill(without_sync),
    "gradients no more synchronised": Drill(sync_no_more),
    "another branch": Drill(take_a_branch),
    "an exception that is caught": Drill(go_on_after_an_error),
    "autocast": Drill(autocast, forms=("eager",)),
    "autocast, compiled": Drill(autocast, forms=("compiled",), is_equal=True),
    "another learning rate": Drill(change_rate),
    "another optimizer": Drill(first=other_optimizer),
    "an optimizer step left out": Drill(leave_out_a_step),
    "an optimizer step left out by the scaler": Drill(skip_by_scaler, forms=("eager",)),
    "a micro-batch more, then one fewer": Drill(one_batch_more_then_fewer),
    "clip_grad_norm_": Drill(clip),
    "torch's clip_grad_norm_": Drill(clip_by_torch, forms=("eager",)),
    "full_tensor": Drill(full_tensor),
    "a full state dict": Drill(full_state_dict, forms=("eager",)),
    "an all-reduce of the user's": Drill(all_reduce),
    "a barrier of the user's": Drill(barrier),
    "a barrier on one of three ranks": Drill(barrier, forms=("eager",), world=3),
    "raises before the model is sharded": Drill(first=fail, leaves=True),
    "ends before the model is sharded": Drill(first=leave, leaves=True),
    "os._exit before the model is sharded": Drill(first=leave_at_once, leaves=True),
    "killed before the model is sharded": Drill(first=kill, leaves=True),
    "raises in a forward": Drill(fail_in_forward, leaves=True),
    "killed in a forward": Drill(kill_in_forward, leaves=True),
    "raises between steps": Drill(fail, leaves=True),
    "killed between steps": Drill(kill, leaves=True),
    "one of three killed between steps": Drill(kill, leaves=True, world=3, forms=("eager",)),
    "has no more data, and ends": Drill(exhaust, leaves=True),
    "a second backward": Drill(backward_twice, leaves=True),
    "a second backward on all": Drill(backward_twice, on_all=True, tells="second time"),
    "a loss without the model's gradient": Drill(lose_gradient),
    "another dtype": Drill(first=change_dtype),
    "fewer units": Drill(first=fewer_units),
    "compiled on one, eager on the other": Drill(first=other_form, forms=("eager",)),
    "another batch size": Drill(larger_batch, is_equal=True),
    "a graph break": Drill(break_graph, forms=("compiled",)),
    "the mode of evaluation": Drill(evaluation_mode, is_equal=True),
}


def start(drill: Drill, form: str, out: Path, environment: dict[str, str]) -> int:
    """Start a rank of a drill, and return its process; it writes to `out`.

    A fork of this one, which has imported what takes long, that ends as a script does.
    """
    process = os.fork()
    if process:
        return process
    status = 1
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(environment)
    try:
        Loop(int(os.environ["RANK"]), form, drill).run()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        print(json.dumps({"ended": time.time()}), flush=True)
        sys.last_value = error  # as Python does before it calls the hook
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass
class End:
    """How a rank ended: seconds after one parted, its error, whether it trained as replicated."""

    seconds: float | None
    text: str
    is_equal: bool

    def __str__(self) -> str:
        if self.seconds is None:
            return "SILENT: still waits"
        what = self.text or ("equal" if self.is_equal else "ended without an error")
        return f"{self.seconds:5.1f} s  {what}"


def run(name: str, form: str) -> list[End]:
    """Run a drill, and return how each rank ended."""
    drill, port = DRILLS[name], str(_free_port())
    folder = Path(tempfile.mkdtemp())  # no `TemporaryDirectory`: ranks would delete it, too
    try:
        files = [folder / f"{rank}.out" for rank in range(drill.world)]
        processes = []
        for rank, file in enumerate(files):
            file.touch()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(drill.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "DRILL_FOLDER": str(folder / "checkpoints"),
            }
            processes.append(start(drill, form, file, environment))
        return _watch(files, processes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(files: list[Path], processes: list[int]) -> list[End]:
    """Wait for all ranks to end, for LIMIT_S since one has parted; end those that have not."""
    began, ended = time.time(), dict[int, float]()
    while len(ended) < len(processes):
        apart = _apart(files)
        if time.time() > (began + START_S if apart is None else apart + LIMIT_S + 3.0):
            break
        for rank, process in enumerate(processes):
            if rank not in ended and os.waitpid(process, os.WNOHANG)[0]:
                ended[rank] = time.time()
        time.sleep(0.05)
    for rank in set(range(len(processes))) - ended.keys():
        os.kill(processes[rank], signal.SIGKILL)
        os.waitpid(processes[rank], 0)
    return [_end(file, _apart(files) or began, ended.get(rank)) for rank, file in enumerate(files)]


def _apart(files: list[Path]) -> float | None:
    """Return when the first rank has parted from the others."""
    return min((each["apart"] for file in files for each in _said(file, "apart")), default=None)


def _end(file: Path, apart: float, ended: float | None) -> End:
    """Tell how the rank that has written `file` has ended: when it raised, or was gone."""
    raised = [each["ended"] for each in _said(file, "ended")]
    when = raised[0] if raised else ended
    is_equal = any(each["equal"] for each in _said(file, "equal"))
    return End(None if when is None else when - apart, _error(file.read_text()), is_equal)


def _said(path: Path, key: str) -> Iterator[dict[str, Any]]:
    """Yield what a rank has said of `key`."""
    for line in path.read_text().splitlines():
        if line.startswith(f'{{"{key}"'):
            yield json.loads(line)


def _error(output: str) -> str:
    """Return the last error of a traceback in `output`, with its notes, in one line; or ""."""
    lines = [re.sub(r"^\[rank\d+\]:\s?", "", line) for line in output.splitlines()]
    found = [
        at
        for at, line in enumerate(lines)
        if re.match(r"[\w.]*(Error|Failed|Differ|Exit|Exception(?! raised from)|Apart)\b.*:", line)
    ]
    if not found:
        return ""
    until = itertools.takewhile(
        lambda line: not line.startswith(("{", "Traceback")), lines[found[-1] :]
    )
    return " ".join(" ".join(until).split())


_ERROR = r"[\w.]*(Error|Failed|Differ)\b.*:"


def passes(drill: Drill, ends: list[End]) -> bool:
    """Tell whether all ranks ended as they are to."""
    if any(end.seconds is None or end.seconds > LIMIT_S for end in ends):
        return False
    if drill.is_equal or all(end.is_equal for end in ends):
        return all(end.is_equal for end in ends)
    stays = ends[:-1] if drill.leaves else ends
    return all(
        re.search(drill.tells, end.text) and not re.search(_VAGUE, end.text) for end in stays
    )


_VAGUE = "is stuck, or went another way"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="a part of the names of the drills to run")
    parser.add_argument("--form", choices=("eager", "compiled"))
    parser.add_argument("--width", type=int, default=300, help="of what is printed of an error")
    arguments = parser.parse_args()
    for module in ("torch._inductor.compile_fx", "autoshard.backend", "autoshard.runtime.sharding"):
        importlib.import_module(module)
    failed = []
    for name, drill in DRILLS.items():
        for form in drill.forms:
            if arguments.form not in (None, form) or (arguments.only or "") not in name:
                continue
            ends = run(name, form)
            good = passes(drill, ends)
            failed += [] if good else [f"{name} ({form})"]
            print(f"{'pass' if good else 'FAIL'}  {name} ({form})", flush=True)
            for rank, end in enumerate(ends):
                print(f"        rank {rank}: {str(end)[: arguments.width]}", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
