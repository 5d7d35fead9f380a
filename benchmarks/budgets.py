"""Steps under memory budgets, on two gloo ranks: the peak that was measured, and who equals whom.

    OMP_NUM_THREADS=1 PYTHONPATH=tests torchrun --nproc-per-node 2 benchmarks/budgets.py
    ... benchmarks/budgets.py llama unet --shares 0.6 0.35
    ... benchmarks/budgets.py --lowering inductor
    ... benchmarks/budgets.py --random 300

Eight models are trained for three steps of SGD with the plain lowering, without a budget and with
some, which are shares of the peak that the plan without one has. Prints a Markdown table: of each,
the measured peak over the budget, that of the plan, what forward gives up, and the time that the
plan predicts over that without a budget. Losses, parameters and buffers have to be those without a
budget, bit for bit, and the peak at most two hundredths above it, or above that of a plan that says
that it can't keep to the budget. Ends with 1 if anything else was found.

The peak is that of storages alive in any op of the graphs, gradients and shards among them, as
tests/support/memory.py measures it; by Inductor it is what torch's profiler sees of a fourth
forward and backward, and numbers are compared within its rounding. With `--random` models are
random, and so are budgets, one for each; of these the numbers are compared, and what is given up is
counted.
"""

from __future__ import annotations

import argparse
import importlib
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.architectures import ARCHITECTURES
from support.dit import DiT
from support.memory import train_measured
from support.pieces import Piece, Pieces
from torch import Tensor, nn

import autoshard
from autoshard.tools.bench.peak_memory import peak_beyond

OVER = 1.02  # of a budget, at most
SHARES = (1.0, 0.8, 0.6, 0.45, 0.35)
TOPOLOGY = "gloo"  # of what they run on
ROWS, LENGTH = 16, 64
"""Samples of a rank's batch, and tokens in each."""
STEPS = 24  # tokens of recurrent models, of which each is traced

TOLERANCES = {"eager": (0.0, 0.0), "inductor": (1e-3, 1e-5)}
"""Of numbers, relative and absolute: Inductor adds up in another order where it fuses otherwise."""

Loss = Callable[[Any, torch.Generator], Tensor]


@dataclass(frozen=True)
class Workload:
    """Model that is trained, and the loss of a batch drawn with a generator of the rank's own.

    policy: of wrapping; None for autoshard's own.
    """

    build: Callable[[], nn.Module]
    loss: Loss
    policy: Any = None


class Recurrent(nn.Module):
    """Language model of six LSTMs, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 32)
        self.layers = nn.ModuleList(nn.LSTM(32, 32, batch_first=True) for _ in range(6))
        self.head = nn.Linear(32, 97)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def known(name: str, **config: Any) -> Callable[[], nn.Module]:
    """Return what builds the architecture `name`, with other sizes than in the tests."""

    def build() -> nn.Module:
        line = ARCHITECTURES[name]
        model: Any = getattr(importlib.import_module(line.library), line.model)
        given = {**line.config, **config}
        if line.library == "transformers":
            return model(model.config_class(**given)).train()
        return model(**given).train()

    return build


def ids(random: torch.Generator) -> Tensor:
    """Draw a batch of tokens."""
    return torch.randint(3, 97, (ROWS, LENGTH), generator=random)


def of_text(model: Any, random: torch.Generator) -> Tensor:
    """Return the loss of a model of text."""
    drawn = ids(random)
    return model(input_ids=drawn, labels=drawn).loss


def of_images(model: Any, random: torch.Generator) -> Tensor:
    """Return the loss of a model that classifies images."""
    images = torch.randn(ROWS, 3, 32, 32, generator=random)
    return model(pixel_values=images, labels=torch.zeros(ROWS, dtype=torch.int64)).loss


def of_labelled_noise(model: Any, random: torch.Generator) -> Tensor:
    """Return the loss of a model that finds the noise in an image of a class."""
    images = torch.randn(ROWS, 3, 16, 16, generator=random)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    return model(images, zeros + 5, zeros).square().mean()


def of_noise(model: Any, random: torch.Generator) -> Tensor:
    """Return the loss of a model that finds the noise in an image."""
    images = torch.randn(ROWS, 3, 16, 16, generator=random)
    return model(images, torch.full((ROWS,), 5)).sample.square().mean()


LAYERS = {"num_hidden_layers": 6}
WORKLOADS = {
    "llama": Workload(known("llama", **LAYERS), of_text),
    "gpt2": Workload(known("gpt2", **LAYERS), of_text),
    "t5": Workload(known("t5", num_layers=4), of_text),
    "vit": Workload(known("vit", **LAYERS, patch_size=4), of_images),
    "mixtral": Workload(known("mixtral", **LAYERS), of_text),
    "dit": Workload(lambda: DiT(layers=6), of_labelled_noise),
    "unet": Workload(known("unet_2d", layers_per_block=2), of_noise),
    "lstm": Workload(Recurrent, lambda model, random: model(ids(random)[:, :STEPS])),
}


@dataclass(frozen=True)
class Trained:
    """Model after its steps: its values, its plans, and the peak of the last step in bytes."""

    values: list[Tensor]
    plans: Sequence[autoshard.Plan]
    peak_bytes: int

    @property
    def planned_bytes(self) -> int:
        """Bytes at the peak that the plans predict."""
        return max(plan.peak_bytes for plan in self.plans)

    @property
    def makespan_us(self) -> float:
        """Microseconds that the plans predict."""
        return sum(plan.makespan_us for plan in self.plans)


def trained(workload: Workload, *, budget: int | None = None, **options: Any) -> Trained:
    """Train for three steps, compiled with `options`.

    budget: of the graphs, in bytes; gradients and states of an optimizer are added to it.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = autoshard.shard(workload.build(), policy=workload.policy)
    if budget is not None:
        shards = (param.to_local() for param in model.parameters() if param.requires_grad)
        options["memory_budget"] = budget + 3 * sum(each.nbytes for each in shards)
    options = {"lowering": "eager", "strict": True, "topology": TOPOLOGY, **options}
    model.compile(backend="autoshard", options=options)
    batches = torch.Generator().manual_seed(dist.get_rank())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*memory_budget")  # plans say the same
        values, peak = train_measured(model, lambda: workload.loss(model, batches))
    if options["lowering"] == "inductor":
        peak = of_inductor(model, lambda: workload.loss(model, batches))
    return Trained(values, autoshard.plans(model), peak)


def of_inductor(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that torch's profiler sees at the peak of a forward and backward.

    Shards and buffers, which are there before, are added.
    """

    def step() -> None:
        loss().backward()
        model.zero_grad()

    shards = [param.to_local() for param in model.parameters()]
    there = sum(each.nbytes for each in (*shards, *model.buffers()))
    return int(peak_beyond(step, torch.device("cpu")).allocated) + there


def gather_all(value: Any) -> list[Any]:
    """Return the value of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def row(name: str, share: float, plain: Trained, lowering: str) -> tuple[str, bool]:
    """Train `name` with a share of the peak for a budget: a line, and whether all is right."""
    budget = int(share * plain.planned_bytes)
    got = trained(WORKLOADS[name], budget=budget, lowering=lowering)
    rtol, atol = TOLERANCES[lowering]
    is_equal = all(
        torch.allclose(each, other, rtol=rtol, atol=atol)
        for each, other in zip(got.values, plain.values, strict=True)
    )
    is_over = got.planned_bytes > budget
    is_within = got.peak_bytes <= OVER * max(budget, got.planned_bytes)
    found = "equal" if is_equal else "OTHER NUMBERS"
    if is_over:
        found += ", said to be too small"
    if not is_within:
        found += ", MORE THAN PLANNED"
    given_up = sum(block.given_up_bytes for plan in got.plans for block in plan.saved)
    line = (
        f"| {name} | {share:.2f} | {got.peak_bytes / budget:.3f} "
        f"| {got.planned_bytes / budget:.3f} | {given_up / 1024:.0f} "
        f"| {got.makespan_us / plain.makespan_us:.3f} | {found} |"
    )
    return line, is_equal and is_within


def table(
    names: Sequence[str], shares: Sequence[float], lowering: str, say: Callable[[str], None]
) -> bool:
    """Say the table, line by line; False if anything is wrong on any rank."""
    say("| model | share | peak / budget | plan / budget | given up, KiB | time | numbers |")
    say("|---|---|---|---|---|---|---|")
    is_right = True
    for name in names:
        plain = trained(WORKLOADS[name], bucketing="per_unit", lowering=lowering)
        say(f"| {name} | none | {plain.peak_bytes / plain.planned_bytes:.3f} | 1 | | 1 | |")
        for share in shares:
            line, is_fine = row(name, share, plain, lowering)
            is_right &= all(gather_all(is_fine))
            say(line)
    return is_right


def random_models(number: int, say: Callable[[str], None]) -> bool:
    """Train as many random models with random budgets; False if numbers differ on any rank."""
    policy = autoshard.ModuleWrapPolicy({Piece})
    different, given_up, kept_to = [], 0, 0
    for seed in range(number):

        def build(seed: int = seed) -> nn.Module:
            return Pieces(seed)

        def loss(model: Any, random: torch.Generator) -> Tensor:
            return model(torch.linspace(-1, 1 + dist.get_rank(), 64 * 16).view(64, 16))

        workload = Workload(build, loss, policy)
        plain = trained(workload, bucketing="per_unit")
        budget = int(random.Random(seed).uniform(0.3, 0.9) * plain.planned_bytes)
        got = trained(workload, budget=budget)
        is_equal = all(
            torch.allclose(each, other, rtol=0, atol=0, equal_nan=True)
            for each, other in zip(got.values, plain.values, strict=True)
        )
        if not all(gather_all(is_equal)):
            different.append(seed)
        given_up += any(block.given_up_bytes for plan in got.plans for block in plan.saved)
        kept_to += got.planned_bytes <= budget
    say(
        f"{number} random models: other numbers with seeds {different or 'of none'}; {given_up} "
        f"gave up something, {kept_to} plans keep to their budgets"
    )
    return not different


def main() -> int:
    """Print the table; 1 if a step differs, or takes more memory than it was given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[[], *WORKLOADS], default=[])
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the peak")
    parser.add_argument("--lowering", choices=TOLERANCES, default="eager")
    parser.add_argument("--random", type=int, help="train as many random models instead")
    options = parser.parse_args()
    torch._dynamo.config.allow_rnn = True
    dist.init_process_group("gloo")

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    if options.random:
        is_right = random_models(options.random, say)
    else:
        names = options.models or list(WORKLOADS)
        is_right = table(names, options.shares, options.lowering, say)
    dist.destroy_process_group()
    return int(not is_right)


if __name__ == "__main__":
    raise SystemExit(main())
