"""How many collectives a step takes, from the graphs and from those really issued."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import pytest
import torch
from support.issue import counts
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import IS_FULL
from support.training import adamw, by_hand, count, in_form, issued
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import fully_shard

# n units with parameters: two blocks and the root. A head of its own: were it tied to the
# embedding, the counts would be the same.
UNITS = 3


def expected(strategy: str) -> tuple[int, int, int]:
    """Gathers in forward, gathers in backward, reduces."""
    return (UNITS, UNITS - 1, UNITS) if strategy == "full_shard" else (UNITS, 0, UNITS)


def collectives_of_a_step(model: Any, rank: int, step: int) -> tuple[int, int, int]:
    """Gathers in forward, gathers in backward, reduces; forward reduces nothing."""
    losses: list[Tensor] = []
    forward = issued(lambda: losses.append(net_loss(model, rank, step)))
    backward = issued(losses[0].backward)
    assert count(forward)[1] == 0
    return count(forward)[0], *count(backward)


N = UNITS
Counts = tuple[int, int, int, int]  # gathers in forward; gathers, reduces, all-reduces in backward


def synced(model: Any) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


def no_sync(model: Any) -> AbstractContextManager[None]:
    return model.no_sync()


@contextlib.contextmanager
def no_all_reduce(model: Any) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


def strategy(name: str, *mesh: int) -> Callable[[Net], Any]:
    def shard(model: Net) -> Any:
        axes = ("replicate", "shard")
        on = init_device_mesh("cpu", mesh, mesh_dim_names=axes) if mesh else None
        return autoshard.shard(model, strategy=name, mesh=on)

    return shard


class Row(NamedTuple):
    """Micro-batches in turn: how they are run, and what each sends."""

    shard: Callable[[Net], Any]
    micro_batches: list[tuple[Callable[[Any], AbstractContextManager[None]], Counts]]
    ranks: int = 2


TABLE = {
    "full_shard": Row(strategy("full_shard"), [(synced, (N, N - 1, N, 0))] * 2),
    "None": Row(by_hand(fully_shard), [(synced, (N, N - 1, N, 0))] * 2),
    "True": Row(by_hand(fully_shard, reshard_after_forward=True), [(synced, (N, N, N, 0))] * 2),
    "shard_grad_op": Row(strategy("shard_grad_op"), [(synced, (N, 0, N, 0))] * 2),
    "False": Row(by_hand(fully_shard, reshard_after_forward=False), [(synced, (N, 0, N, 0))] * 2),
    # What isn't freed after forward is there for the micro-batches after one that reduces
    # nothing: here the root, below all of it.
    "full_shard, no_sync": Row(
        strategy("full_shard"),
        [
            (no_sync, (N, N - 1, 0, 0)),
            (no_sync, (N - 1, N - 1, 0, 0)),
            (synced, (N - 1, N - 1, N, 0)),
            (synced, (N, N - 1, N, 0)),
        ],
    ),
    "shard_grad_op, no_sync": Row(
        strategy("shard_grad_op"),
        [
            (no_sync, (N, 0, 0, 0)),
            (no_sync, (0, 0, 0, 0)),
            (synced, (0, 0, N, 0)),
            (synced, (N, 0, N, 0)),
        ],
    ),
    "hybrid_shard": Row(
        strategy("hybrid_shard", 2, 2),
        [
            (synced, (N, N - 1, N, N)),
            (no_all_reduce, (N, N - 1, N, 0)),
            (no_all_reduce, (N, N - 1, N, 0)),
            (synced, (N, N - 1, N, N)),
            (no_sync, (N, N - 1, 0, 0)),
        ],
        ranks=4,
    ),
    "hybrid_shard_zero2": Row(
        strategy("hybrid_shard_zero2", 2, 2), [(synced, (N, 0, N, N))] * 2, ranks=4
    ),
    "hybrid_shard 1x2": Row(strategy("hybrid_shard", 1, 2), [(synced, (N, N - 1, N, 0))]),
    "hybrid_shard 2x1": Row(strategy("hybrid_shard", 2, 1), [(synced, (0, 0, 0, N))]),
    "no_shard": Row(strategy("no_shard"), [(synced, (0, 0, 0, N)), (no_sync, (0, 0, 0, 0))]),
    "replicate": Row(
        by_hand(autoshard.replicate),
        [(synced, (0, 0, 0, N)), (no_sync, (0, 0, 0, 0)), (synced, (0, 0, 0, N))],
    ),
}


def sends(rank: int, row: str, form: str) -> None:
    shard, micro_batches, _ = TABLE[row]
    model = in_form(shard(Net(tied=False)), form, bucketing="per_unit")
    for number, (how, expected) in enumerate(micro_batches):
        with how(model):
            got = counts(model, lambda number=number: net_loss(model, rank, number))
        assert got == expected, f"micro-batch {number}"


sends_on = {ranks: on_ranks(ranks)(sends) for ranks in (2, 4)}


# Compiled, what differs from the first row alone.
COMPILED = ["None", "full_shard, no_sync", "shard_grad_op, no_sync", "hybrid_shard", "replicate"]


@pytest.mark.parametrize(
    ("row", "form"),
    [
        *((row, "eager") for row in TABLE),
        *((row, "compiled") for row in (TABLE if IS_FULL else COMPILED)),
    ],
)
def test_what_defines_a_strategy(row: str, form: str) -> None:
    """A.3.2, A52, A57, A68. Ranks compare their order over the store, not by gathers of it."""
    sends_on[TABLE[row].ranks](row=row, form=form)


# A checkpointed block is run again with what was gathered for that, or kept.
EAGER = [
    ("full_shard", None),
    ("full_shard", "non-reentrant"),
    ("full_shard", "reentrant"),
    ("shard_grad_op", None),
    ("shard_grad_op", "non-reentrant"),
    ("shard_grad_op", "reentrant"),
]


@pytest.mark.parametrize(("strategy", "checkpointing"), EAGER)
@pytest.mark.parametrize("tied", [True, False])
@on_ranks(2)
def test_eager(rank: int, strategy: str, checkpointing: str | None, tied: bool) -> None:
    model = autoshard.shard(Net(tied=tied, checkpointing=checkpointing), strategy=strategy)
    optimizer = adamw(model)
    for step in range(3):
        losses = []
        forward = issued(
            lambda step=step, losses=losses: losses.append(net_loss(model, rank, step))
        )
        backward = issued(losses[0].backward)
        assert (*count(forward), *count(backward)) == (
            expected(strategy)[0],
            0,
            *expected(strategy)[1:],
        )
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_frozen_units(rank: int, compile: bool) -> None:
    """Gathered again for the gradients that pass through them; never reduced."""
    model = Net(layers=4)
    for number in (1, 2):
        model.layers[number].requires_grad_(False)
    autoshard.shard(model)
    if compile:
        model.compile(
            backend="autoshard",
            options={"lowering": "eager", "bucketing": "per_unit", "strict": True},
        )
    for step in range(2):
        assert collectives_of_a_step(model, rank, step) == (5, 4, 3)


@on_ranks(2)
def test_module_used_twice(rank: int) -> None:
    """Gathered for each use, as its parameters are freed in between; reduced once."""
    model = Net(layers=2)
    model.layers.append(model.layers[0])
    autoshard.shard(model)
    for step in range(2):
        assert collectives_of_a_step(model, rank, step) == (4, 2, 3)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@on_ranks(2)
def test_compiled(rank: int, strategy: str, lowering: str) -> None:
    """D-60, D-73."""
    model = Net()
    call = torch.compile(
        model,
        backend="autoshard",
        options={
            "lowering": lowering,
            "bucketing": "per_unit",
            "strategy": strategy,
            "strict": True,
        },
    )
    for step in range(2):
        assert collectives_of_a_step(call, rank, step) == expected(strategy)
    plans = {plan.graph: plan for plan in autoshard.plans(call)}
    kinds = [
        [sum(b.kind == kind for b in plans[graph].buckets) for kind in ("gather", "reduce")]
        for graph in ("forward", "backward")
    ]
    assert kinds == [[expected(strategy)[0], 0], list(expected(strategy)[1:])]


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_saved_for_backward(rank: int, strategy: str) -> None:
    """D-67: Nothing gathered is among the tensors saved for backward, unless resharding is off."""
    from autoshard.runtime.comm import collectives, flights

    model = Net()
    call = torch.compile(
        model,
        backend="autoshard",
        options={"lowering": "eager", "bucketing": "per_unit", "strategy": strategy},
    )
    net_loss(call, rank, 0).backward()
    gathered: set[int] = set()
    wait = collectives.wait_gather

    def wait_and_note(flight: flights.InFlight) -> list[torch.Tensor]:
        tensors = wait(flight)
        if len(flight.issued.members) > 1:  # a block's; the root is kept
            gathered.update(tensor.untyped_storage().data_ptr() for tensor in tensors)
            kept_alive.append(tensors)
        return tensors

    kept_alive: list[list[torch.Tensor]] = []  # so that no address is used twice
    saved: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    collectives.wait_gather = wait_and_note
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = net_loss(call, rank, 1)
    finally:
        collectives.wait_gather = wait
    assert gathered
    assert saved
    assert bool(gathered & saved) == (strategy == "shard_grad_op")
    loss.backward()


@on_ranks(2)
def test_no_grad_gathers_once_and_keeps_nothing(rank: int) -> None:
    model = autoshard.shard(Net())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert count(issued(lambda: net_loss(model, rank, 0))) == (UNITS, 0)
    call = torch.compile(
        model, backend="autoshard", options={"lowering": "eager", "bucketing": "per_unit"}
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            want = net_loss(model, rank, 0)
            assert torch.equal(net_loss(call, rank, 0), want)
            assert count(issued(lambda: net_loss(call, rank, 0))) == (UNITS, 0)
    assert {plan.graph for plan in autoshard.plans(model)} == {"inference"}
