"""In which dtypes a unit works: parameters, gradients, inputs, outputs, buffers."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.models import Block, net_loss
from support.models import SmallNet as Net
from support.ranks import on_ranks
from support.selection import each_value
from support.training import adamw, assert_same, in_both_forms, in_form, sgd, train
from torch import Tensor, nn

import autoshard
from autoshard import MixedPrecisionPolicy, fully_shard
from autoshard.runtime.comm import flights
from autoshard.runtime.unit import precision

BF16 = torch.bfloat16


class Seen(nn.Module):
    """Remembers the dtypes that its forward met."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("index", torch.arange(4))
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes = {
            "input": x.dtype,
            "weight": self.linear.weight.dtype,
            "scale": self.scale.dtype,
            "index": self.index.dtype,
        }
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale


def dtypes_of(
    policy: MixedPrecisionPolicy, *, train: bool = True, compile: bool = False
) -> dict[str, torch.dtype]:
    """What forward, the wire and `.grad` saw; parameters stay in float32."""
    model = fully_shard(Seen(), mp_policy=policy).train(train)
    if compile:
        torch._dynamo.reset()
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})
    wire: dict[str, torch.dtype] = {}
    with flights.observe(lambda i: wire.update({i.kind: i.members[0].dtype})):
        output = model(torch.ones(2, 4))
        output.sum().backward()
    weight = model.linear.weight
    assert weight.dtype == torch.float32
    return {**model.dtypes, **wire, "output": output.dtype, "grad": weight.grad.dtype}


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_dtypes(rank: int, compile: bool) -> None:
    """A8, D-57: what each field of a policy governs, and nothing else."""
    full, i64 = torch.float32, torch.int64

    def seen(**policy: Any) -> dict[str, torch.dtype]:
        return dtypes_of(MixedPrecisionPolicy(**policy), compile=compile)

    plain = dict.fromkeys(("input", "weight", "scale", "gather", "reduce", "output", "grad"), full)
    assert seen() == {**plain, "index": i64}
    assert seen(param_dtype=BF16, reduce_dtype=full) == {
        **dict.fromkeys(("input", "weight", "gather"), BF16),
        **dict.fromkeys(("scale", "reduce", "output", "grad"), full),
        "index": i64,
    }
    assert seen(param_dtype=BF16)["reduce"] == BF16
    assert seen(reduce_dtype=BF16)["reduce"] == BF16
    assert seen(output_dtype=torch.float64)["output"] == torch.float64
    assert seen(param_dtype=BF16, cast_forward_inputs=False)["input"] == full


@pytest.mark.parametrize("compile", [False, True])
@on_ranks(2)
def test_dtypes_of_buffers_kept_gradients_and_eval(rank: int, compile: bool) -> None:
    """A1, A63, D-56."""
    full, i64 = torch.float32, torch.int64
    plain = dict.fromkeys(("input", "weight", "scale", "gather", "reduce", "output", "grad"), full)
    low = MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16)
    everywhere = dict.fromkeys(plain, BF16)
    assert dtypes_of(low, compile=compile) == {**everywhere, "grad": full, "index": i64}
    kept = MixedPrecisionPolicy(param_dtype=BF16, keep_low_precision_grads=True)
    assert dtypes_of(kept, compile=compile)["grad"] == BF16
    in_eval = MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16, full_precision_in_eval=True)
    assert dtypes_of(in_eval, train=False, compile=compile) == {**plain, "index": i64}
    assert dtypes_of(in_eval, compile=compile) == {**everywhere, "grad": full, "index": i64}
    assert dtypes_of(low, train=False, compile=compile)["weight"] == BF16


@on_ranks(2)
def test_gradients_of_kept_dtype_that_have_waited(rank: int) -> None:
    """Zeros of the parameter's own dtype stand for them until they are reduced, in both forms."""
    kept = MixedPrecisionPolicy(param_dtype=BF16, keep_low_precision_grads=True)
    found = []
    for form in ("eager", "compiled"):
        torch.manual_seed(0)
        model: Any = in_form(fully_shard(nn.Linear(4, 3), mp_policy=kept), form)
        for step in range(2):
            for syncs in (False, True):
                model.set_requires_gradient_sync(syncs)
                model(torch.full((2, 4), 1.0 + rank + step)).sum().backward()
            grads = [param.grad.to_local() for param in model.parameters()]
            assert {grad.dtype for grad in grads} == {BF16}
            found.append([grad.clone() for grad in grads])
            for param in model.parameters():
                param.grad = None
    for eager, compiled in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, eager, compiled))


@in_both_forms
@on_ranks(2)
def test_eval_and_back(rank: int, form: str) -> None:
    """A63: buffers and parameters follow the mode, also where whole parameters are kept."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16, full_precision_in_eval=True)
    model = in_form(fully_shard(Seen(), mp_policy=policy), form)
    model.set_reshard_after_backward(False)
    for training in (True, False, True):
        model.train(training)
        model(torch.ones(2, 4)).sum().backward()
        expected = BF16 if training else torch.float32
        assert {model.dtypes["weight"], model.dtypes["scale"]} == {expected}


class Norms(nn.Module):
    """Buffers of distinct names and dtypes, some in a nested unit, some ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("outer", torch.ones(3, dtype=torch.float64))
        self.inner = nn.Linear(3, 3)
        self.inner.register_buffer("deep", torch.ones(3, dtype=torch.float32))
        self.inner.register_buffer("hidden", torch.ones(3), persistent=False)
        self.alone = nn.Linear(3, 3)
        self.alone.register_buffer("wide", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.outer.to(x.dtype)


@in_both_forms
@on_ranks(2)
def test_buffers(rank: int, form: str) -> None:
    """A1, A2, A55, D-50, D-51: cast under the model's names; a state dict has their own dtypes."""
    model = Norms()
    names = [name for name, _ in model.named_buffers()]
    model = autoshard.shard(
        model,
        policy=lambda module: module is model.inner,
        mp_policy=MixedPrecisionPolicy(param_dtype=BF16, buffer_dtype=BF16),
        ignored_modules=[model.alone],
    )
    in_form(model, form)
    model(torch.ones(2, 3)).sum().backward()
    assert [name for name, _ in model.named_buffers()] == names
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "outer": BF16,
        "inner.deep": BF16,
        "inner.hidden": BF16,
        "alone.wide": torch.float64,
    }
    saved = {name: value.dtype for name, value in model.state_dict().items() if "." in name}
    assert saved["inner.deep"] == torch.float32
    assert saved["alone.wide"] == torch.float64
    assert model.state_dict()["outer"].dtype == torch.float64


@on_ranks(2)
def test_output_of_the_model_only(rank: int) -> None:
    """`shard` casts the model's output, not what its units hand on to each other."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32)
    model = autoshard.shard(Net(), mp_policy=policy)
    seen = []
    model.layers[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    assert model(torch.tensor([1, 2])).dtype == torch.float32
    assert seen == [BF16]


@in_both_forms
@on_ranks(2)
def test_batch_norm_stays_in_full_precision(rank: int, form: str) -> None:
    """A30, A36, D-53: in a unit of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    seen = []
    model[1].register_forward_hook(lambda m, args, _: seen.append((args[0].dtype, m.weight.dtype)))
    model = autoshard.shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16), policy=lambda module: False
    )
    in_form(model, form)
    model(torch.randn(3, 4)).float().sum().backward()
    assert seen == [(BF16, torch.float32)]
    assert model[1].running_mean.dtype == torch.float32
    assert model[0].weight.grad is not None


@in_both_forms
@on_ranks(2)
def test_dtypes_mixed_in_one_unit(rank: int, form: str) -> None:
    """D-58: each dtype has collectives of its own, or one if the policy casts."""
    for policy, gathers in ((MixedPrecisionPolicy(), 2), (MixedPrecisionPolicy(BF16), 1)):
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        model[1].to(BF16)
        model = in_form(fully_shard(model, mp_policy=policy), form)
        model[0].register_forward_hook(lambda _, __, output: output.to(BF16))
        issued = []
        with flights.observe(issued.append):
            model(torch.ones(2, 3)).float().sum().backward()
        assert len([i for i in issued if i.kind == "gather"]) == gathers
        assert model[0].weight.grad.dtype == torch.float32
        assert model[1].weight.grad.dtype == BF16


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_casts_are_repeated_when_a_checkpoint_runs_again(rank: int, reentrant: bool) -> None:
    """D-22."""
    torch.manual_seed(0)
    model = Net(checkpointing="reentrant" if reentrant else "non-reentrant")
    torch.manual_seed(0)
    plain = Net()
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    model, plain = (autoshard.shard(each, mp_policy=policy) for each in (model, plain))
    for each in (model, plain):
        net_loss(lambda ids, each=each: each(ids).float(), rank, 0).backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got.grad.to_local(), want.grad.to_local())


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    value: Tensor
    note: str


def test_containers_that_need_no_cast_are_passed_on() -> None:
    """D-26, D-27: the very same list, so that what forward appends to it is there."""
    low, ints = torch.ones(2, dtype=BF16), torch.arange(2)
    for same in ([low, ints], (low,), {"a": low}, Pair(low, ints), Record(low, "x"), [[low]], 3):
        assert precision.cast(same, BF16) is same
    full = torch.ones(2)
    made = precision.cast(
        {"list": [full, ints], "pair": Pair(full, 1), "record": Record(full, "x")}, BF16
    )
    assert made["list"][0].dtype == BF16
    assert made["list"][1] is ints
    assert made["pair"].first.dtype == BF16
    assert isinstance(made["pair"], Pair)
    assert (made["record"].value.dtype, made["record"].note) == (BF16, "x")
    assert full.dtype == torch.float32


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:
        outputs.append(self.block(x))
        return outputs[-1]


@in_both_forms
@on_ranks(2)
def test_forward_may_append_to_its_input(rank: int, form: str) -> None:
    """D-27."""
    model = in_form(fully_shard(Appends(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16)), form)
    outputs = [torch.ones(2, 6, dtype=BF16, requires_grad=True)]
    model(torch.ones(2, 6), outputs).sum().backward()
    assert len(outputs) == 2


@on_ranks(2)
def test_torchs_own_policy(rank: int) -> None:
    """Code written for FSDP2 may still pass the policies of torch."""
    from torch.distributed import fsdp

    model = fully_shard(
        Block(),
        mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
        offload_policy=fsdp.CPUOffloadPolicy(),
    )
    assert model(torch.ones(2, 6)).dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"param_dtype": "bf16"}, r"param_dtype is 'bf16'"),
        ({"reduce_dtype": torch.int32}, r"reduce_dtype is torch.int32"),
        ({"cast_forward_inputs": 1}, r"cast_forward_inputs is 1"),
    ],
)
def test_wrong_policy(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MixedPrecisionPolicy(**arguments)


@in_both_forms
@on_ranks(2)
def test_autocast(rank: int, form: str) -> None:
    """Autocast casts inside: gathered parameters, and their gradients, stay in float32."""
    model = in_form(autoshard.shard(Net()), form)
    issued = []
    with flights.observe(issued.append):
        with torch.autocast("cpu", dtype=BF16):
            loss = net_loss(model, rank, 0)
        loss.backward()
    assert {member.dtype for i in issued for member in i.members} == {torch.float32}


COMPILED = {
    "computed low, reduced in full": MixedPrecisionPolicy(BF16, torch.float32),
    "all low": MixedPrecisionPolicy(BF16),
    "reduced low": MixedPrecisionPolicy(None, BF16),
    "half, and a full output": MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32),
}


@each_value(
    checkpointing=[None, "non-reentrant"],
    strategy=["full_shard", "shard_grad_op"],
    policy=COMPILED,
)
@on_ranks(2)
def test_compiled_equals_eager(
    rank: int, policy: str, strategy: str, checkpointing: str | None
) -> None:
    """A8, D-22: bit for bit, tied parameters too: casts and sums are the same."""

    def build() -> Any:
        torch.manual_seed(0)
        model = Net(checkpointing=checkpointing)
        return autoshard.shard(model, strategy=strategy, mp_policy=COMPILED[policy])

    def loss(model: Any, rank: int, step: int) -> Tensor:
        return net_loss(lambda ids: model(ids).float(), rank, step)

    want, got = build(), build()
    optimizer = adamw(got)
    torch._dynamo.reset()
    options = {"lowering": "eager", "strict": True}
    call = torch.compile(got, backend="autoshard", options=options)
    assert train(call, loss, optimizer) == train(want, loss, adamw(want))
    assert_same(got, want)


@on_ranks(2)
def test_compiled_with_inductor(rank: int) -> None:
    """Inductor keeps more bits between fused ops than eager bfloat16 does, which rounds by 2 ** -8
    at each; a few of these add up in four steps."""
    policy = MixedPrecisionPolicy(BF16, torch.float32, torch.float32)

    def build() -> Any:
        torch.manual_seed(0)
        return autoshard.shard(Net(), mp_policy=policy)

    want, got = build(), build()
    optimizer = sgd(got)
    torch._dynamo.reset()
    call = torch.compile(got, backend="autoshard", options={"strict": True})
    train(call, net_loss, optimizer)
    train(want, net_loss, sgd(want))
    assert_same(got, want, rtol=2.0**-6)
