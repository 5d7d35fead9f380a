"""A training step in one call beside the loop that a user writes: time, operator calls, host time.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/whole_step.py [--rounds 20]
    OMP_NUM_THREADS=1 python benchmarks/whole_step.py --ranks 8 [--rounds 20]

Both train a small Llama of autoshard's own models with AdamW and clipping. The loop has the model
compiled, and computes the loss, clips and steps by itself; `train_step` compiles the model and the
loss in one graph. They take turns, a few steps each, in one process a rank, and medians of rounds
are quoted, with the median of the ratios of neighboring rounds. The second form has no other ranks,
and gives the CPU time of the host, and the number of operators that are called. `--fused` has
torch's fused AdamW in both.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard import _torch

STEPS = 5  # in a turn
WORDS = 8_000

Step = Callable[[], object]


class Block(nn.Module):
    """Attention over all positions before, and an MLP with a gate."""

    def __init__(self, dim: int, heads: int) -> None:
        """Make the layers, `dim` wide, with `heads` heads."""
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up, self.gate = (nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus what the layers make of it."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.between(x)
        down: Tensor = self.down(functional.silu(self.gate(h)) * self.up(h))
        return x + down


class Model(nn.Module):
    """Blocks between an embedding of words and a head."""

    def __init__(self, dim: int, layers: int, words: int) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.blocks = nn.ModuleList(Block(dim, 4) for _ in range(layers))
        self.head = nn.Linear(dim, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Return how badly `model` says which word follows."""
    return functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def contestants(options: argparse.Namespace) -> dict[str, Step]:
    """Make the steps, by name; each has trained for some steps."""
    ids = torch.randint(options.words, (options.batch, options.seq))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model(options.dim, options.layers, options.words))
    by_hand: Any = models[0]
    by_hand.compile(backend="autoshard", options={"lowering": options.lowering})
    with torch.no_grad():
        by_hand(ids)  # which shards it
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=options.fused or None)
        for model in models
    ]

    def loop() -> None:
        loss_of(by_hand, ids).backward()
        by_hand.clip_grad_norm_(1.0)
        optimizers[0].step()
        optimizers[0].zero_grad()

    step = autoshard.train_step(models[1], optimizers[1], loss_of, clip=1.0)
    found: dict[str, Step] = {"loop": loop, "train_step": lambda: step(ids)}
    for each in found.values():
        for _ in range(STEPS):
            each()
    return found


def times(run: Step, clock: Callable[[], float]) -> float:
    """Time of a step, in milliseconds, by `clock`."""
    begin = clock()
    for _ in range(STEPS):
        run()
    return 1e3 * (clock() - begin) / STEPS


def num_calls(run: Step) -> int:
    """Count the operators that a step calls, those that others call among them.

    Collectives count as one each: where no ranks are, torch copies to the place of each of them.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return sum("::" in each.name and not _in_collective(each) for each in found.events() or ())


def _in_collective(event: Any) -> bool:
    """Tell whether a collective has called the operator of `event`, or one that called it."""
    around = event.cpu_parent
    while around is not None:
        if around.name.startswith("c10d::"):
            return True
        around = around.cpu_parent
    return False


def main() -> None:
    """Run the rounds; rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="that are not there, for the host's time")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lowering", default="inductor")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--words", type=int, default=WORDS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args()
    if options.ranks:
        _torch.dist.pretend_ranks(options.ranks)
    else:
        dist.init_process_group("gloo")
    clock = time.process_time if options.ranks else time.perf_counter
    runs = contestants(options)
    gc.collect()
    gc.freeze()
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(options.rounds):
        names = list(runs) if number % 2 else list(reversed(runs))
        for name in names:
            if not options.ranks:
                dist.barrier()
            rounds[name].append(times(runs[name], clock))
    ratio = statistics.median(
        one / loop for one, loop in zip(rounds["train_step"], rounds["loop"], strict=True)
    )
    calls = {name: num_calls(run) for name, run in runs.items()}
    if dist.get_rank() == 0:
        what = "of the host" if options.ranks else "of a step"
        shown = ", ".join(f"{name} {statistics.median(each):.2f}" for name, each in rounds.items())
        print(f"ms {what}, medians of {options.rounds}: {shown}; ratio {ratio:.3f}")
        print(f"operator calls: {calls}, ratio {calls['train_step'] / calls['loop']:.3f}")
    if not options.ranks:
        dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
