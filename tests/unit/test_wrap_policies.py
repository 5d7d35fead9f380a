"""autoshard.wrap: what each policy makes a unit of, with which overrides; `enable_wrap`.

The numbers in the names are the rows of the feature list that a test is for.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as fsdp_wrap
from support.models import Block, Net
from torch import Tensor, nn

import autoshard
import autoshard.wrap
from autoshard import fully_shard
from autoshard.runtime.sharding.find_units import find_units, override_mixed_precision
from autoshard.runtime.sharding.wrap_policies import Policy
from autoshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)


class Model(nn.Module):
    """Holds what it is given, under the given names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def paths(model: nn.Module, units: dict[nn.Module, Any]) -> dict[str, Any]:
    names = {module: name for name, module in model.named_modules()}
    return {names[unit]: overrides for unit, overrides in units.items()}


def found(model: nn.Module, policy: Policy | None, ignored: Any = frozenset()) -> list[str]:
    return list(paths(model, find_units(model, policy, ignored)))


def fives(count: int) -> list[nn.Module]:
    """Layers of 30 elements each."""
    return [nn.Linear(5, 5) for _ in range(count)]


class MarkerArguments:
    """A policy of FSDP1's form that remembers what it was asked."""

    def __init__(self, policy: Callable[..., bool] = always_wrap_policy) -> None:
        self.policy = policy
        self.calls: list[tuple[nn.Module, bool, int]] = []

    def __call__(self, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        self.calls.append((module, recurse, nonwrapped_numel))
        return self.policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)


# ---- the names


def test_every_public_name_of_torch_is_here() -> None:
    assert set(fsdp_wrap.__all__) <= set(vars(autoshard.wrap))


@pytest.mark.parametrize("name", sorted(set(fsdp_wrap.__all__) - {"ModuleWrapPolicy"}))
def test_arguments_have_the_names_and_defaults_of_torch(name: str) -> None:
    def shown(module: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert shown(autoshard.wrap) == shown(fsdp_wrap)


# ---- order


@pytest.mark.parametrize(
    "policy",
    [
        always_wrap_policy,
        lambda module: True,
        ModuleWrapPolicy({nn.Module}),
        CustomPolicy(lambda m: True),
    ],
    ids=["FSDP1's form", "function", "classes", "custom"],
)
def test_a28_parents_first_and_a29_without_the_root(policy: Policy) -> None:
    assert found(Net(1), policy) == [
        "embed",
        "layers.0",
        "layers.0.norm",
        "layers.0.up",
        "layers.0.down",
        "head",
    ]


@pytest.mark.parametrize(
    "policy", [ModuleWrapPolicy({Block, Model}), lambda m: isinstance(m, (Block, Model))]
)
def test_a28_a_module_in_several_places_comes_after_all_around_it(policy: Policy) -> None:
    """Sharded backwards, it is sharded before each of them."""
    shared = Block()
    model = Model(first=shared, outer=Model(inner=Model(again=shared)), last=Block())
    assert found(model, policy) == ["outer", "outer.inner", "first", "last"]


def test_a28_and_d11_a_module_in_several_places_is_one_unit_and_is_asked_about_once() -> None:
    shared = nn.Linear(5, 5)
    model = Model(left=Model(layer=shared), right=Model(layer=shared, own=nn.Linear(5, 5)))
    asked = MarkerArguments(partial(size_based_auto_wrap_policy, min_num_params=30))
    assert found(model, asked) == ["left.layer", "right.own"]
    assert [(recurse, numel) for module, recurse, numel in asked.calls if module is shared] == [
        (True, 30),
        (False, 30),
    ]
    assert (model.right, False, 0) in asked.calls  # what it shares is in a unit already


# ---- the policies


def test_a31_always() -> None:
    """No error for what is never called, nothing for what has no parameters."""
    model = Model(
        layers=nn.ModuleList(fives(1)),
        towers=nn.ModuleDict({"a": nn.Linear(2, 2)}),
        extra=nn.ParameterList([nn.Parameter(torch.ones(2))]),
        body=nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
    )
    assert found(model, always_wrap_policy) == ["layers.0", "towers.a", "body", "body.0"]


def test_a32_classes() -> None:
    model = Net(2)
    assert found(model, ModuleWrapPolicy({Block})) == ["layers.0", "layers.1"]
    units = list(find_units(model, ModuleWrapPolicy([Block])).values())
    assert units == [{}, {}]
    assert units[0] is not units[1]


def test_a32_classes_called_in_both_forms() -> None:
    policy = ModuleWrapPolicy({Block})
    assert policy(Block())
    assert not policy(nn.ReLU())
    assert policy(nn.ReLU(), True)
    assert policy(nn.ReLU(), recurse=True, nonwrapped_numel=3)
    assert not policy(nn.ReLU(), False, 3)
    assert policy(module=Block(), recurse=False, nonwrapped_numel=3)
    assert repr(policy) == "ModuleWrapPolicy(Block)"


def test_a32_ignored_with_all_below() -> None:
    model = Net(3)
    for policy in (ModuleWrapPolicy({Block, nn.Linear}), always_wrap_policy):
        names = found(model, policy, {model.layers[1]})
        assert "layers.0.up" in names
        assert not [name for name in names if name.startswith("layers.1")]
    assert found(model, None, {model.layers[0], model.layers[2]}) == ["layers.1"]


def test_a33_what_custom_policies_return() -> None:
    given = {"reshard_after_forward": False}
    answers: dict[str, Any] = {"no": False, "empty": {}, "yes": True, "own": given, "too": given}
    model = Model(**{name: nn.Linear(2, 2) for name in answers})
    names = {module: name for name, module in model.named_modules()}
    units = paths(model, find_units(model, CustomPolicy(lambda module: answers[names[module]])))
    assert units == {"yes": {}, "own": given, "too": given}
    assert units["own"] is not given
    assert units["own"] is not units["too"]


@pytest.mark.parametrize("answer", [None, 1, "yes", [True]])
def test_a33_what_custom_policies_may_not_return(answer: Any) -> None:
    with pytest.raises(ValueError, match="CustomPolicy") as raised:
        find_units(Net(1), CustomPolicy(lambda module: answer))
    assert f"returned {answer!r} for embed" in str(raised.value)
    assert "True, False, or a dict" in str(raised.value)


def test_a33_a_function_that_returns_overrides_is_told_of_custom_policy() -> None:
    with pytest.raises(ValueError, match=r"for embed: .*CustomPolicy\(function\)"):
        find_units(Net(1), lambda module: {"reshard_after_forward": False})


def test_a33_overrides_that_fully_shard_does_not_take(fake_world: None) -> None:
    model = Net(2)
    policy = CustomPolicy(lambda module: isinstance(module, Block) and {"sharding_strategy": 2})
    with pytest.raises(ValueError, match=r"'sharding_strategy' for layers\.0, ") as raised:
        autoshard.shard(model, policy=policy)
    assert "valid keys: strategy, mesh, reshard_after_forward" in str(raised.value)
    assert not [module for module in model.modules() if isinstance(module, autoshard.ShardedModule)]


def test_a33_overrides_reach_the_unit(fake_world: None) -> None:
    model = Net(3)
    second = model.layers[1]
    policy = CustomPolicy(
        lambda module: (
            {"reshard_after_forward": False} if module is second else type(module) is Block
        )
    )
    autoshard.shard(model, policy=policy)
    reshards = [model.layers[n]._autoshard_unit.reshards for n in range(3)]
    assert reshards == [True, False, True]


def test_a34_function() -> None:
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: type(module) is Block)
    assert found(Net(2), policy) == ["layers.0", "layers.1"]
    assert policy(module=nn.ReLU(), recurse=True, nonwrapped_numel=0)


def test_a35_transformer_leaves_tied_weights_in_the_root() -> None:
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    assert found(Net(2, tied=True), policy) == ["layers.0", "layers.1"]


def test_a36_any_of_several() -> None:
    norms = partial(_wrap_module_cls_individually, module_classes=[nn.BatchNorm1d])
    blocks = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    body = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()))
    model = Model(block=Block(), body=body)
    assert found(model, partial(_or_policy, policies=[norms, blocks])) == ["block", "body.1.0"]
    containers = ModuleWrapPolicy({nn.Sequential})
    assert found(model, partial(_or_policy, policies=[norms, containers])) == [
        "body",
        "body.1",
        "body.1.0",
    ]


def test_a37_size_based_counts_what_is_left() -> None:
    """Of 120 elements the inner 60 are one unit; then 60 are left, enough for their parent."""
    inner = nn.Sequential(*fives(2), nn.Sequential(*fives(2)))
    asked = MarkerArguments(partial(size_based_auto_wrap_policy, min_num_params=40))
    assert found(inner, asked) == ["2"]
    assert asked.calls[0] == (inner, True, 120)
    assert (inner, False, 60) not in asked.calls  # never the root

    asked.calls.clear()
    assert found(nn.Sequential(inner), asked) == ["0", "0.2"]
    assert (inner, False, 60) in asked.calls


@pytest.mark.parametrize(("enough", "units"), [(30, ["0", "1"]), (31, []), (60, []), (61, [])])
def test_a37_enough_is_at_least_the_limit(enough: int, units: list[str]) -> None:
    policy = partial(size_based_auto_wrap_policy, min_num_params=enough)
    assert found(nn.Sequential(*fives(2)), policy) == units


def test_a37_limit_by_default() -> None:
    def large(elements: int) -> nn.Module:
        return Model(large=nn.Embedding(elements, 1, device="meta"))

    assert found(large(10**8), size_based_auto_wrap_policy) == ["large"]
    assert found(large(10**8 - 1), size_based_auto_wrap_policy) == []


def test_a37_leaves_and_exclusions() -> None:
    """A leaf is asked about on the way down only: it is no unit itself, its parent has it."""
    policy = partial(size_based_auto_wrap_policy, min_num_params=1)
    model = Model(
        stage=Model(attention=nn.MultiheadAttention(4, 2)), layers=nn.ModuleList(fives(1))
    )
    attention = ["stage.attention", "stage.attention.out_proj"]
    assert found(model, policy) == ["stage", "layers.0"]
    assert found(model, partial(policy, force_leaf_modules=set())) == [*attention, "layers.0"]
    assert found(model, partial(policy, force_leaf_modules={nn.ModuleList})) == attention
    assert found(model, partial(policy, exclude_wrap_modules={nn.Linear})) == ["stage"]


def test_a37_what_an_excluded_module_has_is_left_for_its_parent() -> None:
    policy = partial(size_based_auto_wrap_policy, min_num_params=60)
    model = Model(stage=Model(layers=nn.ModuleList(fives(2))))
    assert found(model, policy) == ["stage"]


def test_a37_default_sets_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    monkeypatch.setattr(size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Linear})
    policy = partial(size_based_auto_wrap_policy, min_num_params=30)
    assert found(nn.Sequential(*fives(2)), policy) == []


def test_a38_a_refusal_to_look_below_is_no_for_all_of_it() -> None:
    def not_below(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return not isinstance(module, Block)

    assert found(Net(1), not_below) == ["embed", "head"]


def test_a38_ignored_parameters_are_not_counted() -> None:
    model = Model(stage=Model(kept=nn.Linear(5, 5), unmanaged=nn.Linear(5, 5)))
    asked = MarkerArguments(partial(size_based_auto_wrap_policy, min_num_params=40))
    assert found(model, asked) == ["stage"]
    asked.calls.clear()
    assert found(model, asked, {model.stage.unmanaged}) == []
    assert [numel for _, _, numel in asked.calls] == [30]
    assert found(model, always_wrap_policy, {model.stage.kept, model.stage.unmanaged}) == []


def test_a38_a_tied_parameter_counts_once() -> None:
    model = Model(pair=Model(one=nn.Linear(5, 5), two=nn.Linear(5, 5)))
    model.pair.two.weight = model.pair.one.weight
    asked = MarkerArguments(partial(size_based_auto_wrap_policy, min_num_params=30))
    assert found(model, asked) == ["pair.one", "pair.two"]
    assert (model.pair, True, 35) in asked.calls
    assert (model.pair, False, 0) in asked.calls


@pytest.mark.parametrize(
    "policy",
    [
        "Block",
        {Block},
        Block,
        partial(lambda_auto_wrap_policy),
        partial(transformer_auto_wrap_policy),
        lambda module, recurse, numel: True,
        lambda: True,
    ],
)
def test_what_cannot_be_a_policy(policy: Any) -> None:
    with pytest.raises(TypeError, match=r"functools\.partial"):
        find_units(Net(1), policy)


def test_functions_with_other_arguments() -> None:
    always = found(Net(1), always_wrap_policy)
    assert found(Net(1), callable) == always  # written in C
    assert found(Net(1), lambda m, *rest: isinstance(m, Block)) == ["layers.0"]
    assert found(Net(1), lambda m, cls=Block: isinstance(m, cls)) == ["layers.0"]
    assert found(Net(1), lambda module, **rest: True) == always


def test_policies_of_torch_itself() -> None:
    assert found(Net(1), fsdp_wrap.ModuleWrapPolicy({Block})) == ["layers.0"]
    policy = partial(fsdp_wrap.size_based_auto_wrap_policy, min_num_params=40)
    assert found(nn.Sequential(nn.Sequential(*fives(2))), policy) == ["0"]


# ---- mixed precision, frozen parameters, what is sharded already


def test_a30_and_d13_mixed_precision_override() -> None:
    model = Net(2)
    policy = CustomPolicy(
        lambda module: {"reshard_after_forward": False} if module is model.layers[0].norm else False
    )
    before = find_units(model, policy)
    units = override_mixed_precision(
        model, [nn.LayerNorm, nn.Embedding], before, {model.layers[1].down}
    )
    assert paths(model, units) == {
        "embed": {"mp_policy": None},
        "layers.0.norm": {"reshard_after_forward": False, "mp_policy": None},
        "layers.1.norm": {"mp_policy": None},
    }
    assert len(set(map(id, units.values()))) == 3
    assert paths(model, before) == {"layers.0.norm": {"reshard_after_forward": False}}


def test_a30_ignored_the_root_and_containers_are_left_out() -> None:
    model = nn.Sequential(Block(), nn.Sequential(nn.LayerNorm(2)), nn.ModuleList([nn.LayerNorm(2)]))
    classes = [nn.Sequential, nn.ModuleList, nn.LayerNorm]
    units = override_mixed_precision(model, classes, {}, {model[0]})
    assert list(paths(model, units)) == ["1", "1.0", "2.0"]


def test_a30_parents_stay_first() -> None:
    model = Net(1)
    units = override_mixed_precision(
        model, [Block], find_units(model, lambda m: m is model.layers[0].up)
    )
    assert list(paths(model, units)) == ["layers.0", "layers.0.up"]


def test_a30_and_d53_a_norm_without_parameters_is_overridden_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    units = override_mixed_precision(model, [nn.modules.batchnorm._BatchNorm], {})
    assert paths(model, units) == {"1": {"mp_policy": None}}


def test_a40_units_with_frozen_and_trainable_parameters_are_logged(
    fake_world: None, caplog: pytest.LogCaptureFixture
) -> None:
    """As with LoRA: allowed, and told at level INFO, not as a warning."""
    model = Net(3, tied=False)
    model.layers[0].up.requires_grad_(False)
    model.layers[1].requires_grad_(False)
    model.embed.requires_grad_(False)
    with caplog.at_level(logging.INFO, logger="autoshard.runtime.sharding"):
        autoshard.shard(model)
    first, second = [record.getMessage() for record in caplog.records]
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert first == (
        "unit root has frozen parameters ['embed.weight'] beside trainable ones ['head.weight']"
    )
    assert second == (
        "unit layers.0 has frozen parameters ['layers.0.up.weight', 'layers.0.up.bias'] beside "
        "trainable ones ['layers.0.norm.weight', 'layers.0.norm.bias', 'layers.0.down.weight', "
        "'layers.0.down.bias']"
    )


@pytest.mark.parametrize("policy", [None, always_wrap_policy, ModuleWrapPolicy({nn.Linear})])
def test_a41_a_module_that_is_sharded_already(fake_world: None, policy: Policy | None) -> None:
    model = Net(3)
    fully_shard(model.layers[1])
    with pytest.raises(ValueError, match=r"layers\.1 \(Block\) is sharded already") as raised:
        autoshard.shard(model, policy=policy)
    assert "call fully_shard on every unit and then on the model" in str(raised.value)
    assert not isinstance(model.layers[0], autoshard.ShardedModule)
    assert "layers.0" in found(model, ModuleWrapPolicy({Block}), {model.layers[1]})


# ---- enable_wrap and wrap


def record(module: nn.Module, **arguments: Any) -> tuple[nn.Module, dict[str, Any]]:
    return module, arguments


def is_active() -> bool:
    return wrap(nn.ReLU()).__class__ is not nn.ReLU


def test_a39_wrap_outside_is_the_identity() -> None:
    layer = nn.Linear(2, 2)
    assert wrap(layer, mesh=3) is layer


def test_a39_arguments_of_wrap_come_before_those_of_the_context() -> None:
    layer = nn.Linear(2, 2)
    with enable_wrap(wrapper_cls=record, mesh="m", reshard_after_forward=True):
        assert wrap(layer) == (layer, {"mesh": "m", "reshard_after_forward": True})
        assert wrap(layer, mesh="n") == (layer, {"mesh": "n", "reshard_after_forward": True})
        assert wrap(layer) == (layer, {"mesh": "m", "reshard_after_forward": True})
    assert not is_active()


def test_a39_arguments_of_the_module_come_first() -> None:
    layer = nn.Linear(2, 2)
    layer._wrap_overrides = {"mp_policy": None, "mesh": "own"}
    with enable_wrap(wrapper_cls=record, mesh="m", x=1):
        assert wrap(layer, mesh="n") == (layer, {"mesh": "own", "x": 1, "mp_policy": None})
    assert layer._wrap_overrides == {"mp_policy": None, "mesh": "own"}


def test_a39_and_d12_nesting_raises_and_leaves_the_outer_context() -> None:
    with enable_wrap(wrapper_cls=record, mesh="outer"):
        with pytest.raises(NotImplementedError, match="inside enable_wrap"):  # noqa: SIM117
            with enable_wrap(wrapper_cls=record, mesh="inner"):
                pass
        assert wrap(nn.ReLU())[1] == {"mesh": "outer"}
    assert not is_active()


def test_a39_and_d12_an_exception_leaves_the_context() -> None:
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=record):  # noqa: PT012
        assert is_active()
        raise KeyError
    assert not is_active()


def test_a39_and_d12_one_context_entered_again() -> None:
    context = enable_wrap(wrapper_cls=record, mesh="m")
    for _ in range(2):
        with context:
            assert wrap(nn.ReLU())[1] == {"mesh": "m"}
            with pytest.raises(NotImplementedError), context:
                pass
            assert is_active()
        assert not is_active()


def test_a39_as_a_decorator() -> None:
    @enable_wrap(wrapper_cls=record)
    def build() -> bool:
        return is_active()

    assert [build(), is_active(), build()] == [True, False, True]


def test_a39_a_context_is_of_one_thread() -> None:
    seen: list[bool] = []

    def other() -> None:
        seen.append(is_active())
        with enable_wrap(wrapper_cls=record):
            seen.append(is_active())

    with enable_wrap(wrapper_cls=record):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert is_active()
    assert seen == [False, True]


@pytest.mark.parametrize("wrapper_cls", [None, "fully_shard"])
def test_a39_wrapper_that_cannot_be_called(wrapper_cls: Any) -> None:
    with pytest.raises(TypeError, match="wrapper_cls"):
        enable_wrap(wrapper_cls=wrapper_cls)


def test_a39_in_place_with_fully_shard(fake_world: None) -> None:
    layer = nn.Linear(2, 2)
    with enable_wrap(wrapper_cls=fully_shard, reshard_after_forward=False):
        assert wrap(layer) is layer
    assert isinstance(layer, autoshard.ShardedModule)
    assert layer._autoshard_unit.settings.reshard_after_forward is False
