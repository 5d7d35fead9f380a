"""Tiny models of known architectures: their graph breaks and plans, and who equals whom.

    OMP_NUM_THREADS=1 PYTHONPATH=tests torchrun --nproc-per-node 2 benchmarks/architectures.py
    ... benchmarks/architectures.py mixtral dit --lowering inductor

Each is trained for 5 steps replicated, on the eager runtime, and compiled, on the same
data, other data on each rank. The models are those of the tests. Ends with 1 if two runs
differ by more than `--rtol`. With the eager lowering all are equal bit for bit; on torch 2.11
but for Llama and Mixtral, which AOTAutograd rounds otherwise, and T5, whose graph breaks.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES, architecture, architecture_loss
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

import autoshard

STEPS = 5


class GraphBreaks(logging.Handler):
    """The lines that the backend logs of graph breaks, each once."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: dict[str, None] = {}
        backend = logging.getLogger("autoshard.backend")
        backend.setLevel(logging.INFO)
        backend.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "graph break" in record.msg:
            self.lines[record.getMessage()] = None


def train(name: str, lowering: str, rtol: float, breaks: GraphBreaks) -> bool:
    """Print what is known of `name`; whether its three runs agree."""
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(architecture(name))
        return built[-1]

    def loss(model: Any, step: int) -> Tensor:
        return architecture_loss(model, name, dist.get_rank(), step)

    # AdamW divides a gradient by its size: of one that is zero but for Inductor's rounding, as
    # that of an attention's key bias, it makes a whole step.
    make = functools.partial(torch.optim.AdamW, lr=1e-2)
    if lowering == "inductor":
        make = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    torch._dynamo.reset()
    reasons = torch._dynamo.utils.counters["graph_break"]  # of which the backend may know no more
    reasons.clear()  # than that a step is unsupported
    breaks.lines.clear()
    report = autoshard.parity(
        build,
        list(range(STEPS)),
        loss=loss,
        optimizer=make,
        options={"lowering": lowering},
        rtol=rtol,
    )
    plans = autoshard.plans(built[-1])
    say(f"{name}: {count(len(plans), 'plan')}, {count(len(breaks.lines), 'graph break')}")
    shown = [*breaks.lines, *(f"  {reason.splitlines()[0]}" for reason in reasons)]
    say("\n".join(shown + [plan.text().rstrip() for plan in plans]))
    for comparison in report.comparisons:
        say(f"{name}: {comparison.text()}")
    say("")
    return report.ok


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=", ".join(ARCHITECTURES))
    parser.add_argument("--lowering", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--rtol", type=float, default=1e-5, help="of a parameter's largest value")
    options = parser.parse_args()
    dist.init_process_group()
    hf_logging.set_verbosity_error()
    breaks = GraphBreaks()
    say(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {STEPS} steps, {options}")
    names = options.names or ARCHITECTURES
    wrong = [n for n in names if not train(n, options.lowering, options.rtol, breaks)]
    dist.destroy_process_group()
    sys.exit(f"these differ: {', '.join(wrong)}" if wrong else 0)


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
