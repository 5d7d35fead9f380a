"""Train a model replicated, sharded eagerly, or compiled, and compare rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard
from autoshard.passes.ir.layout import first_row
from autoshard.runtime.comm.flights import Issued, observe

FLOOR = 0.02
"""Initial weights are drawn with this deviation; below it, only the absolute error counts. An
attention's key bias has a gradient of zero, and holds nothing but rounding."""

Loss = Callable[[Any, int, int], Tensor]
"""loss(model, rank, step)"""

Make = Callable[[nn.Module], torch.optim.Optimizer]
"""A model's optimizer."""


FORMS = ("eager", "compiled")


in_both_forms = pytest.mark.parametrize("form", FORMS)


def in_form(model: Any, form: str, **options: Any) -> Any:
    """`model`, sharded, which runs as it is, or compiled without a fallback."""
    if form == "compiled":
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True, **options})
    return model


def by_hand(apply: Callable[..., Any], **arguments: Any) -> Callable[[Any], Any]:
    """What makes units of a model's layers, and of the model, by `apply`."""

    def shard(model: Any) -> Any:
        for layer in model.layers:
            apply(layer, **arguments)
        return apply(model, **arguments)

    return shard


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 4,
    replicated: bool = False,
) -> list[float]:
    """Losses of `steps` steps on this rank's data; gradients averaged here if `replicated`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    losses = []
    for step in range(steps):
        value = loss(model, rank, step)
        value.backward()
        if replicated:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def average_gradients(model: nn.Module, groups: Sequence[Any] = (None,)) -> None:
    """A parameter that has a gradient on some ranks only counts as zero on the others.

    groups: over each of which in turn gradients are summed; None is that of all ranks.
    """
    for param in model.parameters():
        has_grad = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has_grad)
        if has_grad > 0:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            for group in groups:
                dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size()


def replicated(
    build: Callable[[], nn.Module],
    loss: Loss,
    *,
    steps: int = 4,
    make: Make = adamw,
    backend: str | None = None,
) -> tuple[nn.Module, list[float]]:
    """The truth: every rank has the whole model, gradients are averaged by hand.

    backend: one of torch's own, to compile the unsharded model with.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    call = torch.compile(model, backend=backend) if backend else model
    return model, train(call, loss, make(model), steps=steps, replicated=True)


def sharded(
    build: Callable[[], nn.Module], loss: Loss, *, steps: int = 4, **arguments: Any
) -> tuple[nn.Module, list[float]]:
    """The eager runtime."""
    torch.manual_seed(0)
    model = autoshard.shard(build(), **arguments)
    return model, train(model, loss, adamw(model), steps=steps)


def compiled(
    build: Callable[[], nn.Module],
    loss: Loss,
    *,
    steps: int = 4,
    make: Make = adamw,
    **options: Any,
) -> tuple[nn.Module, list[float]]:
    """The one-line form, the optimizer built first."""
    torch.manual_seed(0)
    model = build()
    optimizer = make(model)
    call = torch.compile(
        model, backend="autoshard", options={"lowering": "eager", "strict": True, **options}
    )
    return model, train(call, loss, optimizer, steps=steps)


def assert_same(got: nn.Module, want: nn.Module, *, rtol: float = 0.0) -> None:
    """This rank's shards in `got` equal the matching rows of `want`, parameter by parameter.

    `want` is replicated, or sharded likewise. rtol: of the parameter's largest value, or of
    FLOOR if that is smaller; 0 asks for equality bit for bit.
    """
    theirs = dict(want.named_parameters())
    ours = dict(got.named_parameters())
    assert list(ours) == list(theirs)
    for name, param in ours.items():
        have, expected = local_rows_of(param, param), local_rows_of(theirs[name], param)
        if rtol == 0.0:
            assert torch.equal(have, expected), f"{name}: {(have - expected).abs().max()}"
        elif expected.numel():
            worst = (have - expected).abs().max() / expected.abs().max().clamp(min=FLOOR)
            assert worst <= rtol, f"{name}: {worst}"


def local_rows_of(param: Any, like: Any) -> Tensor:
    """This rank's rows of `param`, cut as the sharded `like` is."""
    if hasattr(param, "to_local"):
        return param.to_local().detach()
    if not hasattr(like, "to_local"):
        return param.detach()
    mesh, rows = like.device_mesh, param.detach()
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            dim = placement.dim
            start = first_row(param.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
            rows = rows.narrow(dim, start, like.to_local().shape[dim])
    for axis, placement in enumerate(like.placements):
        if placement == autoshard.FlatShard():
            start = first_row(rows.numel(), mesh.size(axis), mesh.get_local_rank(axis))
            rows = rows.reshape(-1)[start : start + like.to_local().numel()]
    return rows


def issued(run: Callable[[], object]) -> list[Issued]:
    """The collectives that `run` launches."""
    log: list[Issued] = []
    with observe(log.append):
        run()
    return log


def count(log: list[Issued]) -> tuple[int, int]:
    """(gathers, reduces)"""
    gathers = sum(entry.kind == "gather" for entry in log)
    return gathers, len(log) - gathers
