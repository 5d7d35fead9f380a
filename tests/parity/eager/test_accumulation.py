"""Gradients that wait for a later backward, and what happens in between."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
from support.issue import kinds
from support.models import Net, SmallNet, net_loss
from support.ranks import on_ranks
from support.selection import each_value
from support.training import (
    FORMS,
    adamw,
    assert_same,
    average_gradients,
    in_both_forms,
    in_form,
    replicated,
    sgd,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import CPUOffloadPolicy, MixedPrecisionPolicy
from autoshard.runtime.unit import reduce
from autoshard.runtime.unit.param import find

BATCHES = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(**arguments: Any) -> SmallNet:
    torch.manual_seed(0)
    return SmallNet(tied=False, **arguments)


def by_hand(rank: int, make: Any = adamw) -> nn.Module:
    """Three micro-batches a step, summed and then averaged."""
    model = build()
    optimizer = make(model)
    for step in range(3):
        for batch in range(BATCHES):
            net_loss(model, rank, BATCHES * step + batch).backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


@in_both_forms
@on_ranks(2)
def test_no_sync(rank: int, form: str) -> None:
    want = by_hand(rank)
    model = in_form(autoshard.shard(build()), form)
    optimizer = adamw(model)
    for step in range(3):
        with model.no_sync():
            for batch in range(BATCHES - 1):
                net_loss(model, rank, BATCHES * step + batch).backward()
        net_loss(model, rank, BATCHES * step + BATCHES - 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want)


@each_value(
    form=["eager", "compiled"],
    is_low=[False, False, True, True],
    is_emptied=[False, True, False],
    strategy=["full_shard", "no_shard", "hybrid_shard"],
)
@on_ranks(1)
def test_no_sync_on_one_rank(
    rank: int, form: str, is_low: bool, is_emptied: bool, strategy: str
) -> None:
    """Nothing is reduced there, and what waits is added all the same, unless it is let go of."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_low else None
    model = in_form(autoshard.shard(build(), strategy=strategy, mp_policy=policy), form)
    twin = autoshard.shard(build(), strategy=strategy, mp_policy=policy)
    optimizer, of_twin = sgd(model), sgd(twin)
    for step in range(3):
        for batch in range(BATCHES):
            with model.no_sync() if batch + 1 < BATCHES else contextlib.nullcontext():
                net_loss(model, rank, BATCHES * step + batch).backward()
            if is_emptied and batch == 0:
                model.zero_grad()
            else:
                net_loss(twin, rank, BATCHES * step + batch).backward()
        optimizer.step()
        of_twin.step()
        optimizer.zero_grad()
        of_twin.zero_grad()
    assert_same(model, twin)


@pytest.mark.parametrize(
    ("form", "options"),
    [("eager", {}), ("compiled", {}), ("compiled", {"topology": "gloo"})],
)
@on_ranks(4)
def test_all_reduce_on_the_last(rank: int, form: str, options: dict[str, Any]) -> None:
    """B.2: reduce-scattered sums add up; replicas are summed once. Backwards need not end.

    Plans that are searched for may reduce others together in the last backward.
    """
    want = by_hand(rank, sgd)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = autoshard.shard(build(), strategy="hybrid_shard", mesh=mesh)
    model = in_form(model, form, **options)
    optimizer = sgd(model)
    for step in range(3):
        for batch in range(BATCHES):
            is_last = batch == BATCHES - 1
            model.set_requires_all_reduce(is_last)
            model.set_is_last_backward(is_last)
            net_loss(model, rank, BATCHES * step + batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want, rtol=1e-5)  # four ranks sum in another order than by hand


@each_value(form=FORMS, set_to_none=[True, False])
@on_ranks(2)
def test_zero_grad_drops_what_waits(rank: int, set_to_none: bool, form: str) -> None:
    """D-34: it is not in `.grad`, and goes with it all the same."""
    model = in_form(autoshard.shard(build()), form)
    net_loss(model, rank, 1).backward()
    want = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    for before in (0, 1):  # with an empty `.grad`, and one that has been reduced already
        model.zero_grad()
        if before:
            net_loss(model, rank, 5).backward()
        with model.no_sync():
            net_loss(model, rank, 0).backward()
        model.zero_grad(set_to_none=set_to_none)
        net_loss(model, rank, 1).backward()
        for name, param in model.named_parameters():
            assert torch.equal(param.grad.full_tensor(), want[name]), name


@in_both_forms
@on_ranks(2)
def test_gradients_changed_while_others_wait(rank: int, form: str) -> None:
    model = in_form(autoshard.shard(build()), form)
    net_loss(model, rank, 0).backward()
    with model.no_sync():
        net_loss(model, rank, 1).backward()
    model.head.weight.grad.mul_(2)
    loss = net_loss(model, rank, 2)
    with pytest.raises(RuntimeError, match=r"gradient of head\.weight was changed while"):
        loss.backward()
    model.reset_iter_state()


@in_both_forms
@on_ranks(2)
def test_step_while_gradients_wait(rank: int, form: str) -> None:
    model = in_form(autoshard.shard(build()), form)
    optimizer = adamw(model)
    with model.no_sync():
        net_loss(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"AdamW steps embed\.weight.*waiting to be reduced"):
        optimizer.step()


@in_both_forms
@on_ranks(2)
def test_accumulates_in_the_reduce_dtype(rank: int, form: str) -> None:
    """D-35: 256 + 1 is 256 in bfloat16, and 257 here."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = in_form(autoshard.fully_shard(nn.Linear(1, 2, bias=False), mp_policy=policy), form)
    with model.no_sync():
        model(torch.full((1, 1), 256.0)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[257.0], [257.0]]
    assert model.weight.grad.dtype == torch.float32


class Branches(nn.Module):
    """Uses one of two units."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


@on_ranks(2)
def test_a_unit_unused_in_the_last_micro_batch(rank: int) -> None:
    """What waits is reduced though its unit has no part in the backward that reduces."""
    torch.manual_seed(0)
    model = Branches()
    autoshard.fully_shard(model.left)
    autoshard.fully_shard(model.right)
    autoshard.fully_shard(model)
    x = torch.full((2, 4), float(rank + 1))
    with model.no_sync():
        model(x, "left").sum().backward()
    model(x, "right").sum().backward()
    for unit in (model.left, model.right):  # the mean of two rows of 1 and two rows of 2
        assert unit.weight.grad.full_tensor().tolist() == [[3.0] * 4] * 4


@in_both_forms
@on_ranks(2)
def test_parameters_kept_after_backward(rank: int, form: str) -> None:
    """`set_reshard_after_backward`: the next forward gathers nothing, unless they were updated."""
    want, _ = replicated(Net, net_loss, steps=2)
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form)
    model.set_reshard_after_backward(False)
    optimizer = adamw(model)
    gathers = []
    for step in range(2):
        for _ in range(2):
            optimizer.zero_grad()
            seen = Counter(kinds(lambda step=step: net_loss(model, rank, step).backward()))
            gathers.append(seen["gather"])
        optimizer.step()
    # 4 in forward and 3 in backward. Then all are there: forward lets go of the three blocks,
    # and backward gathers them. Compiled, it has them from forward.
    assert gathers == ([7, 3, 7, 3] if form == "eager" else [4, 0, 4, 0]), gathers
    assert_same(model, want)


class InBackward:
    """An optimizer a parameter, stepped when its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = {
            param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in model.parameters()
        }
        for param in self.optimizers:
            param.register_post_accumulate_grad_hook(self.update)

    def update(self, param: Tensor) -> None:
        self.optimizers[param].step()
        self.optimizers[param].zero_grad()


@in_both_forms
@on_ranks(2)
def test_optimizer_in_backward(rank: int, form: str) -> None:
    """A59, D-39: after the reduce has completed; gradients are gone after backward."""
    want, _ = replicated(
        Net,
        net_loss,
        steps=6,
        make=lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    )
    torch.manual_seed(0)
    model = in_form(autoshard.shard(Net()), form)
    InBackward(model)
    for step in range(6):
        net_loss(model, rank, step).backward()
        assert all(param.grad is None for param in model.parameters())
    assert_same(model, want)
    with (
        model.no_sync(),
        pytest.raises(RuntimeError, match=r"layers\.2.*optimizer in backward"),
    ):
        net_loss(model, rank, 0).backward()
    model.reset_iter_state()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_optimizer_in_backward_and_two_forwards(rank: int, strategy: str) -> None:
    """One backward reduces both at once, and updates once. In two, the second gradient would be of
    values that are gone."""
    model = autoshard.shard(SmallNet(), strategy=strategy)
    InBackward(model)
    (net_loss(model, rank, 0) + net_loss(model, rank, 1)).backward()
    first, second = net_loss(model, rank, 2), net_loss(model, rank, 3)
    first.backward()
    with pytest.raises(RuntimeError, match=r"optimizer in backward|modified in place between"):
        second.backward()
    model.reset_iter_state()


@on_ranks(2)
def test_two_backwards_through_one_graph(rank: int) -> None:
    """A54, D-17."""
    plain = build()
    loss = net_loss(plain, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    average_gradients(plain)
    model = autoshard.shard(build())
    loss = net_loss(model, rank, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), want.grad)


@on_ranks(2)
def test_gradients_of_gradients(rank: int) -> None:
    """D-23: a clear error."""
    model = autoshard.shard(build())
    loss = net_loss(model, rank, 0)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(grad.square().sum() for grad in grads)
    with pytest.raises(RuntimeError, match=r"once_differentiable"):
        penalty.backward()


@in_both_forms
@on_ranks(2)
def test_hooks_run_once_with_the_reduced_gradient(rank: int, form: str) -> None:
    """A59, D-39: autograd, which is handed no gradient, does not run them beside us."""
    model = in_form(autoshard.fully_shard(nn.Linear(2, 2)), form)
    seen: list[float] = []
    model.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad.full_tensor().sum().item())
    )
    model.weight.register_hook(lambda grad: grad * 2)
    for _ in range(2):
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
    assert seen == [12.0, 24.0]  # four elements of 1.5, doubled; summed up with the first


def hybrid_branches() -> Branches:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = Branches()
    for each in (model.left, model.right, model):
        autoshard.fully_shard(each, mesh=mesh)
    return model


@on_ranks(2)
def test_sums_that_wait_for_their_all_reduce(rank: int) -> None:
    """Also of a unit unused in the last micro-batch; and gone, or in the way, as they should."""
    x = torch.full((1, 4), float(rank + 1))
    model = hybrid_branches()
    model.set_requires_all_reduce(False)
    model(x, "left").sum().backward()
    with pytest.raises(RuntimeError, match=r"SGD steps left\.weight.*set_requires_all_reduce"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.set_requires_all_reduce(True)
    model(x, "right").sum().backward()
    for unit in (model.left, model.right):
        assert unit.weight.grad.full_tensor().tolist() == [[1.5] * 4] * 4
    model.zero_grad()
    for set_to_none in (True, False):
        model.set_requires_all_reduce(False)
        model(100 * x, "left").sum().backward()
        model.zero_grad(set_to_none=set_to_none)
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # nothing waits any more
        model.set_requires_all_reduce(True)
        model(x, "left").sum().backward()
        assert model.left.weight.grad.full_tensor().tolist() == [[1.5] * 4] * 4
        assert model.right.weight.grad is None
        model.zero_grad()


@in_both_forms
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2)
def test_sums_that_wait_for_their_all_reduce_and_no_sync(
    rank: int, set_to_none: bool, form: str
) -> None:
    """One backward leaves its sums to all-reduce, the next one all of its gradients to reduce."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = autoshard.shard(build(), strategy="hybrid_shard", mesh=mesh)
    model = in_form(model, form)
    want = build()
    optimizers = sgd(model), sgd(want)
    for step in range(2):
        model.set_requires_all_reduce(False)
        net_loss(model, rank, 3 * step).backward()
        model.set_requires_all_reduce(True)
        with model.no_sync():
            net_loss(model, rank, 3 * step + 1).backward()
        net_loss(model, rank, 3 * step + 2).backward()
        for batch in range(3):
            net_loss(want, rank, 3 * step + batch).backward()
        average_gradients(want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert_same(model, want, rtol=1e-6)  # added up in another order


@in_both_forms
@on_ranks(2)
def test_backward_of_some_inputs_leaves_what_waits(rank: int, form: str) -> None:
    model = in_form(autoshard.fully_shard(nn.Linear(2, 2)), form)
    x = torch.ones(1, 2)
    with model.no_sync():
        model(5 * x).sum().backward()
    model(x).sum().backward(inputs=[model.bias])
    assert model.bias.grad.full_tensor().tolist() == [2.0, 2.0]
    model(x).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[6.0, 6.0]] * 2


def bytes_waiting(model: nn.Module) -> int:
    """In storages of gradients that wait to be reduced."""
    totals = [reduce.pending_of(find(param)) for param in model.parameters()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in totals if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


@in_both_forms
@on_ranks(2)
def test_one_whole_gradient_a_parameter_waits(rank: int, form: str) -> None:
    """D-36: the memory of the whole model, after however many micro-batches; then of shards."""
    model = in_form(autoshard.shard(build()), form)
    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    for batch in range(BATCHES):
        with model.no_sync():
            net_loss(model, rank, batch).backward()
        assert bytes_waiting(model) == whole
    net_loss(model, rank, BATCHES).backward()
    assert bytes_waiting(model) == 0
    for param in model.parameters():
        assert param.grad.to_local().untyped_storage().nbytes() == param.to_local().nbytes


@each_value(form=FORMS, waits=[True, False])
@on_ranks(2)
def test_accumulation_beside_offload(rank: int, form: str, waits: bool) -> None:
    """D-36: FSDP1 refuses it unless gradients wait. (On a CPU, shards are where they were.)"""
    models = []
    for policy in (None, CPUOffloadPolicy()):
        model = in_form(autoshard.shard(build(), offload_policy=policy), form)
        optimizer = adamw(model)
        for step in range(3):
            for batch in range(BATCHES):
                is_last = batch == BATCHES - 1
                model.set_requires_gradient_sync(is_last or not waits)
                net_loss(model, rank, BATCHES * step + batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same(models[1], models[0])
    # Reduced one by one, sums are taken over ranks first.
    assert_same(models[1], by_hand(rank), rtol=0.0 if waits else 1e-4)


def micro_batches(model: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> list[Any]:
    """Four of one step, reduced in the last; what each issues."""
    sent = []
    for batch in range(4):
        model.set_requires_gradient_sync(batch == 3)
        loss = functools.partial(net_loss, model, rank, 4 * step + batch)
        sent.append(Counter(kinds(lambda loss=loss: loss().backward())))
    optimizer.step()
    optimizer.zero_grad()
    return sent


@each_value(strategy=["full_shard", "hybrid_shard"], policy=[BF16, None])
@on_ranks(2)
def test_two_graphs(rank: int, strategy: str, policy: MixedPrecisionPolicy | None) -> None:
    """Four micro-batches reduce once; the second step compiles nothing; bit for bit eager."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = {"mesh": mesh} if strategy == "hybrid_shard" else {}
    models = []
    for form in FORMS:
        model = autoshard.shard(build(), strategy=strategy, mp_policy=policy, **hybrid)
        optimizer = adamw(in_form(model, form, bucketing="per_unit"))
        once = Counter(kinds(lambda model=model: net_loss(model, rank, 0).backward()))
        optimizer.zero_grad()
        for step in range(2):
            *waiting, last = micro_batches(model, optimizer, rank, step)
            for kind in ("reduce", "all_reduce"):
                assert [sent[kind] for sent in waiting] == [0, 0, 0]
                assert last[kind] == once[kind]
            # The root is kept whole from the first on.
            root = 1 if strategy == "full_shard" else 0
            gathers = [sent["gather"] for sent in (*waiting, last)]
            assert gathers == [once["gather"], *[once["gather"] - root] * 3]
            graphs = len(autoshard.plans(model))
            if step == 0:
                compiled_so_far = graphs
        assert graphs == compiled_so_far
        assert form == "eager" or graphs > 0
        models.append(model)
    assert_same(models[1], models[0])


@on_ranks(2)
def test_two_graphs_lowered_by_inductor(rank: int) -> None:
    models = []
    for form in FORMS:
        options = {"lowering": "inductor", "bucketing": "per_unit"}
        model = in_form(autoshard.shard(build()), form, **options)
        optimizer = sgd(model)
        for step in range(2):
            sent = micro_batches(model, optimizer, rank, step)
            assert [each["reduce"] for each in sent] == [0, 0, 0, 1 + len(model.layers)]
        models.append(model)
    assert_same(models[1], models[0], rtol=1e-5)  # Inductor fuses, and rounds less


@pytest.mark.parametrize("options", [{}, {"topology": "gloo"}])
@on_ranks(2)
def test_sums_that_wait_for_their_all_reduce_lowered_by_inductor(
    rank: int, options: dict[str, Any]
) -> None:
    """What a graph waits for, and is not there yet, has the strides that Inductor counts on."""
    models = []
    for form in FORMS:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        model = autoshard.shard(build(), strategy="hybrid_shard", mesh=mesh)
        model = in_form(model, form, lowering="inductor", **options)
        optimizer = sgd(model)
        for batch in range(BATCHES):
            model.set_requires_all_reduce(batch == BATCHES - 1)
            net_loss(model, rank, batch).backward()
        optimizer.step()
        models.append(model)
    assert_same(models[1], models[0], rtol=1e-5)  # Inductor fuses, and rounds less


@on_ranks(2)
def test_sums_that_other_buckets_left(rank: int) -> None:
    """Compiled code left them, each bucket's of parameters of several units and of parts of units;
    the eager runtime takes them, and the other way about."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    models = []
    for forms in (("eager", "eager"), ("compiled", "eager"), ("eager", "compiled")):
        model = autoshard.shard(build(), strategy="hybrid_shard", mesh=mesh)
        options = {
            "lowering": "eager",
            "strict": True,
            "bucketing": [["layers.0", "layers.1.up"], ["layers.1.norm", "layers.1.down"]],
        }
        compiled = torch.compile(model, backend="autoshard", options=options)
        calls = {"eager": model, "compiled": compiled}
        for batch, form in enumerate(forms):
            model.set_requires_all_reduce(batch == 1)
            net_loss(calls[form], rank, batch).backward()
        sgd(model).step()
        models.append(model)
    assert_same(models[1], models[0])
    assert_same(models[2], models[0])


class RunAgain(SmallNet):
    """Layers in checkpoints, the first of them used again after the last, maybe."""

    def __init__(self, used_twice: bool) -> None:
        super().__init__(tied=False, checkpointing="non-reentrant")
        self.used_twice = used_twice

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, *self.layers[: int(self.used_twice)]):
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("used_twice", [False, True])
@on_ranks(2)
def test_kept_parameters_in_compiled_layers_that_are_run_again(rank: int, used_twice: bool) -> None:
    """The last micro-batch finds parameters whole, and so does what it runs again in backward."""

    torch.manual_seed(0)
    want = RunAgain(used_twice)
    models = [want, autoshard.shard(copy.deepcopy(want), strategy="shard_grad_op")]
    for layer in models[1].layers:
        in_form(layer, "compiled")
    for model in models:
        optimizer = adamw(model)
        for step in range(2):
            for batch in range(BATCHES):
                if model is not want:
                    model.set_requires_gradient_sync(batch == BATCHES - 1)
                net_loss(model, rank, BATCHES * step + batch).backward()
            if model is want:
                average_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    # A layer used twice has a graph for each use, and a reduce of each.
    assert_same(models[1], want, rtol=1e-4 if used_twice else 0.0)


@on_ranks(2)
def test_what_waits_outside_of_a_nested_backward(rank: int) -> None:
    """A reentrant checkpoint's backward is over long before that of the embedding, whose
    gradients wait until it has its last."""
    want = by_hand(rank)
    model = autoshard.shard(build(checkpointing="reentrant"))
    for layer in model.layers:
        in_form(layer, "compiled")
    optimizer = adamw(model)
    for step in range(3):
        for batch in range(BATCHES):
            model.set_requires_gradient_sync(batch == BATCHES - 1)
            net_loss(model, rank, BATCHES * step + batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model, want)


@on_ranks(2)
def test_blocks_that_share_a_graph(rank: int) -> None:
    """What waits is found for the block that runs, not for the one that was compiled."""
    models = []
    for form in FORMS:
        model = autoshard.shard(build())
        for layer in model.layers:
            in_form(layer, form)
        optimizer = adamw(model)
        for step in range(2):
            sent = micro_batches(model, optimizer, rank, step)
            assert [each["reduce"] for each in sent] == [0, 0, 0, 1 + len(model.layers)]
        models.append(model)
    assert_same(models[1], models[0])


@on_ranks(2)
def test_told_to_wait_or_not_after_forward(rank: int) -> None:
    """Backward does as it is told when it begins, whatever forward was compiled for."""
    models = []
    for form in FORMS:
        model = in_form(autoshard.shard(build()), form)
        optimizer = adamw(model)
        for step in range(2):
            for batch in range(BATCHES):
                model.set_requires_gradient_sync(batch == 0)
                loss = net_loss(model, rank, BATCHES * step + batch)
                model.set_requires_gradient_sync(batch == BATCHES - 1)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert_same(models[1], models[0])
