"""Which modules become units: by policy, by Hugging Face's list, or because they repeat."""

from __future__ import annotations

import pytest
from support.architectures import architecture
from support.models import Block, Net
from torch import Tensor, nn

from autoshard.runtime.sharding.find_units import ModuleWrapPolicy, Policy, find_units


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class Mixture(nn.Module):
    """A block with repeated blocks inside."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Stateless(nn.Module):
    """A block with children but no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class SmallBlock(Block):
    pass


class Model(nn.Module):
    """Holds what it is given, under the given names."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return x


def found(model: nn.Module, policy: Policy | None = None) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in find_units(model, policy)]


def blocks(count: int, make: type[nn.Module] = Block) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def test_repeated_in_a_list() -> None:
    assert found(Net(3)) == ["layers.0", "layers.1", "layers.2"]


def test_repeated_in_a_sequential() -> None:
    model = Model(inner=nn.Linear(2, 2), body=nn.Sequential(*blocks(2), nn.Linear(6, 2)))
    assert found(model) == ["body.0", "body.1"]


def test_model_that_is_a_sequential() -> None:
    assert found(nn.Sequential(nn.Linear(2, 6), *blocks(2))) == ["1", "2"]


def test_repeated_in_a_dict() -> None:
    assert found(Model(towers=nn.ModuleDict({"a": Block(), "b": Block()}))) == [
        "towers.a",
        "towers.b",
    ]


def test_recurrent_layers() -> None:
    """One alone, behind another kind of module, is no block."""
    layers = nn.ModuleList([nn.LSTM(2, 2), nn.Linear(2, 2), nn.LSTM(2, 2), nn.GRU(2, 2)])
    assert found(Model(layers=layers)) == ["layers.0", "layers.2"]


def test_two_stacks() -> None:
    model = Model(encoder=blocks(2), decoder=blocks(3, SmallBlock))
    assert found(model) == [
        "encoder.0",
        "encoder.1",
        "decoder.0",
        "decoder.1",
        "decoder.2",
    ]


def test_two_stacks_deep_inside() -> None:
    model = Model(text=Model(layers=blocks(2)), image=Model(layers=blocks(2)))
    assert found(model) == ["text.layers.0", "text.layers.1", "image.layers.0", "image.layers.1"]


def test_blocks_inside_blocks_stay_with_theirs() -> None:
    model = Model(first=nn.Linear(2, 2), layers=blocks(2, Mixture))
    assert found(model) == ["layers.0", "layers.1"]


def test_blocks_inside_blocks_of_one_class_stay_with_theirs() -> None:
    def stage() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))

    assert found(nn.Sequential(stage(), stage())) == ["0", "1"]


def test_blocks_in_a_block_that_stands_alone() -> None:
    assert found(Model(only=Mixture())) == [f"only.experts.{n}" for n in range(3)]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),  # layers, not blocks
        Net(1),
        Model(a=Block(), b=Block()),  # not beside each other in a container
        Model(layers=nn.ModuleList([Block(), SmallBlock()])),
        Model(),
    ],
    ids=["linear", "layers", "one block", "attributes", "two classes", "empty"],
)
def test_nothing_repeats(model: nn.Module) -> None:
    assert found(model) == []


def test_lists_of_lists() -> None:
    """A list is never called, so it is no unit; what it holds may be."""
    model = Model(stages=nn.ModuleList([blocks(2), blocks(2)]))
    assert found(model) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]


def test_blocks_without_parameters_are_no_units() -> None:
    assert found(Model(layers=blocks(3, Stateless))) == []
    assert found(nn.Sequential(*blocks(2, Stateless), *blocks(2))) == ["2", "3"]


def test_shared_block_is_one_unit() -> None:
    shared = Block()
    model = Model(
        encoder=nn.ModuleList([shared, Block()]), decoder=nn.ModuleList([Block(), shared])
    )
    assert found(model) == ["encoder.0", "encoder.1", "decoder.0"]


def test_class_policy() -> None:
    model = Net(2)
    assert found(model, ModuleWrapPolicy({Block})) == ["layers.0", "layers.1"]
    assert found(model, ModuleWrapPolicy([nn.Embedding, Block])) == [
        "embed",
        "layers.0",
        "layers.1",
    ]


def test_class_policy_takes_subclasses() -> None:
    model = Model(layers=nn.ModuleList([Block(), SmallBlock()]))
    assert found(model, ModuleWrapPolicy([Block])) == ["layers.0", "layers.1"]
    assert found(model, ModuleWrapPolicy([SmallBlock])) == ["layers.1"]


def test_class_policy_is_shown_in_one_order() -> None:
    assert repr(ModuleWrapPolicy({nn.Linear, Block})) == "ModuleWrapPolicy(Block, Linear)"
    assert repr(ModuleWrapPolicy([Block, nn.Linear])) == "ModuleWrapPolicy(Block, Linear)"


def test_class_policy_on_parents_and_children() -> None:
    """Parents come first: the caller shards in the opposite order."""
    assert found(Net(1), ModuleWrapPolicy([Block, nn.Linear])) == [
        "layers.0",
        "layers.0.up",
        "layers.0.down",
        "head",
    ]


def test_class_policy_that_fits_nothing() -> None:
    assert found(Net(3), ModuleWrapPolicy([Expert])) == []
    assert found(Net(3), ModuleWrapPolicy([])) == []


def test_function_as_policy() -> None:
    def wide(module: nn.Module) -> bool:
        return sum(param.numel() for param in module.parameters()) > 60

    assert found(Net(2, tied=False), wide) == ["embed", "layers.0", "layers.1", "head"]


def test_policy_is_not_asked_for_what_cannot_be_a_unit() -> None:
    """Not the model itself, no container without forward, nothing without parameters."""
    model = Model(layers=blocks(1), act=nn.ReLU(), rest=nn.Sequential(nn.Linear(2, 2)))
    assert found(model, lambda module: True) == [
        "layers.0",
        "layers.0.norm",
        "layers.0.up",
        "layers.0.down",
        "rest",
        "rest.0",
    ]


def test_policy_with_a_shared_block() -> None:
    shared = Block()
    model = Model(left=Model(block=shared), right=Model(block=shared))
    assert found(model, ModuleWrapPolicy([Block])) == ["left.block"]


@pytest.mark.parametrize(
    ("name", "cls", "count"), [("llama", "LlamaDecoderLayer", 2), ("t5", "T5Block", 4)]
)
def test_hugging_face(name: str, cls: str, count: int) -> None:
    assert [type(unit).__name__ for unit in find_units(architecture(name), None)] == [cls] * count


def test_list_of_hugging_face_wins_over_repetition() -> None:
    model = Model(layers=blocks(2), only=SmallBlock())
    model._no_split_modules = ["SmallBlock"]
    assert found(model) == ["only"]


def test_list_of_hugging_face_that_names_nothing_here() -> None:
    model = Model(layers=blocks(2))
    model._no_split_modules = ["Absent"]
    assert found(model) == ["layers.0", "layers.1"]
