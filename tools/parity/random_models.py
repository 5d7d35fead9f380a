"""Random models, options and batches, each trained in three ways and compared.

    autoshard parity --fuzz --samples 300 --seed 0

`matrix.py` has one model and all modes; this has models as people write them: modules in modules,
parameters used twice, or never, or in a shape of their own, branches. All that is drawn depends on
the seed alone, so that a number names a failing sample.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoshard import _torch
from autoshard.runtime.comm.mesh import device_type, ensure_process_group
from autoshard.tools.parity.compare import first_problem, parity

STEPS = 3
WIDTH = 6
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
BUCKETINGS = ("auto", "auto", "per_unit", "none")
BUDGETS = (None, None, 1, 10_000, 20_000, 50_000, 10**9)
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


@dataclass(frozen=True)
class Sample:
    """Result of one seed.

    text: the options that were drawn.
    problem: None if all three runs are equal bit for bit.
    """

    seed: int
    text: str
    problem: str | None


class _Wide(nn.Module):
    """Two linear layers, to another width and back, which ranks can't share evenly."""

    def __init__(self, source: random.Random) -> None:
        """Draw the inner width, the activation, and, for each layer, whether it has a bias.

        Torch's default generator draws the weights.
        """
        super().__init__()
        inner = source.choice((1, 3, 7, 8, 16))
        self.up = nn.Linear(WIDTH, inner, bias=source.random() < 0.7)
        self.down = nn.Linear(inner, WIDTH, bias=source.random() < 0.7)
        self.activation = source.choice((torch.tanh, functional.silu, functional.gelu))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


class _Attention(nn.Module):
    """Causal attention of one to three heads."""

    def __init__(self, source: random.Random) -> None:
        """Draw the number of heads from `source`; make two linear layers.

        Torch's default generator draws the weights.
        """
        super().__init__()
        self.heads = source.choice((1, 2, 3))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return causal attention over `x`, f32[batch, length, WIDTH], of the same sizes."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return y


class _Shapes(nn.Module):
    """Parameters outside of layers: of one element, of three dimensions, used in some rows."""

    def __init__(self, source: random.Random) -> None:
        """Draw the first dimension of `mix` from `source`; make all parameters.

        `gain` is 1; torch's default generator draws the values of the others.
        """
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.randn(1))
        self.mix = nn.Parameter(torch.randn(source.choice((1, 2, 5)), WIDTH, WIDTH) / WIDTH)
        self.places = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bld,kde->ble", x, self.mix) * self.gain + self.shift
        return y + self.places[: x.shape[1]]


class _Convolution(nn.Module):
    """Convolution over positions, in one to three groups."""

    def __init__(self, source: random.Random) -> None:
        """Draw the number of groups from `source`. Torch's default generator draws the weights."""
        super().__init__()
        groups = source.choice((1, 2, 3))
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return y


class _Several(nn.Module):
    """Modules in a dict, of which one is never used, and one by a flag; and a frozen module."""

    def __init__(self, source: random.Random) -> None:
        """Make the modules, and draw from `source` whether "b" is used.

        Torch's default generator draws the weights.
        """
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("a", "b", "c")})
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.uses_b = source.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what the frozen module, "a" and perhaps "b" give; "c" is not called."""
        found = {"a": self.parts["a"](x)}
        if self.uses_b:
            found["b"] = torch.tanh(self.parts["b"](found["a"]))
        y: Tensor = self.frozen(x)
        for each in found.values():
            y = y + each
        return y


class _Buffers(nn.Module):
    """Norm, dropout and a buffer, which may not be persistent, and a mean without gradient."""

    def __init__(self, source: random.Random) -> None:
        """Draw whether the buffer is persistent, the norm learned, and values dropped."""
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=source.random() < 0.5)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=source.random() < 0.7)
        self.drop = nn.Dropout(0.2 if source.random() < 0.5 else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, normed, dropped and scaled, plus its mean, a constant to backward."""
        with torch.no_grad():
            mean = x.mean()
        y: Tensor = self.drop(self.norm(x)) * self.scale
        return y + mean


_KINDS: Sequence[Callable[[random.Random], nn.Module]] = (
    _Wide,
    _Wide,
    _Attention,
    _Shapes,
    _Convolution,
    _Several,
    _Buffers,
)


class _Branch(nn.Module):
    """Modules in a row, around which there is a sum, a checkpoint, or nothing."""

    def __init__(self, source: random.Random, depth: int) -> None:
        """Draw modules, up to three, some of which are branches of less depth, and the flags.

        The flags: whether the input is added, whether gradients are checkpointed, and `is_unit`,
        whether the branch is to be a unit. Torch's default generator draws the weights.
        depth: of the branches inside; at 0 there are none.
        """
        super().__init__()
        self.inner = nn.ModuleList(
            _Branch(source, depth - 1)
            if depth > 0 and source.random() < 0.4
            else source.choice(_KINDS)(source)
            for _ in range(source.choice((1, 1, 2, 3)))
        )
        self.adds = source.random() < 0.7
        self.is_checkpointed = source.random() < 0.2
        self.is_unit = source.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Run the modules on `x`, in a checkpoint if so drawn, and add `x` if so drawn.

        There is no checkpoint where gradients are not computed.
        """
        if self.is_checkpointed and torch.is_grad_enabled():
            y: Tensor = checkpoint(self._run, x, use_reentrant=False)
        else:
            y = self._run(x)
        return x + y if self.adds else y

    def _run(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return x


class _Model(nn.Module):
    """Branches between an embedding and a head, which may be one parameter.

    A branch may be used twice, and a module never.
    """

    def __init__(self, source: random.Random) -> None:
        """Draw branches, an unused module, a tie, a branch used twice, and frozen parameters.

        The tie is of head and embedding; only parameters of the first branch may be frozen.
        Torch's default generator draws the weights.
        """
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.branches = nn.ModuleList(_Branch(source, 2) for _ in range(source.randint(1, 4)))
        self.spare = _Wide(source) if source.random() < 0.2 else None
        self.head = nn.Linear(WIDTH, 11, bias=source.random() < 0.5)
        if source.random() < 0.3:
            self.head.weight = self.embed.weight
        self.again = source.randrange(len(self.branches)) if source.random() < 0.2 else None
        if source.random() < 0.3:
            for param in self.branches[0].parameters():
                param.requires_grad_(source.random() < 0.5)

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        """Return the loss of predicting each next token, and the first after the last.

        ids: i64[batch, length]. scale: factor of the embeddings.
        """
        x = self.embed(ids) * scale
        for branch in self.branches:
            x = branch(x)
        if self.again is not None:
            x = self.branches[self.again](x)
        logits = self.head(x)
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
        return loss


def try_model(seed: int) -> Sample:
    """Train a random model replicated, eagerly and compiled, and compare bit for bit; on all ranks.

    seed: draws the model, and options, strategy, optimizer and batches.

    The process group is made if there is none, what torch has compiled is reset, and its random
    generator reseeded. Every rank returns the same result. An exception is a problem, too, and so
    is a RuntimeWarning, but for those about memory budgets.
    """
    ensure_process_group()
    source = random.Random(seed)
    options = {
        "lowering": "eager",
        "bucketing": source.choice(BUCKETINGS),
        "memory_budget": source.choice(BUDGETS),
        "strict": True,
    }
    strategy = source.choice(STRATEGIES)
    optimizer = source.choice(list(OPTIMIZERS))
    sizes = source.choice(((2, 4), (1, 3), (3, 5)))
    changes = source.random() < 0.4
    text = f"{options}, {strategy}, {optimizer}, batches of {sizes}{', changing' * changes}"
    drawn = source.random()

    def build() -> nn.Module:
        return _Model(random.Random(drawn))

    torch.compiler.reset()
    limit = _torch.dynamo.recompiling(64)
    with limit, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a frame that was not compiled
        warnings.filterwarnings("ignore", message=".*memory_budget", category=RuntimeWarning)
        try:
            report = parity(
                build,
                [_batch(sizes, step if changes else 0, step) for step in range(STEPS)],
                optimizer=OPTIMIZERS[optimizer],
                options=options,
                strategy=strategy,
                policy=lambda module: getattr(module, "is_unit", False),
            )
            exact = [each for each in report.comparisons if not each.bitwise]
            problem = "; ".join(each.text() for each in exact) or None
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return Sample(seed, text, first_problem(problem))


def _batch(sizes: tuple[int, int], more: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    ids = torch.randint(0, 11, (sizes[0], sizes[1] + more), generator=generator)
    return {"ids": ids.to(device_type()), "scale": 1.0}
