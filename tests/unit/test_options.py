"""What `options=` of the backend may hold, and what it says of what it may not."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard import ModuleWrapPolicy
from autoshard.options import CompileOptions

NAMES = [field.name for field in dataclasses.fields(CompileOptions)]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def only_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize("options", [None, {}])
def test_defaults(options: dict[str, Any] | None) -> None:
    assert CompileOptions.read(options) == CompileOptions(
        lowering="inductor",
        bucketing="auto",
        dump=None,
        strict=False,
        mesh=None,
        policy=None,
        strategy="full_shard",
        sync_module_states=True,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lowering", "inductor"),
        ("lowering", "eager"),
        ("bucketing", "auto"),
        ("bucketing", "per_unit"),
        ("memory_budget", 2**30),
        ("memory_budget", 0.9),
        ("topology", "h100"),
        ("bucketing", "none"),
        ("bucketing", []),
        ("bucketing", ["layers.0", "head"]),
        ("bucketing", [["layers.0", "layers.1"], "head", []]),
        ("bucketing", (("layers.0",), "head")),
        ("dump", None),
        ("dump", "graphs"),
        ("strict", True),
        ("strict", False),
        ("mode", "max-autotune"),
        ("mode", "default"),
        ("inductor", {"max_autotune": True, "triton.cudagraphs": False}),
        ("mesh", None),
        ("policy", None),
        ("policy", only_linear),
        ("policy", ModuleWrapPolicy([nn.Linear])),
        ("strategy", "full_shard"),
        ("strategy", "shard_grad_op"),
        ("sync_module_states", True),
        ("sync_module_states", False),
    ],
)
def test_valid_value(name: str, value: object) -> None:
    options = CompileOptions.read({name: value})
    assert getattr(options, name) == value
    for other in set(NAMES) - {name}:
        assert getattr(options, other) == getattr(CompileOptions(), other)


def test_valid_mesh(mesh: DeviceMesh) -> None:
    assert CompileOptions.read({"mesh": mesh}).mesh is mesh


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lowering", "cuda", "one of ['inductor', 'eager']"),
        ("lowering", None, "one of ['inductor', 'eager']"),
        ("lowering", ["eager"], "one of ['inductor', 'eager']"),
        ("bucketing", "by_size", "one of ['auto', 'per_unit', 'none'] or a list of module names"),
        ("bucketing", None, "or a list of module names or of lists of them"),
        ("bucketing", 25, "or a list of module names or of lists of them"),
        ("bucketing", [1], "or a list of module names or of lists of them"),
        ("bucketing", [["layers.0", 1]], "or a list of module names or of lists of them"),
        ("bucketing", [[["layers.0"]]], "or a list of module names or of lists of them"),
        ("bucketing", {"layers.0": 1}, "or a list of module names or of lists of them"),
        ("memory_budget", 0, "a number of bytes, or a fraction"),
        ("memory_budget", 1.5, "a number of bytes, or a fraction"),
        ("memory_budget", True, "a number of bytes, or a fraction"),
        ("memory_budget", "80GB", "a number of bytes, or a fraction"),
        ("topology", 8, "a JSON file's path"),
        ("topology", "h1000", "there is no topology"),
        ("dump", True, "a folder's path"),
        ("dump", 3, "a folder's path"),
        ("strict", 1, "True or False"),
        ("strict", "yes", "True or False"),
        ("strict", None, "True or False"),
        ("mode", "fast", "one of ['default'"),
        ("inductor", ["max_autotune"], "a dict of Inductor's options"),
        ("mesh", (2,), "a DeviceMesh"),
        ("mesh", "cpu", "a DeviceMesh"),
        ("policy", "Block", "a ModuleWrapPolicy or a function of a module"),
        ("policy", {nn.Linear}, "a ModuleWrapPolicy or a function of a module"),
        ("strategy", "zero3", "one of ['full_shard', 'shard_grad_op', 'no_shard'"),
        ("strategy", None, "one of ['full_shard', 'shard_grad_op', 'no_shard'"),
        ("strategy", ["full_shard"], "one of ['full_shard', 'shard_grad_op', 'no_shard'"),
        ("sync_module_states", 0, "True or False"),
        ("sync_module_states", None, "True or False"),
    ],
)
def test_wrong_value(name: str, value: object, expected: str) -> None:
    with pytest.raises(ValueError, match=f"option '{name}'") as raised:
        CompileOptions.read({name: value})
    assert repr(value) in str(raised.value)
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_autotun", "is no option of Inductor's"),
        ("reorder_for_peak_memory", "which autoshard sets itself"),
        ("triton.cudagraphs", "which autoshard sets itself"),
        ("post_grad_custom_post_pass", "which autoshard sets itself"),
    ],
)
def test_options_of_inductor_that_are_not_taken(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"option 'inductor'.*{name}") as raised:
        CompileOptions.read({"inductor": {name: True}})
    assert expected in str(raised.value)


@pytest.mark.parametrize(
    "arguments", [{"mode": "reduce-overhead"}, {"options": {"mode": "reduce-overhead"}}]
)
def test_cuda_graphs_of_parts_of_a_step(arguments: dict[str, Any]) -> None:
    """Refused where torch.compile is called, with what to do instead."""
    with pytest.raises(ValueError, match=r"capture the whole step with torch\.cuda\.graph"):
        torch.compile(nn.Linear(2, 2), backend="autoshard", **arguments)


def test_a_mode_is_settings_of_inductor() -> None:
    """Given either way, with the options beside it, which go first; and never CUDA graphs."""
    device = torch.device("cpu")
    options = CompileOptions(mode="max-autotune", inductor={"coordinate_descent_tuning": False})
    settings = options.resolve(device).inductor
    assert settings["max_autotune"] is True
    assert settings["coordinate_descent_tuning"] is False
    assert "triton.cudagraphs" not in settings
    assert CompileOptions().resolve(device).inductor == {}


@pytest.mark.parametrize("options", [{"bucket": "auto"}, {"strict": True, "Lowering": "eager"}])
def test_unknown_key_lists_the_valid_ones(options: dict[str, Any]) -> None:
    (unknown,) = set(options) - set(NAMES)
    with pytest.raises(ValueError, match="unknown option") as raised:
        CompileOptions.read(options)
    assert repr(unknown) in str(raised.value)
    assert ", ".join(NAMES) in str(raised.value)
    assert "'strict'" not in str(raised.value)


def test_every_unknown_key_is_named() -> None:
    with pytest.raises(ValueError, match="unknown option 'a', 'b' for"):
        CompileOptions.read({"b": 1, "strict": True, "a": 2})


def test_keys_that_are_no_strings_are_unknown() -> None:
    with pytest.raises(ValueError, match="unknown option 1, 'a' for"):
        CompileOptions.read({"a": 1, 1: 2})  # type: ignore[dict-item]


def test_given_options_are_not_changed() -> None:
    given = {"bucketing": [["a", "b"]], "dump": str(Path("graphs"))}
    CompileOptions.read(given)
    assert given == {"bucketing": [["a", "b"]], "dump": "graphs"}


@pytest.mark.parametrize("name", NAMES)
def test_options_are_frozen(name: str) -> None:
    options = CompileOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, name, None)


def test_shard_arguments() -> None:
    policy = ModuleWrapPolicy([nn.Linear])
    options = CompileOptions.read({"policy": policy, "strategy": "shard_grad_op", "strict": True})
    arguments = options.shard_arguments()
    assert list(arguments) == list(inspect.signature(autoshard.shard).parameters)[1:]
    assert {
        name: arguments[name] for name in ("mesh", "policy", "strategy", "sync_module_states")
    } == {
        "mesh": None,
        "policy": policy,
        "strategy": "shard_grad_op",
        "sync_module_states": True,
    }


@pytest.mark.parametrize(
    ("options", "gpu", "topology"),
    [
        ({}, "NVIDIA H100 80GB HBM3", "h100"),
        ({}, "NVIDIA GeForce RTX 4090", None),
        ({}, "NVIDIA RTX A1000 Laptop GPU", None),
        ({}, "NVIDIA GB200", "b200-nvl72"),
        ({}, None, "gloo"),
        ({"bucketing": "per_unit"}, None, None),
        ({"memory_budget": 0.5}, "NVIDIA GeForce RTX 4090", "h100"),
        ({"memory_budget": 0.5}, None, "gloo"),
        ({"topology": "l40s"}, "NVIDIA H100 80GB HBM3", "l40s"),
    ],
)
def test_what_plans_reckon_with(
    options: dict[str, Any],
    gpu: str | None,
    topology: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    device = torch.device("cuda" if gpu else "cpu")
    found = CompileOptions.read(options).resolve(device)
    assert (found.topology.name if found.topology else None) == topology
    assert found.searches == (found.bucketing == "auto" and topology is not None)
    assert not CompileOptions.read({**options, "bucketing": "none"}).resolve(device).searches


def test_ranks_per_node_are_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for told, per_node in (("4", 4), ("", 2), ("four", 2)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
        found = CompileOptions().resolve(torch.device("cuda")).topology
        assert found is not None
        assert found.ranks_per_node == per_node
