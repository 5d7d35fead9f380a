"""Bad input: an error on every rank that names what is wrong and what to do, and no hang."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, assert_same, replicated, train
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import fully_shard
from autoshard.runtime.sharding.adopt import modules_named_by


def unknown_option() -> None:
    call = torch.compile(Net(), backend="autoshard", options={"bucketting": "auto"})
    net_loss(call, 0, 0)


def wrong_value() -> None:
    call = torch.compile(Net(), backend="autoshard", options={"lowering": 3})
    net_loss(call, 0, 0)


def non_contiguous_parameter() -> None:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.randn(3, 4).t())
    fully_shard(model)


def mesh_of_three_axes() -> None:
    fully_shard(Net(), mesh=init_device_mesh("cpu", (2, 1, 1), mesh_dim_names=("a", "b", "c")))


def two_devices() -> None:
    model = Net()
    model.layers[1] = type(model.layers[1])().to("meta")
    fully_shard(model)


def meta_at_first_forward() -> None:
    with torch.device("meta"):
        model = Net()
    fully_shard(model)
    net_loss(model, 0, 0)


def container() -> None:
    fully_shard(Net().layers)


def the_root_first() -> None:
    model = Net()
    fully_shard(model)
    fully_shard(model.layers[1])


def sharded_twice() -> None:
    model = Net()
    fully_shard(model.layers[1])
    fully_shard(model)
    fully_shard(model.layers[1])


def no_module() -> None:
    fully_shard(torch.ones(3))


def wrong_reshard() -> None:
    fully_shard(Net(), reshard_after_forward="yes")


def unknown_strategy() -> None:
    autoshard.shard(Net(), strategy="zero3")


class HomeMade:
    """An optimizer that torch knows nothing of."""

    def __init__(self, params: object) -> None:
        self.params = list(params)

    def step(self) -> None: ...


def foreign_optimizer() -> None:
    model = Net()
    optimizer = HomeMade(model.parameters())
    net_loss(torch.compile(model, backend="autoshard"), 0, 0)
    optimizer.step()


def optimizer_from_before_fully_shard() -> None:
    model = Net()
    optimizer = adamw(model)
    fully_shard(model)
    net_loss(model, 0, 0).backward()
    optimizer.step()


def gradient_hook_from_before() -> None:
    model = Net()
    model.head.weight.register_hook(lambda grad: grad)
    net_loss(torch.compile(model, backend="autoshard"), 0, 0)


def replaced_parameter() -> None:
    model = fully_shard(Net(tied=False))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone()[:4])
    net_loss(model, 0, 0)


class WithMethod(Net):
    def compute_loss(self, ids: Tensor) -> Tensor:
        return self(ids).sum()


def never_called() -> None:
    """A method of the wrapper runs on the module itself, which nothing has sharded."""
    model = WithMethod()
    optimizer = adamw(model)
    call = torch.compile(model, backend="autoshard")
    call.compute_loss(torch.tensor([1, 2])).backward()
    optimizer.step()


def list_from_before() -> None:
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    call = torch.compile(model, backend="autoshard", options={"lowering": "eager"})
    net_loss(call, 0, 0).backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


def zeroed_from_before() -> None:
    model = Net()
    params = list(model.parameters())
    model.compile(backend="autoshard", options={"lowering": "eager"})
    net_loss(model, 0, 0).backward()
    for param in params:
        param.grad = None


class Clamping(Net):
    """Writes to a parameter in forward."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.layers[1].up.weight.clamp_(-0.1, 0.1)
        return super().forward(ids)


def write_in_forward() -> None:
    net_loss(autoshard.shard(Clamping()), 0, 0)


def write_to_a_copy_of_one_rank() -> None:
    """No rank gathers, and what is computed with is cast."""
    policy = autoshard.MixedPrecisionPolicy(torch.bfloat16)
    net_loss(autoshard.shard(Clamping(), strategy="no_shard", mp_policy=policy), 0, 0)


def write_in_compiled_forward() -> None:
    options = {"lowering": "eager", "strict": True}
    net_loss(torch.compile(Clamping(), backend="autoshard", options=options), 0, 0)


def sparse_gradient() -> None:
    autoshard.shard(nn.Embedding(9, 4, sparse=True))


def embedding_that_renormalises() -> None:
    autoshard.shard(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)))


def bag_with_sparse_gradient() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True))
    torch.compile(model, backend="autoshard")(torch.ones(1, 2, dtype=torch.int64))


def gradient_from_before() -> None:
    model = Net()
    net_loss(model, 0, 0).backward()
    net_loss(torch.compile(model, backend="autoshard"), 0, 0)


def added_later() -> None:
    model = autoshard.shard(Net())
    model.extra = nn.Linear(11, 2)
    optimizer = torch.optim.SGD(model.extra.parameters(), lr=0.1)
    model.extra(model(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()


def bucketing_of_no_module() -> None:
    options = {"bucketing": [["layers.0", "layer.1"]]}
    net_loss(torch.compile(Net(), backend="autoshard", options=options), 0, 0)


def function_without_the_model() -> None:
    """Dynamo captures some of the function, and nothing of the model."""
    model = Net()
    optimizer = adamw(model)
    run = torch.compiler.disable(lambda ids: model(ids))

    @torch.compile(backend="autoshard", options={"lowering": "eager"})
    def step(ids: Tensor) -> Tensor:
        return run(ids + 0) * len(model.layers)

    with pytest.warns(RuntimeWarning, match="captured no model"):
        step(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


BAD_INPUTS: list[tuple[Callable[[], None], list[str]]] = [
    (unknown_option, ["bucketting", "valid options", "bucketing"]),
    (wrong_value, ["lowering", "3", "inductor"]),
    (non_contiguous_parameter, ["weight", "contiguous()"]),
    (mesh_of_three_axes, ["3D", "1D", "mesh["]),
    (two_devices, ["layers.1.norm.weight", "meta", "cpu", ".to(device)"]),
    (meta_at_first_forward, ["embed.weight", "layers.0.up.weight", "to_empty"]),
    (container, ["ModuleList", "forward", "0, 1, 2"]),
    (sharded_twice, ["layers.1", "sharded already", "once"]),
    (the_root_first, ["in the unit of Net around it", "modules inside first"]),
    (no_module, ["nn.Module", "Tensor"]),
    (wrong_reshard, ["reshard_after_forward", "'yes'", "True, False, None or"]),
    (unknown_strategy, ["zero3", "full_shard"]),
    (foreign_optimizer, ["HomeMade", "layers.", "autoshard.shard(model)"]),
    (optimizer_from_before_fully_shard, ["AdamW", "embed.weight", "after sharding"]),
    (gradient_hook_from_before, ["embed.weight", "hooks", "autoshard.shard(model)"]),
    (list_from_before, ["embed.weight", "model.parameters()", "autoshard.shard(model)"]),
    (zeroed_from_before, ["embed.weight", "model.parameters()"]),
    (never_called, ["AdamW", "WithMethod.embed.weight", "autoshard.shard(model)"]),
    (write_in_forward, ["layers.1.up.weight", "written to in forward", "outside of forward"]),
    (write_to_a_copy_of_one_rank, ["layers.1.up.weight", "written to in forward"]),
    (write_in_compiled_forward, ["layers.1.up.weight", "written to", "outside of forward"]),
    (sparse_gradient, ["Embedding", "sparse=False"]),
    (embedding_that_renormalises, ["0 (Embedding)", "max_norm=1.0", "full_params()"]),
    (bag_with_sparse_gradient, ["0 (EmbeddingBag)", "sparse=False", "freeze"]),
    (gradient_from_before, ["embed.weight", "Net", "zero_grad()"]),
    (added_later, ["Net.extra.weight", "SGD", "before sharding"]),
    (bucketing_of_no_module, ["layer.1", "named_modules()", "layers"]),
    (function_without_the_model, ["AdamW", "Net.embed.weight", "captured"]),
    (replaced_parameter, ["head.weight", "[11, 6]", "load_state_dict"]),
]


@pytest.mark.parametrize("number", range(len(BAD_INPUTS)), ids=[f.__name__ for f, _ in BAD_INPUTS])
@on_ranks(2, timeout=30)
def test_bad_input(rank: int, number: int) -> None:
    """A26, D-4."""
    mistake, words = BAD_INPUTS[number]
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as raised:
        mistake()
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message


def difficult() -> torch._ops.OpOverload:
    """An operator that runs and traces, and that Inductor fails to lower."""
    from torch._inductor import lowering

    if not hasattr(torch.ops.test_errors, "difficult"):
        torch.library.define("test_errors::difficult", "(Tensor x) -> Tensor")
        torch.library.impl("test_errors::difficult", "CompositeExplicitAutograd", torch.sin)
        torch.library.register_fake("test_errors::difficult", torch.empty_like)
        torch.library.register_autograd(
            "test_errors::difficult",
            lambda ctx, grad: grad * torch.ops.test_errors.difficult(ctx.x),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
        )

        @lowering.register_lowering(torch.ops.test_errors.difficult.default)
        def lower(x: object) -> object:
            raise NotImplementedError("no lowering for this one")

    return torch.ops.test_errors.difficult.default


class Difficult(Net):
    def forward(self, ids: Tensor) -> Tensor:
        return difficult()(super().forward(ids))


class OnlyInBackward(Net):
    """The operator stands in the backward graph alone."""

    def forward(self, ids: Tensor) -> Tensor:
        return Sine.apply(super().forward(ids))


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * difficult()(ctx.saved_tensors[0])


@pytest.mark.parametrize("model", [Difficult, OnlyInBackward])
@on_ranks(2)
def test_falls_back_with_one_warning(rank: int, model: type[Net]) -> None:
    difficult()
    want, _ = replicated(model, net_loss)
    torch.manual_seed(0)
    got = model()
    optimizer = adamw(got)
    call = torch.compile(got, backend="autoshard")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(call, net_loss, optimizer)
    ours = [str(w.message) for w in caught if "autoshard" in str(w.message)]
    assert len(ours) == 1, ours
    assert "no lowering for this one" in ours[0]
    assert "eager runtime" in ours[0]
    # What Dynamo still compiles of it, block by block, is lowered by Inductor.
    assert_same(got, want, rtol=1e-4)


@pytest.mark.parametrize("model", [Difficult, OnlyInBackward])
@on_ranks(2)
def test_strict_raises(rank: int, model: type[Net]) -> None:
    difficult()
    call = torch.compile(model(), backend="autoshard", options={"strict": True})
    with pytest.raises(Exception, match="no lowering for this one"):
        net_loss(call, rank, 0)


@on_ranks(2, compiles=True)
def test_strict_raises_what_dynamo_takes_for_a_break(rank: int) -> None:
    """Of some errors of a backend Dynamo tells nobody, and runs the frame eagerly."""
    from autoshard import compilation

    def lower(gm: Any) -> Any:
        raise DataDependentOutputException("a value is asked for")

    call = torch.compile(Net(), backend="autoshard", options={"strict": True, "lowering": "eager"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "lower_eagerly", lower)
        with pytest.raises(Exception, match="DataDependentOutputException: a value is asked for"):
            net_loss(call, rank, 0)


@on_ranks(2, compiles=True)
def test_one_rank_fails_all_fall_back(rank: int) -> None:
    """D-69: A failure on rank 0 alone: rank 1 leaves its graph unused too, and nobody hangs."""
    difficult()
    want, want_losses = replicated(Net, net_loss)
    torch.manual_seed(0)
    model = Net()
    optimizer = adamw(model)
    call = torch.compile(model, backend="autoshard", options={"lowering": "eager"})
    from autoshard import compilation

    lower = compilation.lower_eagerly

    def fail(gm: torch.fx.GraphModule) -> object:
        if rank == 0:
            raise NotImplementedError("only on rank 0")
        return lower(gm)

    compilation.lower_eagerly = fail
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = train(call, net_loss, optimizer)
    finally:
        compilation.lower_eagerly = lower
    assert any("only on rank 0" in str(w.message) for w in caught)
    assert losses == want_losses
    assert_same(model, want)


def test_modules_that_a_function_names() -> None:
    """By a closure, a default, or a default of an argument that is given by name."""
    first, second, third = (nn.Linear(2, 2) for _ in range(3))

    def step(x: Any, net: Any = second, *, other: Any = third) -> Any:
        return first(net(other(x)))

    assert modules_named_by(step) == [first, second, third]
