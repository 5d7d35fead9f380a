"""Two models in two threads of one process: over one group refused at once, else as one by one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, by_hand, in_both_forms, in_form, replicated, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import fully_shard
from autoshard.errors import UsageError
from autoshard.runtime.comm.flights import observe


def in_threads(*calls: Callable[[], object]) -> list[BaseException | None]:
    """What each of `calls`, which run at a time, has raised."""
    errors: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:
            errors[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return errors


def built(form: str, mesh: DeviceMesh | None = None) -> Any:
    torch.manual_seed(0)
    return in_form(by_hand(fully_shard, mesh=mesh)(SmallNet()), form)


@pytest.mark.parametrize("where", ["forward", "backward"])
@in_both_forms
@on_ranks(2)
def test_one_group(rank: int, form: str, where: str) -> None:
    """The second thread is told, with a remedy; the first one goes on."""
    models = [built(form), built(form)]
    for model in models:  # compiled, and known to the other rank
        net_loss(model, rank, 0).backward()
    is_inside, may_go_on = threading.Event(), threading.Event()

    def stay(*_: Any) -> None:
        is_inside.set()
        end = time.monotonic() + 30.0
        while not may_go_on.is_set():  # computes: a thread that waits for another is not refused
            assert time.monotonic() < end
            time.sleep(0.01)

    def first() -> None:
        loss = net_loss(models[0], rank, 0)
        if where == "forward":
            with torch.no_grad():
                handle = models[0].layers[1].register_forward_pre_hook(stay)
                net_loss(models[0], rank, 0)
                handle.remove()
        else:
            loss.register_hook(stay)
        loss.backward()

    def second() -> None:
        assert is_inside.wait(30.0)
        try:
            net_loss(models[1], rank, 0)
        finally:
            may_go_on.set()

    errors = in_threads(first, second)
    assert errors[0] is None
    with pytest.raises(UsageError, match=r"two threads train over process group .* of its own"):
        raise errors[1] or AssertionError("nothing was raised")


@in_both_forms
@on_ranks(2)
def test_groups_of_their_own(rank: int, form: str) -> None:
    """Each thread's model is trained as if it were alone."""
    want, _ = replicated(SmallNet, net_loss)
    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(2)]
    models = [built(form, mesh) for mesh in meshes]
    for model in models if form == "compiled" else ():  # one after the other, as the next test says
        net_loss(model, rank, 0).backward()
        model.zero_grad()
    errors = in_threads(*(lambda m=m: train(m, net_loss, adamw(m)) for m in models))
    assert errors == [None, None]
    for model in models:
        assert_same(model, want)


@on_ranks(2)
def test_two_compile(rank: int) -> None:
    """Ranks whose threads compile in another order are told at once; later, it goes on."""
    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(2)]
    models = [built("compiled", mesh) for mesh in meshes]

    def call(number: int) -> None:
        time.sleep(0.5 * (number == rank))
        net_loss(models[number], rank, 0)

    errors = in_threads(lambda: call(0), lambda: call(1))
    for error in errors:
        with pytest.raises(Exception, match="two threads compile models at a time"):
            raise error or AssertionError("nothing was raised")
    dist.barrier()
    for model in models:
        net_loss(model, rank, 0).backward()


@on_ranks(2)
def test_one_thread_after_the_other(rank: int) -> None:
    """A step in each thread, in turn: nothing is refused."""
    model = built("eager")
    for _ in range(3):
        errors = in_threads(lambda: net_loss(model, rank, 0).backward())
        assert errors == [None]
        net_loss(model, rank, 0).backward()


@in_both_forms
@on_ranks(2)
def test_first_by_one_thread(rank: int, form: str) -> None:
    """What a thread has trained before, another may go on with while the first trains its own.

    The first computes meanwhile: that it waits would do, too.
    """
    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(2)]
    models = [built(form, mesh) for mesh in meshes]
    for model in models:
        net_loss(model, rank, 0).backward()
    errors: list[BaseException | None] = []

    def beside(*_: Any) -> None:
        ended = threading.Event()

        def other() -> None:
            errors.extend(in_threads(lambda: net_loss(models[1], rank, 0).backward()))
            ended.set()

        threading.Thread(target=other).start()
        while not ended.is_set():
            time.sleep(0.01)

    loss = net_loss(models[0], rank, 0)
    loss.register_hook(beside)
    loss.backward()
    with torch.no_grad():
        models[0].register_forward_pre_hook(beside)
        net_loss(models[0], rank, 0)
    assert errors == [None, None]


@on_ranks(2)
def test_one_waits_for_the_other(rank: int) -> None:
    """A forward within which another thread runs one, over the same group, and is waited for."""
    models = [built("eager"), built("eager")]
    errors: list[BaseException | None] = []

    def beside(*_: Any) -> None:
        errors.extend(in_threads(lambda: net_loss(models[1], rank, 0)))

    for model in models:
        net_loss(model, rank, 0)
    models[0].layers[1].register_forward_pre_hook(beside)
    net_loss(models[0], rank, 0)
    assert errors == [None]


@on_ranks(2)
def test_after_an_interrupt(rank: int) -> None:
    """A forward that Ctrl-C has ended is not taken for one that runs."""
    model = built("eager")
    net_loss(model, rank, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        net_loss(model, rank, 0)
    handle.remove()
    again = built("eager")
    assert in_threads(lambda: net_loss(again, rank, 0)) == [None]


class Encoder(nn.Module):
    """Another method than `forward` reads the root's parameters, before a layer runs and after."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6)])
        self.table = nn.Embedding(11, 6)

    def encode(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.table(ids)) @ self.table.weight.t()


@on_ranks(2)
def test_methods_in_two_threads(rank: int) -> None:
    """A method that runs keeps what it has gathered while another thread runs one."""
    meshes = [DeviceMesh.from_group(dist.new_group([0, 1]), "cpu") for _ in range(2)]
    models = [by_hand(fully_shard, mesh=mesh)(Encoder()) for mesh in meshes]
    ids = torch.arange(5)

    def gathers(number: int) -> int:
        """How often a call of the method of that model gathers."""
        found: list[object] = []
        name = meshes[number].get_group().group_name
        with observe(lambda issued: found.append(issued) if issued.group == name else None):
            models[number].encode(ids)
        return len(found)

    errors: list[BaseException | None] = []
    alone = gathers(0)
    models[0].layers[0].register_forward_hook(
        lambda *_: errors.extend(in_threads(lambda: models[1].encode(ids)))
    )
    assert gathers(0) == alone
    assert errors == [None]
