"""torch's optimizers step shards as plain tensors, and all that is seen of them stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import FORMS, assert_same, average_gradients, in_form, replicated, train
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import autoshard
from autoshard import _torch
from autoshard.runtime.training.local_step import BY_ELEMENT, stand_in_of

ARGUMENTS: dict[type, list[dict[str, Any]]] = {
    optim.Adam: [{"amsgrad": True}],
    optim.AdamW: [{}, {"lr": torch.tensor(0.01)}],
    optim.SGD: [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    optim.RMSprop: [{"momentum": 0.9, "centered": True}],
    optim.RAdam: [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
CASES = [
    (kind.__name__, number)
    for kind in sorted(BY_ELEMENT, key=lambda kind: kind.__name__)
    for number in range(len(ARGUMENTS.get(kind, [{}])))
]


def make(case: tuple[str, int], model: nn.Module) -> optim.Optimizer:
    kind = getattr(optim, case[0])
    found: optim.Optimizer = kind(model.parameters(), **ARGUMENTS.get(kind, [{}])[case[1]])
    return found


def built(form: str = "eager") -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return in_form(autoshard.shard(Net()), form)


def assert_state_is_sharded(optimizer: optim.Optimizer) -> None:
    """Its keys are the parameters, and what is shaped like one is a DTensor laid out like it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(isinstance(param, DTensor) for param in params)
    assert {id(param) for param in optimizer.state} <= {id(param) for param in params}
    for param, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                assert isinstance(value, DTensor)
                assert value.placements == param.placements
                assert value.shape == param.shape


class DTensorOps(_torch.tensors.TorchDispatchMode):
    """How many ops have a DTensor among their arguments."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        self.count += any(isinstance(each, DTensor) for each in given) and "detach" not in str(func)
        return func(*args, **(kwargs or {}))


@each_value(case=CASES, form=FORMS)
@on_ranks(2)
def test_as_the_replicated_model(rank: int, case: tuple[str, int], form: str) -> None:
    """Bit for bit; in the middle the state is saved and loaded."""
    want, want_losses = replicated(Net, net_loss, make=lambda model: make(case, model))
    model = built(form)
    optimizer = make(case, model)
    losses = train(model, net_loss, optimizer, steps=2)
    assert_state_is_sharded(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = make(case, model)
    optimizer.load_state_dict(state)
    for step in range(2, 4):
        loss = net_loss(model, rank, step)
        loss.backward()
        with DTensorOps() as seen:
            optimizer.step()
        assert seen.count == 0
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_state_is_sharded(optimizer)
    assert losses == want_losses
    assert_same(model, want)


class Derived(optim.AdamW):
    """Could do anything in its step."""


@on_ranks(2)
def test_what_is_derived_steps_dtensors(rank: int) -> None:
    models = []
    for kind in (optim.AdamW, Derived):
        model = built()
        optimizer = kind(model.parameters(), lr=1e-2)
        train(model, net_loss, optimizer, steps=2)
        assert (stand_in_of(optimizer) is None) == (kind is Derived)
        assert_state_is_sharded(optimizer)
        models.append(model)
    assert_same(models[1], models[0])


@on_ranks(2)
def test_a_closure(rank: int) -> None:
    """It makes gradients in the middle of the step: those are what counts."""
    models = {}
    for each in ("replicated", "eager"):
        torch.manual_seed(0)
        model = models[each] = Net() if each == "replicated" else built()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.step(_closure(model, optimizer, rank, step, each == "replicated"))
    assert_same(models["eager"], models["replicated"])


def _closure(
    model: Any, optimizer: optim.Optimizer, rank: int, step: int, averages: bool
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = net_loss(model, rank, step)
        loss.backward()
        if averages:
            average_gradients(model)
        return loss.item()

    return closure


@on_ranks(2)
def test_an_error_in_the_middle(rank: int) -> None:
    """Nothing of the stand-in is left in the optimizer, and the next step is one like any other."""
    model = built()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    net_loss(model, rank, 0).backward()
    with (
        mock.patch("torch.optim.adam._single_tensor_adam", side_effect=MemoryError("out of it")),
        pytest.raises(MemoryError),
    ):
        optimizer.step()
    assert_state_is_sharded(optimizer)
    shards = [param.to_local() for param in model.parameters()]
    assert all(shard.grad is None for shard in shards)
    optimizer.step()
    assert_state_is_sharded(optimizer)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_what_is_not_sharded_is_stepped_too(rank: int) -> None:
    """In the same group, as it is."""
    model = built()
    scale = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([*model.parameters(), scale], lr=1e-2)
    (net_loss(model, 0, 0) * scale.sum()).backward()
    with pytest.warns(RuntimeWarning, match="that is not sharded"):
        optimizer.step()
    assert not torch.equal(scale, torch.ones(3))
    assert optimizer.state[scale]["exp_avg"].shape == (3,)
    assert optimizer.state[scale]["step"].item() == 1
