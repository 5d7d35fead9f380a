"""200 steps of a small Llama: do loss curves depend on who shards, and on who compiles?

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/loss_curves.py

Every run starts from the same weights and sees the same windows of text once. In float32
the replicated model, the eager runtime and compiled graphs (plain lowering) must have the
same losses, bit for bit. In bf16, eager and with Inductor, they may differ from those by
less than three replicated runs differ that see the windows in other orders. Compared are
losses smoothed over SMOOTH steps: the largest difference, and the mean over steps. Ends
with 1 where that is not so.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plot import Chart, Line, picture
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.tools.demo import read_corpus
from autoshard.tools.parity.compare import average_gradients

ROWS, LENGTH = 8, 64  # a rank's batch
SMOOTH = 10  # steps
REFERENCE = "replicated, float32"
OTHERS = ("order 1", "order 2", "order 3")
SAME = ("eager, float32", "compiled, float32")
LOOSE = ("eager, bf16", "compiled with Inductor, bf16")


def build() -> nn.Module:
    """Build a small Llama, with the same random weights each time: torch is seeded."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


def replicated(model: Any) -> Any:
    return model


def eager(model: Any) -> Any:
    return autoshard.shard(model)


def compiled(model: Any) -> Any:
    options = {"lowering": "eager", "strict": True}
    return torch.compile(autoshard.shard(model), backend="autoshard", options=options)


def eager_in_bf16(model: Any) -> Any:
    precision = autoshard.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    return autoshard.shard(model, mp_policy=precision)


def compiled_in_bf16(model: Any) -> Any:
    model = eager_in_bf16(model)
    return torch.compile(model, backend="autoshard", options={"strict": True})


class Text:
    """Windows of source code, i64[windows, LENGTH]: as many as `steps` steps of all ranks see."""

    def __init__(self, steps: int) -> None:
        """Cut the corpus into windows at equal distances; all ranks have all of them."""
        self.num_in_step = ROWS * dist.get_world_size()
        num_windows = steps * self.num_in_step
        corpus = read_corpus()
        starts = torch.arange(num_windows) * ((len(corpus) - LENGTH) // num_windows)
        self.windows = corpus[starts[:, None] + torch.arange(LENGTH)].long()

    def batches(self, order: int) -> Sequence[Tensor]:
        """List this rank's batches, one a step, each i64[ROWS, LENGTH].

        order: the seed of a permutation of all windows, the same on all ranks.
        """
        generator = torch.Generator().manual_seed(order)
        shuffled = self.windows[torch.randperm(len(self.windows), generator=generator)]
        first = ROWS * dist.get_rank()
        return [step[first : first + ROWS] for step in shuffled.split(self.num_in_step)]


def train(shard: Callable[[Any], Any], batches: Sequence[Tensor]) -> list[float]:
    """Train a new model as `shard` makes it; return the loss of each step, its mean over ranks.

    All ranks call this. For `replicated`, gradients are averaged here. Dynamo is reset before.
    """
    torch._dynamo.reset()
    model = shard(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if shard is replicated:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over `SMOOTH` steps, from the first step that has as many behind it.

    There are `SMOOTH - 1` fewer of them than losses.
    """
    windows = (losses[end - SMOOTH : end] for end in range(SMOOTH, len(losses) + 1))
    return list(map(statistics.fmean, windows))


def main() -> None:
    """Train all runs, print figures on rank 0, and end the process: with 1 if curves differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--picture", type=Path, help="an SVG file to write")
    options = parser.parse_args()
    dist.init_process_group()
    text = Text(options.steps)
    runs: dict[str, tuple[Callable[[Any], Any], int]] = {
        REFERENCE: (replicated, 0),
        SAME[0]: (eager, 0),
        SAME[1]: (compiled, 0),
        LOOSE[0]: (eager_in_bf16, 0),
        LOOSE[1]: (compiled_in_bf16, 0),
        **{name: (replicated, seed) for seed, name in enumerate(OTHERS, 1)},
    }
    python = platform.python_version()  # whose source is the text
    world = dist.get_world_size()
    say(f"torch {torch.__version__}, Python {python}, {world} ranks, {options.steps} steps")
    curves: dict[str, list[float]] = {}
    for name, (shard, order) in runs.items():
        started = time.perf_counter()
        curves[name] = train(shard, text.batches(order))
        at = [f"{curves[name][step]:.6f}" for step in marks(options.steps)]
        say(f"{name:30} loss {' '.join(at)}  ({time.perf_counter() - started:.0f} s)")
    failures = compare(curves, options.picture)
    dist.destroy_process_group()
    sys.exit("; ".join(failures) or 0)


def compare(curves: dict[str, list[float]], path: Path | None) -> list[str]:
    """Compare the curves; return what is not as it must be, in words, empty if all is.

    Figures are printed on rank 0, which writes the picture to `path`, if given.
    curves: losses by run.
    """
    failures = [f"{name} is not {REFERENCE}" for name in SAME if curves[name] != curves[REFERENCE]]
    for name in SAME:
        worst = max(abs(a - b) for a, b in zip(curves[name], curves[REFERENCE], strict=True))
        say(f"{name} against {REFERENCE}: largest difference {worst:g}")
    smooth = {name: smoothed(curve) for name, curve in curves.items()}
    spread = [max(at) - min(at) for at in zip(*(smooth[name] for name in OTHERS), strict=True)]
    off = {
        name: [abs(a - b) for a, b in zip(smooth[name], smooth[REFERENCE], strict=True)]
        for name in LOOSE
    }
    for what, of in (("largest", max), ("mean", statistics.fmean)):
        limit = of(spread)
        say(f"{what} over steps: spread of orders {limit:.4f}")
        for name in LOOSE:
            say(f"{what} over steps: {name} is off by {of(off[name]):.4f}")
            if not of(off[name]) < limit:
                failures.append(f"{name}: its {what} difference is not within the spread of orders")
    if path is not None and dist.get_rank() == 0:
        draw(smooth, spread, off, path)
    return failures


def draw(
    smooth: dict[str, list[float]],
    spread: list[float],
    off: dict[str, list[float]],
    path: Path,
) -> None:
    """Write the picture of all curves, and of their differences, to `path`.

    smooth: smoothed losses, by run.
    spread: largest less smallest of the runs with other orders, by step.
    off: differences from the reference, by run.
    """

    def line(name: str | None, values: list[float], color: str, **look: Any) -> Line:
        return Line(name, [float("nan")] * (SMOOTH - 1) + values, color, **look)

    names = itertools.chain(["replicated, three other orders of data"], itertools.repeat(None))
    losses = Chart(
        f"loss, mean of {SMOOTH} steps",
        [
            *(line(next(names), smooth[name], GREY) for name in OTHERS),
            line("replicated = eager = compiled, float32", smooth[REFERENCE], BLUE, width=2.5),
            line(LOOSE[1], smooth[LOOSE[1]], ORANGE, dashes=(5, 4)),
        ],
    )
    differences = Chart(
        "differences",
        [
            line("the three other orders, largest from smallest", spread, GREY),
            line(f"{LOOSE[0]}, from float32", off[LOOSE[0]], GREEN),
            line(f"{LOOSE[1]}, from float32", off[LOOSE[1]], ORANGE, dashes=(5, 4)),
        ],
        height=1.4,
        from_zero=True,
    )
    picture([losses, differences], path)


GREY, BLUE, ORANGE, GREEN = "#a9a9a9", "#1f5fa8", "#e07b00", "#3a8a4d"


def marks(steps: int) -> list[int]:
    """List the first step, some between, and the last, counted from 0; for four steps or more."""
    return [0, steps // 4 - 1, steps // 2 - 1, 3 * steps // 4 - 1, steps - 1]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
