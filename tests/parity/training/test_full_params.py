"""`full_params()`: whole plain parameters inside, their writes kept, shards again after."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet, net_loss, tokens
from support.ranks import on_ranks
from support.training import adamw, assert_same, average_gradients, issued, sharded, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import fully_shard

OPTIONS = {"lowering": "eager", "strict": True}


def by_hand(model: SmallNet, **arguments: object) -> SmallNet:
    for layer in model.layers:
        fully_shard(layer, **arguments)
    return fully_shard(model, **arguments)


def assert_sharded(model: nn.Module) -> None:
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_reads(rank: int, compile: bool) -> None:
    """D-5, D-6: by attribute, by iteration, in the state dict; ties stay ties."""
    torch.manual_seed(0)
    model = SmallNet()
    call: nn.Module = model
    if compile:
        call = torch.compile(model, backend="autoshard", options=OPTIONS)
        net_loss(call, rank, 0)
    else:
        by_hand(model)
    torch.manual_seed(0)
    plain = SmallNet()
    before = list(model.parameters())
    with call.full_params():
        assert type(model.head.weight) is nn.Parameter
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.layers[1].up.weight, plain.layers[1].up.weight)
        inside = dict(model.named_parameters())
        assert list(inside) == list(dict(plain.named_parameters()))
        for name, want in plain.named_parameters():
            assert type(inside[name]) is nn.Parameter
            assert torch.equal(inside[name], want)
            assert inside[name].requires_grad
        state = call.state_dict()
        assert list(state) == list(plain.state_dict())
        for name, want in plain.state_dict().items():
            assert torch.equal(state[name], want)
    assert_sharded(model)
    assert all(was is now for was, now in zip(before, model.parameters(), strict=True))
    for name, want in plain.state_dict().items():  # what was saved inside outlives it
        assert torch.equal(state[name], want)


def in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(-1.5)


def by_data(param: nn.Parameter) -> None:
    param.data.mul_(-1.5)


def new_data(param: nn.Parameter) -> None:
    param.data = param.data * -1.5


@pytest.mark.parametrize("write", [in_place, by_data, new_data], ids=lambda each: each.__name__)
@pytest.mark.parametrize("mesh", [False, True])
@on_ranks(2)
def test_writes_are_kept(rank: int, write: Callable[[nn.Parameter], None], mesh: bool) -> None:
    """D-5: each rank keeps its rows, uneven and empty ones, and training goes on from there."""
    torch.manual_seed(0)
    want = SmallNet()
    torch.manual_seed(0)
    axes = {"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("data",))} if mesh else {}
    got = by_hand(SmallNet(), **axes)
    for model in (want, got):
        optimizer = adamw(model)
        train(model, net_loss, optimizer, steps=1, replicated=model is want)
        if model is got:
            with model.full_params():
                for param in model.parameters():
                    write(param)
        else:
            for param in model.parameters():
                write(param)
        train(model, net_loss, optimizer, steps=2, replicated=model is want)
    assert_same(got, want)
    assert_sharded(got)


@on_ranks(2)
def test_other_ways_to_write(rank: int) -> None:
    """D-5: load_state_dict, a parameter set anew, ties with it, requires_grad; and without."""
    torch.manual_seed(1)
    want = SmallNet()
    model = by_hand(SmallNet())
    with model.full_params():
        model.load_state_dict(want.state_dict())
    assert_same(model, want)
    with model.full_params():
        model.head.weight = nn.Parameter(torch.ones(11, 6))
        model.layers[0].requires_grad_(False)
    with torch.no_grad():
        want.head.weight.fill_(1.0)
    assert model.head.weight is model.embed.weight
    assert_same(model, want)
    assert [param.requires_grad for param in model.layers[0].parameters()] == [False] * 6
    assert model.layers[1].up.weight.requires_grad
    with model.full_params(writeback=False):
        for param in model.parameters():
            in_place(param)
    assert_same(model, want)
    assert_sharded(model)


@on_ranks(2)
def test_an_exception_inside(rank: int) -> None:
    """It goes on, on one rank only too; the parameters are sharded again, writes kept."""
    model, _ = sharded(SmallNet, net_loss, steps=0)
    bias = model.layers[0].up.bias
    raised = False
    try:
        with model.full_params():
            model.layers[0].up.bias.data.fill_(2.0)
            if rank == 1:
                raise KeyError("mine")
    except KeyError:
        raised = True
    assert raised == (rank == 1)
    assert_sharded(model)
    assert model.layers[0].up.bias is bias
    assert torch.equal(bias.to_local(), torch.full_like(bias.to_local(), 2.0))
    net_loss(model, rank, 0).backward()


@on_ranks(2)
def test_part_of_a_model(rank: int) -> None:
    """What is above and beside it stays sharded, except for what is tied to it."""
    model = by_hand(SmallNet())
    with model.layers[1].full_params():
        inside = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
        assert inside == {f"layers.1.{name}" for name, _ in model.layers[1].named_parameters()}
        by_data(model.layers[1].down.weight)
        with torch.no_grad():  # the rest gathers as ever
            quiet = model(tokens(rank, 0))
    assert_sharded(model)
    with torch.no_grad():
        assert torch.equal(model(tokens(rank, 0)), quiet)

    tied = SmallNet()
    fully_shard(tied.head)
    fully_shard(tied)
    with tied.head.full_params():
        assert type(tied.embed.weight) is nn.Parameter
        assert tied.embed.weight is tied.head.weight
        assert isinstance(tied.layers[0].up.weight, DTensor)
    assert_sharded(tied)


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_forward_inside(rank: int, compile: bool) -> None:
    """Without gradients it runs, on one rank too; with them it is an error; then all goes on."""
    torch.manual_seed(0)
    plain = SmallNet()
    torch.manual_seed(0)
    model = by_hand(SmallNet())
    if compile:
        model.compile(backend="autoshard", options=OPTIONS)
    train(model, net_loss, adamw(model), steps=2)
    train(plain, net_loss, adamw(plain), steps=2, replicated=True)
    with model.full_params():
        assert not issued(lambda: model.eval())
        if rank == 0:
            with torch.no_grad():
                assert torch.equal(model(tokens(0, 9)), plain(tokens(0, 9)))
            with torch.inference_mode():
                assert torch.equal(model(tokens(0, 9)), plain(tokens(0, 9)))
        with pytest.raises(RuntimeError, match=r"forward of SmallNet \(unit 'root'\).*no_grad"):
            model(tokens(rank, 0))
        with pytest.raises(RuntimeError, match=r"forward of Block \(unit 'layers.0'\).*no_grad"):
            model.layers[0](torch.ones(2, 6))
        model.train()
    for each in (model, plain):
        train(each, net_loss, adamw(each), steps=2, replicated=each is plain)
    assert_same(model, plain)


class Peeks(SmallNet):
    def forward(self, ids: Tensor) -> Tensor:
        with self.full_params():
            return super().forward(ids)


@on_ranks(2)
def test_errors(rank: int) -> None:
    """Nested, in forward and backward, on meta, with gradients made or a parameter gone inside."""
    model = by_hand(SmallNet())
    for inner in (model, model.layers[0]):
        with (
            model.full_params(),
            pytest.raises(RuntimeError, match=r"inside full_params\(\)"),
            inner.full_params(),
        ):
            pass
    with (
        model.layers[0].full_params(),
        pytest.raises(
            RuntimeError, match=r"rank \d inside full_params\(\).*Block \(unit 'layers.0'"
        ),
        model.full_params(),
    ):
        pass
    with model.layers[0].full_params(), model.layers[1].full_params():
        assert type(model.layers[1].up.weight) is nn.Parameter

    peeks = by_hand(Peeks())
    with pytest.raises(RuntimeError, match="inside a forward or backward"):
        peeks(tokens(rank, 0))

    def enter(grad: Tensor) -> None:
        with model.full_params():
            pass

    out = model(tokens(rank, 0))
    out.register_hook(enter)
    with pytest.raises(RuntimeError, match="inside a forward or backward"):
        out.sum().backward()

    with torch.device("meta"):
        empty = by_hand(SmallNet())
    with pytest.raises(RuntimeError, match=r"embed.weight.*meta device"), empty.full_params():
        pass

    up = model.layers[0].up
    misdeeds: dict[str, Callable[[], object]] = {
        r"up.weight'\] got gradients": lambda: up.weight.square().sum().backward(),
        r"up.bias'\] were removed, converted": lambda: delattr(up, "bias"),
        r"up.bias'\] were .* another size": lambda: setattr(
            up, "bias", nn.Parameter(torch.ones(3))
        ),
        r"up.weight.* were .* another size or dtype": model.double,
    }
    for message, misdeed in misdeeds.items():
        with pytest.raises(Exception, match=message) as caught, model.full_params():
            misdeed()
        assert type(caught.value) is (RuntimeError if "gradients" in message else ValueError)
    assert_sharded(model)
    assert {param.dtype for param in model.parameters()} == {torch.float32}

    with model.full_params():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    net_loss(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"or inside full_params\(\)"):
        optimizer.step()


@on_ranks(2)
def test_between_forward_and_backward(rank: int) -> None:
    """Reading leaves backward as it is; writing is an error then, as without full_params."""
    torch.manual_seed(0)
    want = SmallNet()
    torch.manual_seed(0)
    model = by_hand(SmallNet())
    net_loss(want, rank, 0).backward()
    average_gradients(want)
    loss = net_loss(model, rank, 0)
    with model.full_params():
        assert model.embed.weight.shape == (11, 6)
    loss.backward()
    for theirs, ours in zip(want.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad.full_tensor(), theirs.grad)
    loss = net_loss(model, rank, 1)
    with model.full_params():
        in_place(model.layers[0].down.weight)
    with pytest.raises(RuntimeError, match=r"layers\.0\.down\.weight was modified in place"):
        loss.backward()


@on_ranks(2)
def test_one_rank_elsewhere(rank: int) -> None:
    """A rank that runs a forward instead is found out, before anything hangs."""
    group = dist.new_group([0, 1])  # of which nothing is known from before
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
    model = by_hand(SmallNet(), mesh=mesh)
    elsewhere = model.full_params() if rank == 0 else contextlib.nullcontext()
    with pytest.raises(RuntimeError, match=r"came to .* but rank . to ") as caught, elsewhere:
        net_loss(model, rank, 0)
    assert "full_params() of root" in str(caught.value)
    assert "an eager forward of root" in str(caught.value)
    assert ("must do it together" in str(caught.value)) == (rank == 0)
    assert_sharded(model)


@on_ranks(2)
def test_recurrent(rank: int) -> None:
    """A module that keeps a list of its own of its parameters."""
    torch.manual_seed(0)
    plain = nn.LSTM(3, 5)
    torch.manual_seed(0)
    model = autoshard.shard(nn.LSTM(3, 5))
    x = torch.ones(2, 1, 3)
    with model.full_params(), torch.no_grad():
        assert torch.equal(model(x)[0], plain(x)[0])
    assert torch.equal(model(x)[0], plain(x)[0])
