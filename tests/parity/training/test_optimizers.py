"""torch's optimizers and its gradient scaler train sharded parameters as they do whole ones."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.models import SmallNet as Net
from support.models import net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import assert_same, average_gradients, replicated, train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard

OPTIONS = {"lowering": "eager", "strict": True}

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "foreach AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True),
    "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "fused Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "foreach SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "fused SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, fused=True),
    "foreach Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, foreach=True),
}
# The fused kernels' vector part and its remainder round differently, and a shard has its
# remainder elsewhere than the whole parameter.
FUSED_ROUNDING = 1e-5


def built(
    kind: str, build: Callable[[], nn.Module] = Net
) -> tuple[nn.Module, Callable[..., Tensor]]:
    """(the model, what to call), "replicated", "eager" or "compiled"."""
    torch.manual_seed(0)
    model = build()
    if kind == "eager":
        autoshard.shard(model)
    if kind == "compiled":
        return model, torch.compile(model, backend="autoshard", options=OPTIONS)
    return model, model


@each_value(name=OPTIMIZERS, kind=["eager", "compiled"])
@on_ranks(2)
def test_foreach_and_fused(rank: int, kind: str, name: str) -> None:
    """D-42: many tensors in one kernel, empty shards among them."""
    want, want_losses = replicated(Net, net_loss, make=OPTIMIZERS[name])
    model, call = built(kind)
    losses = train(call, net_loss, OPTIMIZERS[name](model))
    rounding = FUSED_ROUNDING if name.startswith("fused") else 0.0
    assert losses == pytest.approx(want_losses, rel=rounding, abs=0.0)
    assert_same(model, want, rtol=rounding)


class Even(nn.Module):
    """Rows that two ranks share evenly: LBFGS flattens DTensors, which torch can't of others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        return second(torch.tanh(first(x)))


def even_loss(model: Callable[..., Tensor], rank: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(rank))
    return (model(x) - x[:, :4].square()).square().mean()


class Picks(nn.Module):
    """Uses both layers or one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 3), nn.Linear(6, 3)
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        return self.always(x) + self.sometimes(x) if self.both else self.always(x)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@on_ranks(2)
def test_none_is_not_zero(rank: int, kind: str) -> None:
    """D-42: Adam passes over a gradient of None; at zero it counts the step and decays.

    Two optimizers share the unused layer's parameters between them: one clears to None.
    """
    models = {each: built(each, Picks) for each in ("replicated", kind)}
    steps = {}
    for each, (model, call) in models.items():
        x = torch.full((2, 6), float(rank + 1))
        to_none = to_zero = None
        for step in range(4):
            model.both = step == 0
            call(x).square().sum().backward()
            if each == "replicated":
                average_gradients(model)
            if to_none is None:  # built after the first call: the parameters are picked by hand
                layers = [layer._parameters for layer in (model.always, model.sometimes)]
                weights, biases = ([layer[name] for layer in layers] for name in layers[0])
                to_none = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.5)
                to_zero = torch.optim.AdamW(biases, lr=1e-2, weight_decay=0.5)
            for optimizer in (to_none, to_zero):
                optimizer.step()
            to_none.zero_grad(set_to_none=True)
            to_zero.zero_grad(set_to_none=False)
        assert model.sometimes._parameters["weight"].grad is None
        assert model.sometimes._parameters["bias"].grad is not None
        steps[each] = [
            state["step"].item()
            for optimizer in (to_none, to_zero)
            for state in optimizer.state.values()
        ]
    assert steps[kind] == steps["replicated"] == [4.0, 1.0, 4.0, 4.0]
    assert_same(models[kind][0], models["replicated"][0])


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@pytest.mark.parametrize("clip", [False, True])
@on_ranks(2)
def test_scaler_skips_on_all_ranks(rank: int, kind: str, clip: bool) -> None:
    """D-41: an inf in one rank's shard only: no rank steps, all scales halve, then all go on."""
    model, call = built(kind)
    net_loss(call, rank, 0).backward()  # sharded from here on
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scales = []
    for step in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        scaler.scale(net_loss(call, rank, step)).backward()
        if step == 1 and rank == 1:
            model.layers[0].up.weight.grad.to_local()[0, 0] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            stayed = torch.equal(param.to_local(), before[name].to_local())
            assert stayed == (step == 1) or not param.to_local().numel(), (step, name)
        scales.append(scaler.get_scale())
    everybodys = [None, None]
    dist.all_gather_object(everybodys, scales)
    assert everybodys == [[1024.0, 512.0, 512.0]] * 2


@on_ranks(2)
def test_scaler_equals_replicated(rank: int) -> None:
    """D-41: a scale that is a power of two changes no bit."""
    models = {}
    for kind in ("replicated", "eager"):
        model, _ = models[kind] = built(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for step in range(4):
            scaler.scale(net_loss(model, rank, step)).backward()
            if kind == "replicated":
                average_gradients(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 4096.0
    assert all(isinstance(param, DTensor) for param in models["eager"][0].parameters())
    assert_same(models["eager"][0], models["replicated"][0])


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@on_ranks(2)
def test_lbfgs_shards_in_its_first_closure(rank: int, kind: str) -> None:
    """LBFGS holds a state while the closure runs the first forward, which shards: its history of
    directions is kept. Sums over shards are taken in another order than over whole parameters."""
    trained, history = {}, {}
    for each in ("replicated", kind):
        model, call = built(each, Even)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

        def closure(
            model: nn.Module = model,
            call: Callable[..., Tensor] = call,
            optimizer: torch.optim.Optimizer = optimizer,
            is_replicated: bool = each == "replicated",
        ) -> Tensor:
            optimizer.zero_grad()
            loss = even_loss(call, rank)
            loss.backward()
            if is_replicated:
                average_gradients(model)
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # LBFGS stops by it: on all ranks, or on none
            return mean / 2

        for _ in range(3):
            optimizer.step(closure)
        (state,) = [each for each in optimizer.state.values() if each]
        trained[each] = model
        history[each] = state["n_iter"], len(state["old_dirs"])
    assert history[kind] == history["replicated"]
    assert history[kind][1] > 1
    assert_same(trained[kind], trained["replicated"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["eager", "compiled"])
@on_ranks(2)
def test_closures_that_run_the_last_microbatch(rank: int, kind: str) -> None:
    """Gradients of the one before wait when the step begins, and not after the closure."""
    trained = {}
    for each in ("replicated", kind):
        model, call = built(each)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(0, 6, 2):
            with model.no_sync() if each != "replicated" else contextlib.nullcontext():
                net_loss(call, rank, step).backward()

            def closure(call: Callable[..., Tensor] = call, step: int = step) -> Tensor:
                loss = net_loss(call, rank, step + 1)
                loss.backward()
                return loss

            if each == "replicated":
                closure()
                average_gradients(model)
                optimizer.step()
            else:
                optimizer.step(closure)
            optimizer.zero_grad()
        trained[each] = model
    assert_same(trained[kind], trained["replicated"])

    def waiting() -> Tensor:
        """Closure that reduces nothing."""
        with trained[kind].no_sync():
            loss = net_loss(trained[kind], rank, 0)
            loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="still waiting to be reduced"):
        torch.optim.SGD(trained[kind].parameters(), lr=0.1).step(closure=waiting)
