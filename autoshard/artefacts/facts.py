"""Facts that an artefact depends on, by name, found alike where it is made and where it is loaded.

    torch                                   "2.13.0"
    mesh                                    "cpu [8] ('shard',)"
    parameter blocks.0.l.weight             "torch.float32 [8, 8] (Shard(dim=0),) trained in ..."
    unit blocks.0                           "{'reshard_after_forward': None, ...}"
    source pkg.model.Block                  "4d1f60c0a5d3b0c7"
    read model._modules['a'].scale          "0.5"

Two artefacts, or an artefact and a model, that differ do so in a fact with a name to tell.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autoshard import _torch, plan_cache
from autoshard.artefacts import guards, sources
from autoshard.options import CompileSettings
from autoshard.passes.ir import groups
from autoshard.runtime.eager.access import named_sharded, original_class
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import Unit

Facts = dict[str, str]


def of_process(settings: CompileSettings, device: torch.device) -> Facts:
    """Find what code depends on besides the model: versions, flags of torch, the options."""
    topology = settings.topology
    return {
        "autoshard": plan_cache.digest_of_sources(),
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{f"version of {name}": text for name, text in _torch.device.versions(device).items()},
        **(_torch.inductor.flags(settings.inductor) if settings.lowering == "inductor" else {}),
        "hooks of all modules": repr([guards.fact(each) for each in _torch.nn.global_hooks()]),
        "device": device.type,
        "option lowering": settings.lowering,
        "option bucketing": repr(settings.bucketing),
        "option inductor": repr(sorted(settings.inductor.items())),
        "topology": repr(dataclasses.asdict(topology)) if topology is not None else "none",
    }


def ambient(device: torch.device) -> Facts:
    """Find the flags of torch that kernels and dtypes depend on, which may change between calls."""
    found = {
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled(device.type)
        and torch.get_autocast_dtype(device.type),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
    }
    return {name: repr(value) for name, value in found.items()}


def of_model(model: nn.Module) -> Facts:
    """Find how `model` is sharded: its parameters, buffers, units and meshes.

    Sizes are global, and nothing in it is one rank's.
    """
    found: Facts = {"model": guards.fact(model)}
    for name, param in named_sharded(model):
        sharded = find(param)
        layout = f"{param.dtype} {list(param.shape)}"
        trained = "trained" if param.requires_grad else "frozen"
        if sharded is None:
            found[f"parameter {name}"] = f"{layout} {trained}, not sharded"
            continue
        unit = sharded.unit
        placed = f"{sharded.layout.placements}"
        found[f"parameter {name}"] = f"{layout} {placed} {trained} in {unit.name or 'the root'}"
        found[f"unit {unit.name or 'of the root'}"] = _of_unit(unit)
        found["mesh"] = found.get("mesh") or _of_mesh(sharded)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = guards.fact(buffer)
    for name, module in model.named_modules():
        hooks = [guards.fact(hook) for each in _torch.nn.hooks_of(module) for hook in each.values()]
        own = [hook for hook in hooks if not hook.startswith("function autoshard.")]
        if own:
            found[f"hooks of {name or 'the model'}"] = repr(own)
        cls = original_class(module)
        for attribute, value in module.__dict__.items():
            if hasattr(cls, attribute) and attribute != "_compiled_call_impl":
                found[f"own {name or 'the model'}.{attribute}"] = guards.fact(value)
    for cls in {original_class(module) for module in model.modules()}:
        for name, its in guards.methods_of(cls).items():
            found |= {f"methods of {name}: {method}": value for method, value in its}
        forward: Any = cls.forward  # type: ignore[attr-defined]  # it is one of modules
        found[f"forward of {cls.__module__}.{cls.__qualname__}"] = guards.fact(forward)
    return found


def _of_unit(unit: Unit) -> str:
    """Describe the settings of `unit`, and how it reduces; other units in them by name."""
    shown: dict[str, Any] = {}
    for field in dataclasses.fields(unit.settings):
        value = getattr(unit.settings, field.name)
        if field.name == "smaller":
            value = None if value is None else value.shard_world
        elif isinstance(value, tuple):
            value = [each.name for each in value]
        elif field.name == "all_gather" and value is not None:
            value = guards.fact(value)
        shown[field.name] = value
    return repr(shown)


def _of_mesh(sharded: ShardedParam) -> str:
    """Describe the mesh over which `sharded` is cut: device, sizes, what its axes are for."""
    axes = sharded.axes
    mesh = axes.mesh
    return (
        f"{mesh.device_type} {list(mesh.shape)} {mesh.mesh_dim_names}: {axes.shard_world} shards, "
        f"{axes.replicate_world} replicas"
    )


def of_sources(names: Iterable[tuple[str, str]]) -> Facts:
    """Find the digests of sources, of (module, qualified name)."""
    return {f"source {module}.{name}": sources.digest(module, name) for module, name in names}


def of_reads(paths: Iterable[str], model: nn.Module) -> Facts:
    """Find what is at `paths` of guards, by path; "nothing" where there is none."""
    return {path: guards.fact(guards.value_at(path, model)) for path in paths}


def named_reads(reads: Mapping[str, str]) -> Facts:
    """Name facts by path, as of `of_reads`, as they stand among others."""
    return {f"read {path}": value for path, value in reads.items()}


def differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Say for each fact that is not the same what it was as the artefact was made, and is now."""
    return [
        f"{name} was {_short(made.get(name))} and is {_short(here.get(name))}"
        for name in sorted({*made, *here}, key=lambda each: (_rank(each), each))
        if made.get(name) != here.get(name)
    ]


_FIRST = ("autoshard", "torch", "python", "version", "device", "option", "source", "read")
"""Kinds of facts of which others follow, in the order in which a message has them."""


def _rank(name: str) -> int:
    """Place of the kind of a fact in messages."""
    kind = name.partition(" ")[0]
    return _FIRST.index(kind) if kind in _FIRST else len(_FIRST)


def _short(text: str | None) -> str:
    """Shorten `text` for a message; None is of what is not there."""
    if text is None:
        return "not there"
    return text if len(text) <= 120 else f"{text[:117]}..."


def groups_of(param: ShardedParam) -> list[str]:
    """List the groups that graphs name for `param`, "" for none, in an order that is always this.

    They are those of its gather and reduce, the parts of the latter, and that of smaller shards.
    """
    smaller = param.unit.settings.smaller
    return [
        param.group,
        param.reduce_group,
        groups.shard_part(param.reduce_group),
        groups.replicate_part(param.reduce_group),
        "" if smaller is None else smaller.shard_group,
    ]


def tokens_of(params: Collection[ShardedParam]) -> dict[str, str]:
    """Give each group of `params` a name that says nothing of a process: "@3.0" for instance."""
    found: dict[str, str] = {}
    for number, param in enumerate(params):
        for place, group in enumerate(groups_of(param)):
            if group:
                found.setdefault(group, f"@{number}.{place}")
    return found
