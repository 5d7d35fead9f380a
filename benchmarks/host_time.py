"""What the host does for a step: CPU time where tensors are tiny and collectives are done at once.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py [--rounds 15] [--blocks 16] [--profile NAME]

One process a contestant, each rank 0 of a group of which no other rank exists. They take turns, a
few steps each, and the minimum of all rounds counts: the machine may be shared. A step is forward,
backward, and emptying gradients. The last lines are of a reduce alone, from packing to the parts of
the mean, of four parameters whose rows don't divide, 32,764 of 256 numbers, eagerly.

--profile prints where a contestant's time goes, and times nothing.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import multiprocessing
import os
import pstats
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

DIM, WORDS = 16, 64
STEPS = 10  # in a turn
WARM_UP = 8
MANY = 16_384

Step = Callable[[], object]


class Block(nn.Module):
    """Nine weights and two biases, as in a small Llama without its attention."""

    def __init__(self, dim: int, hidden: int) -> None:
        """Make the layers, `dim` wide, with `hidden` in the MLP."""
        super().__init__()
        self.before = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.between = nn.LayerNorm(dim)
        self.up, self.gate = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus what the layers make of it, of the same sizes."""
        h = self.before(x)
        x = x + self.o(torch.sigmoid(self.q(h)) * self.k(h) + self.v(h))
        h = self.between(x)
        down: Tensor = self.down(torch.relu(self.gate(h)) * self.up(h))
        return x + down


class Net(nn.Module):
    """Blocks between an embedding of words and a head."""

    def __init__(self, blocks: int, dim: int = DIM, hidden: int = 4 * DIM) -> None:
        """Make the modules, with as many blocks as `blocks` says."""
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(blocks))
        self.head = nn.Linear(dim, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, [..., WORDS], of word numbers."""
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def unsharded(model: Net) -> Any:
    return model


def unsharded_compiled(model: Net) -> Any:
    return torch.compile(model)


def fsdp2(model: Net) -> Any:
    """Shard `model` with FSDP2, each block a unit."""
    from torch.distributed import fsdp

    for block in model.blocks:
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def fsdp2_compiled(model: Net) -> Any:
    """Shard `model` with FSDP2, each block a unit and compiled by itself."""
    sharded = fsdp2(model)
    for block in model.blocks:
        block.compile()
    return sharded


def eager(model: Net) -> Any:
    """Shard `model` with autoshard, each block a unit."""
    import autoshard

    for block in model.blocks:
        autoshard.fully_shard(block)
    return autoshard.fully_shard(model)


def compiled(model: Net, bucketing: str = "auto") -> Any:
    """Shard `model` with autoshard, each block a unit, and have it compiled as a whole."""
    sharded = eager(model)
    sharded.compile(backend="autoshard", options={"strict": True, "bucketing": bucketing})
    return sharded


def compiled_by_unit(model: Net) -> Any:
    return compiled(model, "per_unit")


def step_of(make: Callable[[Net], Any], blocks: int) -> Step:
    """Return a step of a new model: forward, backward, and emptying gradients; no optimizer.

    make: makes of a `Net` what is called.
    blocks: of the model.
    """
    torch.manual_seed(0)
    model = Net(blocks)
    call, words = make(model), torch.randint(0, WORDS, (1, 4))
    parameters = list(model.parameters())  # as an optimizer has them

    def step() -> None:
        call(words).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def reduce_of(blocks: int) -> Step:
    """Return a step that reduces gradients of four parameters, one unit, and waits for them.

    The gradients are unsharded; they are made here. The default process group is used.
    blocks: not used.
    """
    import autoshard
    from autoshard.runtime.unit.reduce import Reduction

    model: Any = nn.ParameterList(nn.Parameter(torch.zeros(32_764, 256)) for _ in range(4))
    unit = autoshard.fully_shard(model)._autoshard_unit
    grads = [torch.ones(32_764, 256) for _ in unit.params]

    def step() -> None:
        """Launch one reduce of all gradients, and wait for it."""
        reduction = Reduction(
            unit, dict(zip(unit.params, grads, strict=True)), set(unit.params), torch.float32
        )
        reduction.launch()
        reduction.wait()

    return step


MAKERS = {
    1: (unsharded, unsharded_compiled, eager, compiled),
    8: (fsdp2, fsdp2_compiled, eager, compiled, compiled_by_unit),
}

CONTESTANTS: dict[str, tuple[int, Callable[[int], Step]]] = {
    f"{make.__name__.replace('_', ' ')}, {ranks} ranks": (ranks, functools.partial(step_of, make))
    for ranks, makers in MAKERS.items()
    for make in makers
} | {f"a reduce, {ranks} ranks": (ranks, reduce_of) for ranks in (8, MANY)}
"""By name: the number of ranks, and what makes a step from a number of blocks."""

RATIOS = (
    ("compiled, 8 ranks", "fsdp2, 8 ranks"),
    ("compiled, 8 ranks", "fsdp2 compiled, 8 ranks"),
    ("eager, 8 ranks", "fsdp2, 8 ranks"),
    ("compiled, 1 ranks", "unsharded compiled, 1 ranks"),
    (f"a reduce, {MANY} ranks", "a reduce, 8 ranks"),
)


def start(name: str, blocks: int) -> Step:
    """Make the process group of a contestant; return its step, warmed up.

    Of the group's ranks no other exists. torch gets one thread, and all objects that there are now
    are left out of garbage collection.
    """
    from autoshard import _torch

    ranks, make = CONTESTANTS[name]
    torch.set_num_threads(1)
    _torch.dist.pretend_ranks(ranks)
    step = make(blocks)
    for _ in range(WARM_UP):
        step()
    gc.collect()
    gc.freeze()
    return step


def serve(name: str, blocks: int, pipe: Connection) -> None:
    """Time the contestant `name`, and send milliseconds through `pipe`, until a message is false.

    First None is sent, once the step is warmed up. Then each true message is answered with the CPU
    time of this process for a step, the mean of `STEPS`.
    """
    step = start(name, blocks)
    pipe.send(None)
    while pipe.recv():
        began = time.process_time()
        for _ in range(STEPS):
            step()
        pipe.send((time.process_time() - began) / STEPS * 1e3)


def measure(names: list[str], blocks: int, rounds: int) -> dict[str, float]:
    """Return the least CPU time of each contestant's step over the rounds, in ms; they take turns.

    Each runs in a process of its own, which this starts, and ends after the last round.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in names:
        pipes[name], there = context.Pipe()
        context.Process(target=serve, args=(name, blocks, there), daemon=True).start()
        pipes[name].recv()
    best = dict.fromkeys(names, float("inf"))
    for _ in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(True)
            best[name] = min(best[name], pipe.recv())
    for pipe in pipes.values():
        pipe.send(False)
    return best


def main() -> None:
    """Print the least CPU time of each contestant and `RATIOS`, or a profile with `--profile`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help=f"some of: {'; '.join(CONTESTANTS)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--profile", metavar="NAME", choices=CONTESTANTS)
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else meshes are on a GPU, and the model is not
    if arguments.profile:
        step = start(arguments.profile, arguments.blocks)
        with cProfile.Profile() as profile:
            for _ in range(STEPS):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return
    best = measure(arguments.names or list(CONTESTANTS), arguments.blocks, arguments.rounds)
    for name, ms in best.items():
        print(f"{name:32} {ms:8.2f} ms")
    for ours, theirs in RATIOS:
        if ours in best and theirs in best:
            print(f"{ours} / {theirs}: {best[ours] / best[theirs]:.2f}")


if __name__ == "__main__":
    main()
