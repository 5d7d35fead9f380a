"""State dicts carry the model's own names whatever was sharded or compiled, and load back."""

import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, compiled, sharded, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

import autoshard

OPTIONS = {"lowering": "eager", "strict": True}


@pytest.mark.parametrize("called", [False, True])
@on_ranks(2)
def test_names(rank: int, called: bool) -> None:
    own = list(Net().state_dict())
    wrapped = torch.compile(Net(), backend="autoshard", options=OPTIONS)
    in_place = Net()
    in_place.compile(backend="autoshard", options=OPTIONS)
    for model in (wrapped, in_place, autoshard.shard(Net())):
        if called:
            net_loss(model, rank, 0).backward()
        assert list(model.state_dict()) == own
        assert list(get_model_state_dict(model)) == own
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Positional args are being deprecated")
            assert list(model.state_dict({}, "a.")) == [f"a.{name}" for name in own]


@on_ranks(2)
def test_values_are_true_global_dtensors(rank: int) -> None:
    model, _ = compiled(Net, net_loss)
    plain = Net().state_dict()
    for name, value in model.state_dict().items():
        assert isinstance(value, DTensor)
        assert value.shape == plain[name].shape
        assert value.full_tensor().shape == plain[name].shape
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert {name: value.shape for name, value in full.items()} == (
        {name: value.shape for name, value in plain.items()} if rank == 0 or full else {}
    )


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("eager", "compiled"), ("compiled", "eager"), ("eager", "uncalled"), ("compiled", "compiled")],
)
@on_ranks(2)
def test_save_and_load(rank: int, saved: str, loaded: str) -> None:
    source, _ = (sharded if saved == "eager" else compiled)(Net, net_loss)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    torch.manual_seed(1)
    if loaded == "eager":
        target: nn.Module = autoshard.shard(Net())
        target.load_state_dict(state)
    else:
        model = Net()
        wrapped = torch.compile(model, backend="autoshard", options=OPTIONS)
        if loaded == "compiled":
            net_loss(wrapped, rank, 0)
            wrapped.load_state_dict(state)
        else:  # not sharded yet: a plain state dict, under the model's own names
            wrapped.load_state_dict({name: value.full_tensor() for name, value in state.items()})
            net_loss(wrapped, rank, 0)
        target = model
    assert_same(target, source)
    for want, got in zip(source.parameters(), target.parameters(), strict=True):
        want.grad = got.grad = None
    for model_ in (source, target):
        train(model_, net_loss, adamw(model_), steps=2)
    assert_same(target, source)


@on_ranks(2)
def test_distributed_checkpoint(rank: int) -> None:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    model, _ = compiled(Net, net_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
        torch.manual_seed(1)
        other = autoshard.shard(Net())
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(other, state)
    assert_same(other, model)


@on_ranks(2)
def test_optimizer_built_before_keeps_its_state(rank: int) -> None:
    """Steps taken before the first call carry over: state is cut like its parameter."""

    def warm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    want = Net()
    optimizer = torch.optim.AdamW(want.parameters(), lr=1e-2, foreach=True)
    warm(want, optimizer)
    want_losses = train(want, net_loss, optimizer, replicated=True)

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    group = optimizer.param_groups[0]["params"]
    warm(model, optimizer)
    call = torch.compile(model, backend="autoshard", options=OPTIONS)
    losses = train(call, net_loss, optimizer)
    assert losses == want_losses
    assert_same(model, want)
    assert optimizer.param_groups[0]["params"] is group
    assert optimizer.param_groups[0]["foreach"] is True
    assert {id(param) for param in group} == {id(param) for param in model.parameters()}
    state = get_optimizer_state_dict(model, optimizer)
    assert all(isinstance(values["exp_avg"], DTensor) for values in state["state"].values())


@on_ranks(2)
def test_every_live_optimizer_is_rebound(rank: int) -> None:
    model = Net(tied=False)
    head = torch.optim.SGD([{"params": [model.head.weight], "lr": 0.5}])
    rest = torch.optim.SGD([p for n, p in model.named_parameters() if "head" not in n], lr=0.1)
    call = torch.compile(model, backend="autoshard", options=OPTIONS)
    before = None
    for step in range(2):
        net_loss(call, rank, step).backward()
        before = model.head.weight.to_local().clone()
        head.step()
        rest.step()
        assert not torch.equal(before, model.head.weight.to_local())
    assert head.param_groups[0]["params"][0] is model.head.weight
    assert head.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_assigned_parameters_are_used_at_once(rank: int, compile: bool) -> None:
    source, _ = sharded(Net, net_loss)
    torch.manual_seed(1)
    model = autoshard.shard(Net())
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    net_loss(model, rank, 0).backward()
    state = {name: value.detach().clone() for name, value in source.state_dict().items()}
    state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    ids_loss = net_loss(model, rank, 3)
    assert ids_loss.item() == net_loss(source, rank, 3).item()
    for param in source.parameters():
        param.grad = None
    net_loss(source, rank, 3).backward()
    ids_loss.backward()
    for want, got in zip(source.parameters(), model.parameters(), strict=True):
        assert torch.equal(want.grad.to_local(), got.grad.to_local())


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_meta_init_and_conversion(rank: int, compile: bool) -> None:
    """Built on meta, sharded, materialised, initialised; then converted to another dtype."""
    torch.manual_seed(0)
    plain = Net(tied=False)
    with torch.device("meta"):
        model = Net(tied=False)
    for layer in model.layers:
        autoshard.fully_shard(layer)
    autoshard.fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param, value in zip(model.parameters(), plain.parameters(), strict=True):
            half = -(-value.shape[0] // 2)
            param.to_local().copy_(value[rank * half :][: param.to_local().shape[0]])
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    losses = [net_loss(model, rank, 0).item()]
    model.double()
    losses.append(net_loss(model, rank, 0).item())
    assert losses == [net_loss(plain, rank, 0).item(), net_loss(plain.double(), rank, 0).item()]


@on_ranks(2)
def test_first_call_in_inference_mode(rank: int) -> None:
    """A validation before training: the shards are ordinary tensors."""
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    call = torch.compile(model, backend="autoshard", options=OPTIONS)
    with torch.inference_mode():
        net_loss(call, rank, 0)
    losses = train(call, net_loss, optimizer)
    want, want_losses = compiled(Net, net_loss)
    assert losses == want_losses
    assert_same(model, want)
