"""Optimizer states on the host: the update, and all that is seen of them, is as on the device."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import FORMS, assert_same, in_both_forms, in_form, replicated, train
from torch import Tensor, optim
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import OptimizerOffloadPolicy
from autoshard.runtime.training import host_states
from autoshard.runtime.training.host_states import HostState

MAKES: dict[str, Any] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2),
    "Adam, amsgrad": lambda params: optim.Adam(params, lr=1e-2, amsgrad=True),
    "foreach AdamW": lambda params: optim.AdamW(params, lr=1e-2, foreach=True),
    "a rate as a tensor": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2)),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "SGD without states": lambda params: optim.SGD(params, lr=0.1),
    "RMSprop": lambda params: optim.RMSprop(params, momentum=0.9, centered=True),
    "Adagrad": lambda params: optim.Adagrad(params),
    "Rprop": lambda params: optim.Rprop(params),
    "ASGD": lambda params: optim.ASGD(params),
}


POLICY = OptimizerOffloadPolicy(bucket_bytes=300)
"""With a few parameters a bucket."""


def built(form: str = "eager", *, is_on_host: bool = True, **arguments: Any) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    policy = POLICY if is_on_host else None
    return in_form(autoshard.shard(Net(), offload_policy=policy, **arguments), form)


def tensors(optimizer: optim.Optimizer) -> list[Tensor]:
    """Local tensors of all states, in order."""
    return [
        each.to_local() if isinstance(each, DTensor) else each
        for param in optimizer.param_groups[0]["params"]
        for _, each in sorted(optimizer.state.get(param, {}).items())
        if isinstance(each, Tensor)
    ]


def assert_same_states(got: optim.Optimizer, want: optim.Optimizer) -> None:
    mine, theirs = tensors(got), tensors(want)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@each_value(name=MAKES, form=FORMS, strategy=["full_shard", "no_shard", "hybrid_shard"])
@on_ranks(2)
def test_as_the_replicated_model(rank: int, name: str, form: str, strategy: str) -> None:
    """Bit for bit, states too; in the middle they are saved and loaded."""
    make = MAKES[name]
    want, want_losses = replicated(Net, net_loss, make=lambda model: make(model.parameters()))
    plain = built(is_on_host=False, strategy=strategy)
    states = make(plain.parameters())
    assert train(plain, net_loss, states) == want_losses
    model = built(form, strategy=strategy)
    optimizer = make(model.parameters())
    losses = train(model, net_loss, optimizer, steps=2)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = make(model.parameters())
    optimizer.load_state_dict(saved)
    for step in range(2, 4):
        loss = net_loss(model, rank, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == want_losses
    assert_same(model, want)
    assert_same_states(optimizer, states)
    has_states = name != "SGD without states"
    assert any(isinstance(each, HostState) for each in optimizer.state.values()) == has_states


@on_ranks(2)
def test_several_groups_and_some_units(rank: int) -> None:
    """Of one unit states are on the host, in two groups; a parameter without a gradient waits."""
    made = {}
    for policy in (None, POLICY):
        torch.manual_seed(0)
        model = Net()
        autoshard.fully_shard(model.layers[0], offload_policy=policy)
        autoshard.fully_shard(model)
        params = dict(model.named_parameters())
        first = [param for name, param in params.items() if name.endswith("bias")]
        second = [param for name, param in params.items() if not name.endswith("bias")]
        optimizer = optim.AdamW([{"params": first, "lr": 0.1}, {"params": second}], lr=1e-2)
        for step in range(3):
            net_loss(model, rank, step).backward()
            if step == 0:
                model.layers[0].up.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        made[policy] = model, optimizer
    (want, states), (got, optimizer) = made.values()
    assert_same(got, want)
    assert_same_states(optimizer, states)
    for name, param in got.named_parameters():
        assert isinstance(optimizer.state[param], HostState) == name.startswith("layers.0.")


@in_both_forms
@pytest.mark.parametrize("is_fused", [False, True])
@on_ranks(2)
def test_a_scaler_that_finds_an_inf(rank: int, form: str, is_fused: bool) -> None:
    made = []
    for is_on_host in (False, True):
        model = built(form, is_on_host=is_on_host)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2, fused=is_fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            loss = net_loss(model, rank, step)
            scaler.scale(loss * (float("inf") if step == 1 and rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        made.append((model, optimizer))
    (want, states), (got, optimizer) = made
    assert_same(got, want)
    assert_same_states(optimizer, states)


@on_ranks(2)
def test_muon(rank: int) -> None:
    """It orthogonalises matrices, of which no rank has all: it is given DTensors."""
    made = []
    for is_on_host in (False, True):
        model = built(is_on_host=is_on_host)
        matrices = [param for param in model.parameters() if param.dim() == 2]
        optimizer = optim.Muon(matrices, lr=1e-2)
        train(model, net_loss, optimizer)
        made.append((model, optimizer))
    (want, states), (got, optimizer) = made
    assert_same(got, want)
    assert_same_states(optimizer, states)


@on_ranks(2)
def test_a_closure(rank: int) -> None:
    """It is called once, before anything is updated."""
    made = []
    for is_on_host in (False, True):
        model = built(is_on_host=is_on_host)
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(3):
            closure = functools.partial(_loss_of_a_closure, model, optimizer, rank, step)
            losses.append(optimizer.step(closure).item())
        made.append((model, losses))
    assert made[1][1] == made[0][1]
    assert_same(made[1][0], made[0][0])


def _loss_of_a_closure(model: Any, optimizer: optim.Optimizer, rank: int, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = net_loss(model, rank, step)
    loss.backward()
    return loss


@on_ranks(2)
def test_an_error_in_the_middle(rank: int) -> None:
    """Buckets before it are stepped, those after it are not, and the next step is like any."""
    model = built()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, net_loss, optimizer, steps=1)
    net_loss(model, rank, 1).backward()
    step, calls = sys.modules["torch.optim.adam"]._single_tensor_adam, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("out of it")
        step(*args, **kwargs)

    with (
        mock.patch("torch.optim.adam._single_tensor_adam", failing),
        pytest.raises(MemoryError),
    ):
        optimizer.step()
    steps = [int(optimizer.state[param]["step"]) for param in model.parameters()]
    assert steps == sorted(steps, reverse=True)
    assert set(steps) == {1, 2}
    assert all(isinstance(each, HostState) for each in optimizer.state.values())
    optimizer.step()
    assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [
        each + 1 for each in steps
    ]


class Derived(optim.AdamW):
    """Could do anything in its step."""


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    model = built()
    optimizer = Derived(model.parameters())
    net_loss(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"Derived may update .* states of .*weight live on"):
        optimizer.step()
    assert not optimizer.state


@on_ranks(2)
def test_what_readers_see(rank: int) -> None:
    """A mapping like any; plain dicts in state dicts, copies and pickles."""
    model = built()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, net_loss, optimizer, steps=1)
    param = model.layers[0].up.weight
    state = optimizer.state[param]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert len(state) == 3
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].shape == param.shape
    assert "exp_avg" in repr(state)
    for each in optimizer.state_dict()["state"].values():
        assert type(each) is dict
    assert type(copy.deepcopy(state)) is dict
    assert type(pickle.loads(pickle.dumps({"step": state}))["step"]) is dict
    assert dict(state) == {**state}
    waits: list[int] = []
    for read in (lambda: state["step"], lambda: dict(state), lambda: optimizer.state_dict()):
        state.stores = mock.Mock(wait_on_host=lambda: waits.append(1))
        read()
        assert state.stores is None
    assert len(waits) == 3


@on_ranks(2)
def test_states_of_torchs_checkpoints(rank: int) -> None:
    """Those of a run on the device go on here, and the other way round."""
    want = built(is_on_host=False)
    states = optim.AdamW(want.parameters(), lr=1e-2)
    train(want, net_loss, states, steps=5)
    for first in (False, True):
        before = built(is_on_host=first)
        optimizer = optim.AdamW(before.parameters(), lr=1e-2)
        train(before, net_loss, optimizer, steps=2)
        model_state, state = dcp.get_state_dict(before, optimizer)
        model_state, state = copy.deepcopy((model_state, state))
        after = built(is_on_host=not first)
        optimizer = optim.AdamW(after.parameters(), lr=1e-2)
        dcp.set_state_dict(after, optimizer, model_state_dict=model_state, optim_state_dict=state)
        is_there = {isinstance(each, HostState) for each in optimizer.state.values()}
        assert is_there == {not first}
        for step in range(2, 5):
            net_loss(after, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(after, want)
        assert_same_states(optimizer, states)


@pytest.mark.parametrize("has_stepped", [False, True])
@on_ranks(2)
def test_our_checkpoints(rank: int, tmp_path: Path, has_stepped: bool) -> None:
    want = built(is_on_host=False)
    states = optim.AdamW(want.parameters(), lr=1e-2)
    train(want, net_loss, states, steps=2)
    autoshard.save_checkpoint(tmp_path, want, states, step=2)
    got = built()
    optimizer = optim.AdamW(got.parameters(), lr=1e-2)
    if has_stepped:
        train(got, net_loss, optimizer, steps=1)
    autoshard.load_checkpoint(tmp_path, got, optimizer)
    assert all(isinstance(each, HostState) for each in optimizer.state.values())
    assert_same_states(optimizer, states)
    train(got, net_loss, optimizer, steps=2)
    train(want, net_loss, states, steps=2)
    assert_same(got, want)


@on_ranks(2)
def test_no_more_than_three_buckets_are_on_the_device(rank: int) -> None:
    model = autoshard.shard(Net(), offload_policy=OptimizerOffloadPolicy(bucket_bytes=1))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    train(model, net_loss, optimizer, steps=1)
    there: list[Any] = []
    most = 0
    load, release = host_states.launch_load, host_states.Copies.release

    def loads(*args: Any) -> Any:
        nonlocal most
        found = load(*args)
        there.extend(found.results)
        most = max(most, len(there))
        return found

    def releases(copies: Any) -> Any:
        for source in copies.sources:
            there[:] = [each for each in there if each is not source]
        return release(copies)

    with (
        mock.patch.object(host_states, "launch_load", loads),
        mock.patch.object(host_states.Copies, "release", releases),
    ):
        net_loss(model, rank, 1).backward()
        optimizer.step()
    assert most == 3 * 2
    assert not there


@on_ranks(2, compiles=True)
def test_a_compiled_step(rank: int) -> None:
    """What torch.compile makes of it leaves these parameters to us."""
    want, _ = replicated(Net, net_loss)
    model = built()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for number in range(4):
        net_loss(model, rank, number).backward()
        step()
        optimizer.zero_grad()
    assert_same(model, want)


@in_both_forms
@pytest.mark.parametrize("is_on_host", [False, True])
@on_ranks(2)
def test_hooks_before_a_step(rank: int, form: str, is_on_host: bool) -> None:
    """They may change gradients, in place or for others, and groups: the step comes after them."""

    def changed(optimizer: optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        for number, param in enumerate(optimizer.param_groups[0]["params"]):
            assert param.grad is not None
            if number % 2:
                param.grad.mul_(0.5)
            else:
                param.grad = param.grad * 2

    want, _ = replicated(Net, net_loss, make=lambda model: hooked(model, changed))
    model = built(form, is_on_host=is_on_host)
    train(model, net_loss, hooked(model, changed))
    assert_same(model, want)


def hooked(model: Any, hook: Any) -> optim.Optimizer:
    """With `hook` before its steps; and once more, from the second step on."""
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(hook)

    @functools.cache
    def register(optimizer: optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(hook)

    optimizer.register_step_post_hook(lambda optimizer, *_: register(optimizer))
    return optimizer


@on_ranks(2)
def test_a_step_that_tools_wrap(rank: int) -> None:
    """Also where they wrap the class's."""
    want, _ = replicated(Net, net_loss)
    model = built()
    calls: list[int] = []
    step = optim.AdamW.step

    @functools.wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return step(*args, **kwargs)

    with mock.patch.object(optim.AdamW, "step", timed):
        train(model, net_loss, optim.AdamW(model.parameters(), lr=1e-2))
    assert_same(model, want)
    assert len(calls) == 4


@on_ranks(2)
def test_no_memory_on_the_host(rank: int) -> None:
    """States stay on the device, as they are; and go to the host once there is room."""
    made, on_host = [], host_states.on_host

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        made.append(on_host(*args, **kwargs).fill_(12345.0))
        if len(made) == 3:
            raise MemoryError("no room")
        return made[-1]

    want, _ = replicated(Net, net_loss, steps=2)
    model = built()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    net_loss(model, rank, 0).backward()
    with mock.patch.object(host_states, "on_host", failing), pytest.raises(MemoryError):
        optimizer.step()
    states = [optimizer.state[param] for param in model.parameters()]
    assert not any((each == 12345.0).any() for each in tensors(optimizer))
    assert sum(bool(state) for state in states) >= 2
    for param in model.parameters():
        if optimizer.state[param]:
            param.grad = None
    optimizer.step()
    optimizer.zero_grad()
    net_loss(model, rank, 1).backward()
    optimizer.step()
    assert_same(model, want)
    assert all(isinstance(each, HostState) for each in optimizer.state.values())


class Scalar(Net):
    """With a parameter of no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
@on_ranks(2)
def test_scalars_are_loaded(rank: int, kind: str) -> None:
    """torch's own look at some of a state as it is loaded."""
    made = []
    for policy in (None, POLICY):
        torch.manual_seed(0)
        model = autoshard.shard(Scalar(), strategy="no_shard", offload_policy=policy)
        optimizer = getattr(optim, kind)(model.parameters())
        train(model, net_loss, optimizer, steps=2)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = getattr(optim, kind)(model.parameters())
        for _ in range(2):
            optimizer.load_state_dict(saved)
            train(model, net_loss, optimizer, steps=1)
        made.append(model)
    assert_same(made[1], made[0])
