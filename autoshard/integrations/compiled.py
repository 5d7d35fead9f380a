"""Compiling a model with autoshard and sharding it before its first call, for all hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autoshard import _torch
from autoshard.options import CompileOptions
from autoshard.runtime.sharding.adopt import check_said
from autoshard.runtime.sharding.first_call import shard_as_compiled
from autoshard.runtime.unit.unit import unit_of


def compile_and_shard(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile `module` with autoshard, in place, and shard it; all ranks call this.

    What is sharded already stays so, and what is compiled already keeps its options.

    options: of the backend.
    Raises ValueError if it is compiled with another backend, or sharded otherwise than `options`
    say, and as `autoshard.shard`.
    """
    is_sharded = unit_of(module) is not None
    if _torch.dynamo.compiled_module(module) is None:
        if is_sharded:
            check_said(module, CompileOptions.read(options).shard_arguments())
        module.compile(backend="autoshard", options=dict(options))
    if not is_sharded and not shard_as_compiled(module):
        raise ValueError(
            f"{type(module).__name__} is compiled with another backend: give the module itself, "
            "which autoshard compiles"
        )
