"""Checkpoints of the model and of Adam's state: saved in one form, loaded in any other, bitwise.

`test_state.py` has state dicts by themselves; here they are written and read by
torch.distributed.checkpoint, across numbers of ranks, and after what users do in between.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from support.models import SmallNet as Net
from support.models import net_loss, tokens
from support.ranks import on_ranks
from support.selection import each_value
from support.training import adamw, assert_same, count, issued, replicated, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard import fully_shard
from autoshard.passes.ir.layout import local_rows

OPTIONS = {"lowering": "eager", "strict": True}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Rows(nn.Module):
    """1, 2, 3, 5 and 11 rows: on 2 ranks some, on 4 most are uneven, and several shards empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 1)
        self.one = nn.Linear(1, 1)
        self.two = nn.Linear(1, 2)
        self.three = nn.Linear(2, 3)
        self.five = nn.Linear(3, 5)
        self.head = nn.Linear(5, 11)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.five(self.three(self.two(self.one(self.embed(ids)))))
        return self.head(x) * self.scale


BUILD: dict[str, Callable[[], nn.Module]] = {"Net": Net, "Rows": Rows}


def built(kind: str, build: Callable[[], nn.Module] = Net, *, seed: int = 0) -> tuple[Any, ...]:
    """(what to call, its AdamW): "plain", "FSDP2", "eager", "compiled" or "uncalled", which will
    be."""
    torch.manual_seed(seed)
    model = build()
    if kind == "FSDP2":
        torch.distributed.fsdp.fully_shard(model)
    if kind == "eager":
        autoshard.shard(model)
    if kind in ("compiled", "uncalled"):
        model = torch.compile(model, backend="autoshard", options=OPTIONS)
    optimizer = adamw(model)
    if kind == "compiled":
        net_loss(model, 0, 0)
    return model, optimizer


def trained(kind: str, build: Callable[[], nn.Module] = Net) -> tuple[Any, ...]:
    model, optimizer = built(kind, build)
    train(model, net_loss, optimizer, steps=2)
    return model, optimizer


def save(folder: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def load(folder: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
        )


def whole_state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of both, whole, under one flat key each, on every rank."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    flat = {f"model {name}": value for name, value in model_state.items()}
    for name, state in optimizer_state["state"].items():
        flat.update({f"{key} of {name}": value for key, value in state.items()})
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in flat.items()
    }


def assert_equal_states(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for key, value in want.items():
        assert torch.equal(got[key], value), key


def shared_folder(rank: int) -> str:
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder, src=0)
    return folder[0]


@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("kind", ["eager", "compiled"])
@on_ranks(2)
def test_sharded_state_dicts(rank: int, kind: str, build: str) -> None:
    """A51: values are DTensors of the true size, the state's cut as its parameter, alike named."""
    model, optimizer = trained(kind, BUILD[build])
    plain = BUILD[build]()
    own = plain.state_dict()
    state = get_model_state_dict(model)
    assert list(state) == list(own)
    params = dict(plain.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        assert value.shape == own[name].shape
        if name not in params:
            assert type(value) is Tensor
            continue
        assert isinstance(value, DTensor)
        assert value.placements == (Shard(0),)
        rows = local_rows(value.shape[0], 2, rank)
        assert value.to_local().shape == (rows, *value.shape[1:])
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(states) == set(dict(plain.named_parameters()))
    for name, values in states.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(values[key], DTensor)
            assert values[key].placements == state[name].placements
            assert values[key].shape == state[name].shape
            assert values[key].to_local().shape == state[name].to_local().shape
        assert values["step"].item() == 2.0


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("build", BUILD)
@on_ranks(2)
def test_full_state_dicts(rank: int, kind: str, build: str) -> None:
    """A51: whole on rank 0's CPU under the model's own names, the replicated model's values; and
    broadcast back into another model.
    """
    make = BUILD[build]
    want, _ = replicated(make, net_loss, steps=2)
    model, optimizer = trained(kind, make)
    full = get_model_state_dict(model, options=FULL)
    full_optimizer = get_optimizer_state_dict(model, optimizer, options=FULL)
    if rank == 0:
        assert list(full) == list(want.state_dict())
        for name, value in want.state_dict().items():
            assert type(full[name]) is Tensor
            assert full[name].device.type == "cpu"
            assert torch.equal(full[name], value)
        for name, param in want.named_parameters():
            assert full_optimizer["state"][name]["exp_avg"].shape == param.shape
    else:
        assert not full
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other, others_optimizer = built("eager", make, seed=1)
    set_model_state_dict(other, full, options=options)
    set_optimizer_state_dict(other, others_optimizer, full_optimizer, options=options)
    assert_equal_states(whole_state(other, others_optimizer), whole_state(model, optimizer))


@each_value(saved=["eager", "compiled"], loaded=["eager", "compiled", "uncalled"], build=BUILD)
@on_ranks(2)
def test_save_and_load(rank: int, saved: str, loaded: str, build: str) -> None:
    """A51, D-3: both forms read what either wrote, bit for bit, and train on alike."""
    folder = shared_folder(rank)
    source = trained(saved, BUILD[build])
    save(folder, *source)
    target = built(loaded, BUILD[build], seed=1)
    load(folder, *target)
    assert_equal_states(whole_state(*target), whole_state(*source))
    ahead = [train(model, net_loss, optimizer, steps=2) for model, optimizer in (source, target)]
    assert ahead[0] == ahead[1]
    assert_equal_states(whole_state(*target), whole_state(*source))


@each_value(kinds=[("FSDP2", "eager"), ("FSDP2", "compiled"), ("eager", "FSDP2")], build=BUILD)
@on_ranks(2)
def test_checkpoints_of_fsdp2(rank: int, kinds: tuple[str, str], build: str) -> None:
    """A checkpoint of the one is one of the other, bit for bit, and both train on alike."""
    folder = shared_folder(rank)
    source, target = trained(kinds[0], BUILD[build]), built(kinds[1], BUILD[build], seed=1)
    save(folder, *source)
    load(folder, *target)
    assert_equal_states(whole_state(*target), whole_state(*source))
    ahead = [train(model, net_loss, optimizer, steps=2) for model, optimizer in (source, target)]
    assert ahead[0] == ahead[1]
    assert_equal_states(whole_state(*target), whole_state(*source))


def save_here(rank: int, folder: str, build: str, kind: str) -> None:
    source = trained(kind, BUILD[build])
    save(folder, *source)
    state = whole_state(*source)
    if rank == 0:
        torch.save(state, Path(folder) / "whole.pt")


def load_here(rank: int, folder: str, build: str, kind: str) -> None:
    target = built(kind, BUILD[build], seed=1)
    load(folder, *target)
    assert_equal_states(whole_state(*target), torch.load(Path(folder) / "whole.pt"))
    train(*target[:1], net_loss, target[1], steps=1)


save_on = {world: on_ranks(world)(save_here) for world in (1, 2, 4)}
load_on = {world: on_ranks(world)(load_here) for world in (1, 2, 4)}


@each_value(
    case=[
        ("eager", 2, "plain", 1),
        ("compiled", 2, "eager", 1),
        ("eager", 2, "eager", 4),
        ("eager", 4, "compiled", 2),
        ("plain", 1, "eager", 2),
        ("eager", 1, "uncalled", 2),
    ],
    build=BUILD,
)
def test_another_number_of_ranks(
    tmp_path: Path, case: tuple[str, int, str, int], build: str
) -> None:
    """A51, D-3: rows move between ranks, no padding is ever saved."""
    saved, on, loaded, then_on = case
    folder = str(tmp_path / "checkpoint")
    save_on[on](folder=folder, build=build, kind=saved)
    load_on[then_on](folder=folder, build=build, kind=loaded)


def by_hand(model: Net, **arguments: object) -> Net:
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


@each_value(reshard=[None, True, False], compile=[False, True])
@on_ranks(2)
def test_shards_after_any_forward(rank: int, reshard: bool | None, compile: bool) -> None:
    """D-9, D-48: also while whole parameters wait for backward, and after one that had none."""
    model = by_hand(Net(), reshard_after_forward=reshard)
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}

    def check(*, keeps: bool = False) -> None:
        state = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state.values())
        assert all(isinstance(param, DTensor) for param in model.parameters()) is not keeps
        assert isinstance(model.head.weight, DTensor)
        assert_equal_states({n: v.full_tensor() for n, v in state.items()}, before)

    loss = net_loss(model, rank, 0)
    check(keeps=not compile and reshard is False)
    loss.backward()
    check()
    with torch.no_grad():
        net_loss(model, rank, 0)
    check()
    model.eval()
    with torch.inference_mode():
        net_loss(model, rank, 0)
    check()


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_eval_load_eval(rank: int, compile: bool) -> None:
    """D-48: nothing is kept from the first evaluation that the second would compute with."""
    torch.manual_seed(1)
    plain = Net().eval()
    model = by_hand(Net(), reshard_after_forward=False).eval()
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    options = StateDictOptions(full_state_dict=True)
    for context in (torch.no_grad, torch.inference_mode):
        for scale in (1.0, 0.5):
            with torch.no_grad():
                for param in plain.parameters():
                    param.mul_(scale)
            with context():
                model(tokens(rank, 0))
            set_model_state_dict(model, plain.state_dict(), options=options)
            with context():
                assert torch.equal(model(tokens(rank, 0)), plain(tokens(rank, 0)))


@on_ranks(2)
def test_cached_state_dict(rank: int) -> None:
    """D-8: it aliases the shards, so it follows steps and loads, until a conversion makes anew."""
    model, optimizer = built("eager")
    cached = model.state_dict()
    train(model, net_loss, optimizer, steps=2)
    for name, param in model.named_parameters():
        assert cached[name].to_local().data_ptr() == param.to_local().data_ptr()
        assert torch.equal(cached[name].to_local(), param.to_local())
    other, others_optimizer = trained("eager")
    train(other, net_loss, others_optimizer, steps=1)
    model.load_state_dict(other.state_dict())
    for name, value in other.state_dict().items():
        assert torch.equal(cached[name].to_local(), value.to_local())
    model.double()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    for name, value in other.state_dict().items():
        assert cached[name].dtype == torch.float32
        assert torch.equal(cached[name].to_local(), value.to_local())
    model.load_state_dict(cached)
    assert_same(model, other.double())


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(2)
def test_conversion_in_mid_training(rank: int, dtype: torch.dtype, compile: bool) -> None:
    """D-7: the next forward computes in the new dtype, and gradients and steps have it."""
    torch.manual_seed(0)
    want = Net()
    torch.manual_seed(0)
    got = by_hand(Net())
    if compile:
        got.compile(backend="autoshard", options=OPTIONS)
    losses: dict[nn.Module, list[float]] = {want: [], got: []}
    for model in (want, got):
        for _ in range(2):  # float32 at first, and after the conversion
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses[model] += train(model, net_loss, optimizer, steps=2, replicated=model is want)
            model.to(dtype)
        losses[model] += train(model, net_loss, optimizer, steps=1, replicated=model is want)
    assert {param.dtype for param in got.parameters()} == {dtype}
    assert {value.dtype for value in got.state_dict().values()} == {dtype}
    # SGD rounds bfloat16 otherwise in the last few elements of a tensor, which differ in a shard.
    rounding = 0.02 if dtype == torch.bfloat16 else 0.0
    assert losses[got] == pytest.approx(losses[want], rel=rounding, abs=0.0)
    assert_same(got, want, rtol=rounding)


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_converted_model_is_planned_as_before(rank: int, compile: bool) -> None:
    """D-7: as few collectives in the new dtype, of that dtype."""
    model = by_hand(Net())
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    before = issued(lambda: net_loss(model, rank, 0).backward())
    model.zero_grad()
    model.double()
    after = issued(lambda: net_loss(model, rank, 0).backward())
    assert count(after) == count(before)
    assert {member.dtype for entry in after for member in entry.members} == {torch.float64}


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_assigned_state_of_another_dtype(rank: int, compile: bool) -> None:
    """D-7: load_state_dict(assign=True) takes the state's dtype, and what is built on it trains."""
    source, _ = trained("eager")
    source.double()
    model = by_hand(Net())
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    net_loss(model, rank, 0).backward()
    state = {name: value.detach().clone() for name, value in source.state_dict().items()}
    state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    losses = [train(each, net_loss, adamw(each), steps=2) for each in (source, model)]
    assert losses[0] == losses[1]
    assert_same(model, source)
    assert {param.dtype for param in model.parameters()} == {torch.float64}


@on_ranks(2)
def test_assigned_plain_tensors_are_an_error(rank: int) -> None:
    """D-7: a whole state put in place of the shards would train unsharded."""
    model = by_hand(Net())
    optimizer = adamw(model)
    train(model, net_loss, optimizer, steps=1)
    before = list(model.parameters())
    with pytest.raises(RuntimeError, match=r"parameter layers.0.up.weight is sharded, and what"):
        model.load_state_dict(Net().state_dict(), assign=True)
    assert all(was is now for was, now in zip(before, model.parameters(), strict=True))
    train(model, net_loss, optimizer, steps=1)


@on_ranks(2)
def test_an_optimizer_of_what_was_replaced(rank: int) -> None:
    """D-7: it would train nothing, and says so, before the next forward and after."""
    model = by_hand(Net())
    optimizer = adamw(model)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"holds parameter embed.weight, but another one"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"holds parameter \S+ from before .*assign=True"):
        train(model, net_loss, optimizer, steps=1)
    model.zero_grad()
    train(model, net_loss, adamw(model), steps=1)
    optimizer = adamw(model)
    with model.full_params(), pytest.raises(RuntimeError, match=r"step outside of full_params"):
        optimizer.step()
