"""One rank of two, of which the second does something else."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support import patience
from torch import Tensor, nn

import autoshard

TIMEOUT_S = 12
LONG_S = 600  # of groups whose ranks are to say so long before
STEPS = 5
AT = 2  # the step in which something happens
SLOW_S = 9.0 / patience.SHORTER


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(8, 3)

        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skipped:
                x = layer(x)
        return self.head(x)


def fail(_: Any) -> None:
    raise ValueError("a file is missing")


ALONE: dict[str, Callable[[Any], object]] = {
    "a barrier": lambda model: dist.barrier(),
    "an all-reduce": lambda model: dist.all_reduce(torch.ones(1)),
    "full_tensor": lambda model: model.head.weight.full_tensor(),
    "killed": lambda model: os.kill(os.getpid(), signal.SIGKILL),
    "raises": fail,
    "has no more data": lambda model: sys.exit(0),
    "slow": lambda model: time.sleep(SLOW_S),
    "killed first": lambda model: os._exit(1),
}
"""What only the second rank does, in step AT, or, if "first", before the model is sharded."""


def main(case: str, form: str) -> None:
    is_long = case.startswith("skips") or case in ALONE
    timeout_s = LONG_S if is_long else TIMEOUT_S
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    is_other = dist.get_rank() == 1
    torch.manual_seed(0)
    torch._dynamo.config.assume_static_by_default = True
    torch._dynamo.config.automatic_dynamic_shapes = False
    options: dict[str, Any] = {"lowering": "eager", "strict": True}
    model = Model(4 if case == "another model" and is_other else 3)
    if case == "another option" and is_other:
        options["bucketing"] = "none"
    if case == "another dtype" and is_other:
        model.layers[1].up.double()
    if case == "frozen" and is_other:
        model.layers[1].requires_grad_(False)
    call: Any = model
    if case.endswith(" first") and is_other:
        ALONE[case](model)
    if form == "one line":
        call = torch.compile(model, backend="autoshard", options=options)
    else:
        for layer in model.layers:
            autoshard.fully_shard(layer)
            if form == "layers compiled":
                layer.compile(backend="autoshard", options=options)
        autoshard.fully_shard(model)
        if form == "compiled":
            call = torch.compile(model, backend="autoshard", options=options)
    for step in range(STEPS):
        if step == AT and is_other:
            if case == "frozen later":
                model.layers[1].requires_grad_(False)
            if case == "exits early":
                sys.exit(0)
            if case in ALONE:
                ALONE[case](model)
        if step == AT and case == "skips a layer" and is_other:
            model.skipped = 1
        if step == AT and case == "skips another layer":
            model.skipped = dist.get_rank()
        size = 7 if case == "another shape" and is_other and step == AT else 4
        call(torch.randn(size, 8)).square().sum().backward()
        for param in model.parameters():
            param.grad = None
    if case == "slow":
        if not is_other:
            time.sleep(SLOW_S)
        dist.barrier()


def run_rank(environment: dict[str, str], case: str, form: str, pipe: Any) -> None:
    """Send how it ended through `pipe`: "done", or the error; nothing if it just ends.

    Functions for the end of Python are called, as at the end of a script.
    """
    os.environ.update(environment)
    patience.shorten()
    end = "done"
    try:
        main(case, form)
    except SystemExit:
        end = ""
    except Exception as error:
        end = f"{type(error).__name__}: {' '.join(str(error).split())}"
        sys.last_value = error
    if end:
        pipe.send(end)
    pipe.close()
    atexit._run_exitfuncs()
    os._exit(0)  # without waiting for the other one
