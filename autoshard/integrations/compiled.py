"""Compiling a model with autoshard and sharding it before its first call, for all hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autoshard import _torch
from autoshard.runtime.sharding.first_call import shard_as_compiled
from autoshard.runtime.unit.unit import unit_of


def compile_and_shard(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile `module` with autoshard, in place, and shard it; what is sharded already stays.

    A module that was compiled with autoshard keeps its options. All ranks call this.

    options: of the backend.
    Raises ValueError if it is compiled with another backend, and as `autoshard.shard`.
    """
    if unit_of(module) is not None:
        return
    if _torch.dynamo.compiled_module(module) is None:
        module.compile(backend="autoshard", options=dict(options))
    if not shard_as_compiled(module):
        raise ValueError(
            f"{type(module).__name__} is compiled with another backend: give the module itself, "
            "which autoshard compiles"
        )
