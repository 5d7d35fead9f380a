"""What a `ShardedModule` can be told, and what it then does."""

from __future__ import annotations

import functools
import gc
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.issue import counts, kinds
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    adamw,
    assert_same,
    compiled,
    in_both_forms,
    in_form,
    replicated,
    sharded,
    train,
)
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import _torch, fully_shard, register_forward_method
from autoshard.runtime.comm import flights
from autoshard.runtime.comm.limiter import MAX_AHEAD, Limiter
from autoshard.runtime.eager.unit_steps import steps_of

N = 3


def build(layers: int = N - 1, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return autoshard.shard(Net(layers, tied=False), **arguments)


def order_of(run: Callable[[], object]) -> list[str]:
    """Units in the order in which they are gathered, by the size of what they hold."""
    names = []
    with flights.observe(lambda i: names.append(f"{i.kind} {len(i.members)}")):
        run()
    return names


@in_both_forms
@on_ranks(2)
def test_unshard_and_reshard(rank: int, form: str) -> None:
    """B.2, D-6, D-28: whole parameters outside of forward, and gradients through them."""
    model = in_form(build(), form, bucketing="per_unit")
    assert isinstance(model.head.weight, DTensor)
    handle = model.unshard(async_op=True)
    handle.wait()
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.layers[0].up.weight, DTensor)  # not of modules inside
    assert counts(model, lambda: net_loss(model, rank, 0))[:2] == (N - 1, N - 1)
    model.zero_grad()
    (model.head.weight * (rank + 1)).sum().backward()
    assert model.head.weight.shape == (11, 6)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)
    assert torch.equal(model.head.weight.grad.full_tensor(), torch.full((11, 6), 1.5))
    assert model.unshard() is None
    with torch.no_grad():
        model.head.weight.zero_()
    with pytest.raises(RuntimeError, match=r"head\.weight.*written to"):  # D-5
        model.reshard()


@in_both_forms
@on_ranks(2)
def test_unsharded_parameters_follow_updates(rank: int, form: str) -> None:
    """D-46: what was gathered before an optimizer's step is not used after it, also if the step
    is a foreach one, which counts no version."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for each in (model, *model.layers):
        each.unshard()
    train(model, net_loss, optimizer)
    assert_same(model, want, rtol=1e-6)  # a foreach update fuses its arithmetic otherwise


@on_ranks(2)
def test_forward_prefetch(rank: int) -> None:
    """A11, A12, B.2: by default one ahead, or as many as asked for, or those listed."""
    for ahead, expected in ((True, 2), (False, 1), (3, 4)):
        model = build(3, forward_prefetch=ahead)
        with torch.no_grad():
            net_loss(model, rank, 0)
        seen: list[int] = []
        log: list[object] = []
        hook = model.embed.register_forward_hook(lambda *_, log=log, s=seen: s.append(len(log)))
        with flights.observe(log.append), torch.no_grad():
            net_loss(model, rank, 0)
        hook.remove()
        assert seen == [expected]
        assert len(log) == 4
    model = build(3, forward_prefetch=False)
    model.set_modules_to_forward_prefetch([model.layers[0], model.layers[1]])
    log = []
    seen = []
    model.embed.register_forward_hook(lambda *_: seen.append(len(log)))
    with flights.observe(log.append):
        net_loss(model, rank, 0).backward()
    assert seen == [3]
    with pytest.raises(ValueError, match="expected modules that head units but got LayerNorm"):
        model.set_modules_to_forward_prefetch([model.layers[0].norm])


@pytest.mark.parametrize("how", ["pre", "post", None, 2, "listed"])
@on_ranks(2)
def test_backward_prefetch(rank: int, how: Any) -> None:
    """A11, A12, B.2, D-44: the values are the same, however early gathers are."""
    of_three = functools.partial(Net, 3)
    want, _ = replicated(of_three, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(of_three(), backward_prefetch="pre" if how == "listed" else how)
    if how == "listed":
        model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    loss = net_loss(model, rank, 0)
    seen = kinds(loss.backward)
    expected = {
        "pre": ["gather", "gather", "reduce"],
        "post": ["gather", "reduce", "gather"],
        None: ["gather", "reduce", "gather"],
        2: ["gather", "gather", "gather"],
        "listed": ["gather", "gather", "gather"],
    }
    assert seen[:3] == expected[how]
    assert seen.count("gather") == 3
    model.zero_grad()
    train(model, net_loss, adamw(model))
    assert_same(model, want)


LIMITS: dict[str, list[dict[str, Any]]] = {
    "eager": [
        {"forward_prefetch": 0, "backward_prefetch": 0},
        {"forward_prefetch": 99, "backward_prefetch": 99},
        {"backward_prefetch": None, "limit_all_gathers": False},
    ],
    "compiled": [{"bucketing": [[], ["layers"]]}],
}


@pytest.mark.parametrize("form", ["eager", "compiled"])
@on_ranks(2)
def test_limits_of_none_zero_and_beyond_what_there_is(rank: int, form: str) -> None:
    """D-76: also for a model of one unit, with none before it and none after."""
    for build in (Net, functools.partial(Net, layers=0)):
        want, _ = replicated(build, net_loss, steps=2)
        for arguments in LIMITS[form]:
            run = sharded if form == "eager" else compiled
            got, _ = run(build, net_loss, steps=2, **arguments)
            assert_same(got, want)
    model = autoshard.shard(Net())
    model.set_modules_to_forward_prefetch([])
    model.set_modules_to_backward_prefetch([])
    assert counts(model, lambda: net_loss(model, rank, 0)) == (N, N - 1, N, 0)


@on_ranks(2)
def test_a_unit_fetched_ahead_and_not_used(rank: int) -> None:
    """D-44: waited for and let go of."""
    model = build(3)
    first = model.layers[0]
    first.set_modules_to_forward_prefetch([model.layers[2]])
    with torch.no_grad():
        assert kinds(lambda: first(torch.zeros(2, 6))) == ["gather"] * 2
    assert steps_of(first._autoshard_unit).last_step.num_gathered == 0
    assert counts(model, lambda: net_loss(model, rank, 0)) == (4, 3, 4, 0)


@in_both_forms
@on_ranks(2)
def test_comm_hook(rank: int, form: str) -> None:
    """A14, A54: in place of our collectives, with what it sums in one flat tensor."""
    want, _ = replicated(Net, net_loss)
    sizes = []

    def reduce(state: dict[str, int], grad: Tensor, part: Tensor) -> None:
        state["calls"] += 1
        sizes.append((grad.dim(), grad.numel() // part.numel()))
        dist.reduce_scatter_tensor(part, grad)
        part.div_(dist.get_world_size())

    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form, bucketing="per_unit")
    state = {"calls": 0}
    model.register_comm_hook(state, reduce)
    train(model, net_loss, adamw(model))
    assert_same(model, want)
    assert state["calls"] == 4 * N
    assert set(sizes) == {(1, 2)}
    with pytest.raises(RuntimeError, match="has a communication hook already"):
        model.register_comm_hook(state, reduce)
    other = build()
    with pytest.raises(RuntimeError, match=r"on the root module, not on 'layers\.0'"):
        other.layers[0].register_comm_hook(state, reduce)
    with pytest.raises(TypeError, match="should be callable, not str"):
        other.register_comm_hook(state, "fp16")


@in_both_forms
@on_ranks(2)
def test_comm_hook_without_shards(rank: int, form: str) -> None:
    """A14: whole gradients, in place."""
    want, _ = replicated(Net, net_loss)

    def reduce(state: None, grad: Tensor) -> None:
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())

    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net(), strategy="no_shard"), form)
    model.register_comm_hook(None, reduce)
    train(model, net_loss, adamw(model))
    assert_same(model, want)


def no_streams(tensor: Tensor, stream: Any) -> None:
    """In place of `Tensor.record_stream`."""


@each_value(
    compress=[None, "fp16", "bf16"], strategy=["full_shard", "no_shard"], form=["compiled", "eager"]
)
@on_ranks(2)
def test_the_hooks_of_torch(rank: int, strategy: str, compress: str | None, form: str) -> None:
    """A14: with their states, which hold the factors before and after the sum."""
    want = build(strategy=strategy)
    net_loss(want, rank, 0).backward()
    model = in_form(build(strategy=strategy), form)
    group = dist.group.WORLD
    if compress is None:
        name = "allreduce_hook" if strategy == "no_shard" else "reduce_scatter_hook"
        state = default_hooks.DefaultState(group)
    else:
        name, state = f"{compress}_compress_hook", default_hooks.LowPrecisionState(group)
    model.register_comm_hook(state, getattr(default_hooks, name))
    # There are no streams on a CPU: torch's own would fail there. (Dynamo can't look at a mock.)
    with unittest.mock.patch.object(Tensor, "record_stream", no_streams):
        net_loss(model, rank, 0).backward()
    # In half precision gradients have 8 significant bits and more.
    rtol = 0.0 if compress is None else 2.0**-7
    for got, param in zip(model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad.to_local(), param.grad.to_local(), rtol=rtol, atol=rtol / 10
        )


@on_ranks(4)
def test_comm_hook_on_a_hybrid_mesh(rank: int) -> None:
    """A58."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = build(strategy="hybrid_shard", mesh=mesh)
    with pytest.raises(RuntimeError, match="only one of the two"):
        model.register_comm_hook(None, print)


@in_both_forms
@on_ranks(2)
def test_all_reduce_hook(rank: int, form: str) -> None:
    """B.2: this rank's part of the mean, to be changed in place."""
    model = in_form(build(), form)
    net_loss(model, 0, 0).backward()
    want = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    for each in (model, *model.layers):
        each.set_all_reduce_hook(lambda mean: mean.mul_(3))
    net_loss(model, 0, 0).backward()
    for param, expected in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), 3 * expected)


class Generates(Net):
    def generate(self, ids: Tensor, *, times: int = 1) -> Tensor:
        for _ in range(times):
            ids = self(ids).argmax(-1)
        return self.head(self.embed(ids))


@pytest.mark.parametrize("of", ["autoshard", "torch"])
@on_ranks(2)
def test_methods_other_than_forward(rank: int, of: str) -> None:
    """B.1, D-28; registered by torch's own function, too, as hosts do for FSDP2."""
    ours = of == "autoshard"
    register = register_forward_method if ours else fsdp.register_fsdp_forward_method
    torch.manual_seed(0)
    want = Generates()
    torch.manual_seed(0)
    model = autoshard.shard(Generates())
    ids = torch.tensor([1, 2, 3])
    register(model, "generate")
    assert torch.equal(model.generate(ids, times=2), want.generate(ids, times=2))
    model.generate(ids).sum().backward()
    assert model.head.weight.grad is not None
    with pytest.raises(ValueError, match="Generates does not have a method 'sample'"):
        register(model, "sample")
    register(nn.Linear(2, 2), "sample")  # no unit: nothing to do
    torch.manual_seed(0)
    theirs = fsdp.fully_shard(Generates())
    fsdp.register_fsdp_forward_method(theirs, "generate")
    assert torch.equal(theirs.generate(ids), want.generate(ids))


@on_ranks(2)
def test_reset_after_an_exception(rank: int) -> None:
    """D-29, B.2: in forward and in backward, also while gradients wait."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(Net())

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    hook = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        net_loss(model, rank, 0)
    hook.remove()
    model.reset_iter_state()
    with model.no_sync():
        net_loss(model, rank, 0).backward()
    loss = model.layers[1].register_full_backward_hook(fail)
    value = net_loss(model, rank, 0)
    with pytest.raises(ZeroDivisionError):
        value.backward()
    loss.remove()
    model.reset_iter_state()
    model.zero_grad()
    train(model, net_loss, adamw(model))
    assert_same(model, want)
    with pytest.raises(RuntimeError, match=r"root module, not on 'layers\.0'"):
        model.layers[0].reset_iter_state()


@in_both_forms
@on_ranks(2)
def test_reshard_after_forward_at_run_time(rank: int, form: str) -> None:
    """B.2."""
    model = in_form(build(), form, bucketing="per_unit")
    model.set_reshard_after_forward(False)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (N, 0, N, 0)
    model.set_reshard_after_forward(True)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (N, N, N, 0)
    model.set_reshard_after_forward(False, recurse=False)
    assert counts(model, lambda: net_loss(model, rank, 0)) == (N, N - 1, N, 0)


class HasSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@in_both_forms
@on_ranks(2)
def test_unused_parameters_get_zeros_if_asked_for(rank: int, form: str) -> None:
    """B.2, D-37, D-42."""
    for sends in (False, True):
        wrapped = in_form(fully_shard(HasSpare()), form)
        wrapped.set_reduce_scatter_unused_params(sends)
        wrapped(torch.ones(1, 2)).sum().backward()
        grad = wrapped.spare.weight.grad
        assert (grad is not None) is sends
        assert not sends or grad.full_tensor().tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "name",
    [
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
        "set_is_last_backward",
        "set_force_sum_reduction_for_comms",
        "set_reduce_scatter_unused_params",
        "set_unshard_in_backward",
    ],
)
@on_ranks(2)
def test_wrong_flags(rank: int, name: str) -> None:
    model = build()
    getattr(model, name)(True)
    with pytest.raises(ValueError, match="should be a bool, got str"):
        getattr(model, name)("yes")


@in_both_forms
@on_ranks(2)
def test_frozen_and_unfrozen(rank: int, form: str) -> None:
    """A64, A65, D-38: between steps, with one without gradients in between."""

    def freeze(model: nn.Module, step: int) -> None:
        for number, layer in enumerate(model.layers):
            layer.requires_grad_(step >= 2 or number % 2 == 0)

    def loss(model: Any, rank: int, step: int) -> Tensor:
        freeze(model, step)
        with torch.no_grad():
            net_loss(model, rank, step + 50)
        return net_loss(model, rank, step)

    want, _ = replicated(Net, loss)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form)
    train(model, loss, adamw(model))
    assert_same(model, want)
    model.requires_grad_(False)
    model.embed.requires_grad_(True)
    net_loss(model, rank, 0).backward()
    if form == "eager":
        step = steps_of(model.layers[0]._autoshard_unit).last_step
        assert step.num_gathered == 0


@in_both_forms
@on_ranks(2)
def test_eval_between(rank: int, form: str) -> None:
    """A49, D-43, D-48: train, three times without gradients, train."""
    want, _ = replicated(Net, net_loss)

    def loss(model: Any, rank: int, step: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            outputs = [net_loss(model, rank, 70) for _ in range(3)]
        assert len({output.item() for output in outputs}) == 1
        model.train()
        return net_loss(model, rank, step)

    for strategy in ("full_shard", "shard_grad_op"):
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Net(), strategy=strategy, forward_prefetch=True), form)
        train(model, loss, adamw(model))
        assert_same(model, want)


class Event:
    """What the limiter waits for."""

    def __init__(self, log: list[int], number: int) -> None:
        self.log, self.number = log, number

    def synchronize(self) -> None:
        self.log.append(self.number)


def test_limiter() -> None:
    """A10: first in, first out, and only where there are two."""
    log: list[int] = []
    limiter = Limiter()
    limiter.add(Event(log, 0))
    limiter.wait()
    assert log == []
    for number in range(1, MAX_AHEAD + 1):
        limiter.add(Event(log, number))
    limiter.wait()
    assert log == [0]
    limiter.wait()
    assert log == [0, 1]
    limiter.wait()
    assert log == [0, 1]
    limiter.dropped(torch.device("cpu"))  # a CPU is never ahead of itself
    limiter.add(Event(log, 9))
    limiter.wait()
    assert log == [0, 1, 2]


@on_ranks(2)
def test_who_is_limited(rank: int) -> None:
    """A unit with an all-gather of the user's, unless `limit_all_gathers=False`."""

    class Gather:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
            return _torch.dist.all_gather_flat(output_tensor, input_tensor, **options)

    for limits, comm, is_asked in ((True, None, 0), (True, Gather(), 1), (False, Gather(), 0)):
        model: Any = autoshard.shard(nn.Linear(3, 3), limit_all_gathers=limits)
        model.set_custom_all_gather(comm)
        with (
            unittest.mock.patch.object(Limiter, "wait") as wait,
            unittest.mock.patch.object(Limiter, "dropped") as dropped,
        ):
            model(torch.ones(1, 3)).sum().backward()
        assert wait.call_count == dropped.call_count == is_asked


def test_limiter_waits_for_nothing_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[int] = []
    limiter = Limiter()
    for number in range(MAX_AHEAD):
        limiter.add(Event(log, number))
    with monkeypatch.context() as capture:
        capture.setattr("autoshard.runtime.comm.limiter.is_captured", lambda: True)
        limiter.wait()
        limiter.dropped(torch.device("cuda"))
    assert log == []
    limiter.wait()
    assert log == [0]


class Momentum(nn.Module):
    """An encoder, and a slow copy of it that forward updates while it is fetched ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = nn.Linear(4, 4)
        self.slow = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        fast = self.fast(x)
        with torch.no_grad():
            for slow, now in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.mul_(0.5).add_(now, alpha=0.5)
            target = self.slow(x)
        return (fast - target).square().sum()


@on_ranks(2)
def test_a_unit_written_to_while_it_is_fetched(rank: int) -> None:
    """D-5: what was fetched before is not used."""

    def loss(model: Any, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return model(torch.randn(3, 4, generator=generator))

    want, want_losses = replicated(Momentum, loss)
    torch.manual_seed(0)
    model = Momentum()
    fully_shard(model.fast)
    fully_shard(model.slow)
    fully_shard(model)
    assert train(model, loss, adamw(model)) == want_losses
    assert_same(model, want)


@on_ranks(2)
def test_after_an_interrupt(rank: int) -> None:
    """D-29: no hook of a module's runs for a KeyboardInterrupt."""
    want, _ = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = autoshard.shard(Net())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net_loss(model, rank, 0)
    hook.remove()
    train(model, net_loss, adamw(model))
    assert_same(model, want)


@on_ranks(2)
def test_steps_do_not_outlive_their_graph(rank: int) -> None:
    """One step is the last; those before are gone, with their tokens."""
    model = build()
    steps = []
    for step in range(4):
        net_loss(model, rank, step).backward()
        steps.append(weakref.ref(steps_of(model._autoshard_unit).last_step))
    gc.collect()
    assert [each() is not None for each in steps] == [False, False, False, True]
