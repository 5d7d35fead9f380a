"""torchtitan: models of its Trainer are sharded and compiled by autoshard.

    torchrun --nproc-per-node 8 -m torchtitan.train \\
        --module autoshard.integrations.torchtitan --config llama3_8b \\
        --compile.enable --training.disable_cuda_graphs

This module has all config functions of torchtitan's models, so that one line is enough. A config
function of one's own calls `with_autoshard`, which also takes options.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from autoshard.integrations.compiled import compile_and_shard
from autoshard.options import CompileOptions
from autoshard.runtime.sharding import from_fsdp2

_Config = TypeVar("_Config")

_LOWERINGS = {"inductor": "inductor", "aot_eager": "eager", "eager": "eager"}
"""How code is lowered for each of torchtitan's `compile.backend`."""


def with_autoshard(config: _Config, **options: Any) -> _Config:
    """Have the Trainer of `config` shard and compile its model with autoshard; return `config`.

        def llama3_ours() -> Trainer.Config:
            return with_autoshard(llama3_8b(), bucketing="auto")

    config: a `Trainer.Config`, whose model spec is replaced.
    options: as of `parallelize`, which says what is kept and what is refused.
    """
    settings: Any = config  # torchtitan need not be installed, to import this
    function = parallelize(settings.model_spec.parallelize_fn, **options)
    settings.model_spec = dataclasses.replace(settings.model_spec, parallelize_fn=function)
    return config


def parallelize(function: Callable[..., nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """Make the `parallelize_fn` of a model spec from torchtitan's own for that model.

    torchtitan's function is called, and autoshard takes over what it has given to FSDP2: units,
    mesh (replicas, too), dtypes, what is resharded after forward, CPU offload, and the sum in place
    of a mean for gradients. Activation checkpointing is torchtitan's. With `compile.enable` and
    "model" in `compile.components`, the whole model is compiled with autoshard, not block by block;
    `compile.backend` is how: "inductor", or "aot_eager", which equals the eager runtime.
    Without, it runs on the eager runtime.

    options: of `torch.compile(..., backend="autoshard")`, without arguments of `autoshard.shard`,
        for which torchtitan's settings stand.

    Raises ValueError for a wrong option. The function raises ValueError for tensor, context,
    pipeline and expert parallelism, the backend "full_dtensor", symmetric memory, CUDA graphs, or
    another `compile.backend`; and for arguments of `autoshard.shard` among the options.
    """
    CompileOptions.read(options)

    @functools.wraps(function)
    def sharded(model: nn.Module, *, compile_config: Any, **settings: Any) -> nn.Module:
        """Shard `model`, and compile it if `compile_config` says so; all ranks call this."""
        _check(settings["parallelism"], settings["training"], compile_config)
        others = [each for each in compile_config.components if each != "model"]
        is_compiled = compile_config.enable and others != compile_config.components
        blocks = dataclasses.replace(compile_config, components=others)
        model = function(model, compile_config=blocks, **settings)
        if is_compiled:
            given = {"lowering": _LOWERINGS[compile_config.backend], **options}
            compile_and_shard(model, given)
        else:
            from_fsdp2.convert(model, {})
        return model

    return sharded


def _check(parallelism: Any, training: Any, compile_config: Any) -> None:
    """Raise ValueError for settings that autoshard can't be had with."""
    for name in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(parallelism, f"{name}_parallel_degree")
        if degree > 1:
            raise ValueError(
                f"autoshard stands in for FSDP2 alone: leave "
                f"parallelism.{name}_parallel_degree out, which is {degree}"
            )
    if parallelism.spmd_backend == "full_dtensor":
        raise ValueError(
            'inputs are DTensors with parallelism.spmd_backend="full_dtensor": give "spmd_types", '
            'or "partial_dtensor" with torch before 2.14'
        )
    if parallelism.enable_fsdp_symm_mem:
        raise ValueError("leave parallelism.enable_fsdp_symm_mem out: it sets FSDP2's collectives")
    if not training.disable_cuda_graphs:
        raise ValueError(
            "set training.disable_cuda_graphs: autoshard was not tried in torchtitan's CUDA graphs"
        )
    if compile_config.enable and compile_config.backend not in _LOWERINGS:
        raise ValueError(
            f"compile.backend is {compile_config.backend!r}; autoshard compiles the model, with "
            f"what it makes lowered as one of {sorted(_LOWERINGS)} says"
        )


def __getattr__(name: str) -> Any:
    """Return torchtitan's config function called `name`, with autoshard in what it returns.

    Raises AttributeError if there is none, ImportError if it may be one of a model that could not
    be imported.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    from torchtitan import models

    failed: list[str] = []
    for package in pkgutil.iter_modules(models.__path__):
        where = f"{models.__name__}.{package.name}.config_registry"
        try:
            registry = importlib.import_module(where)
        except ImportError as error:
            if error.name != where:  # it has one, which wants a package that is not there
                failed.append(f"{package.name} ({error})")
            continue
        function: Any = getattr(registry, name, None)
        if getattr(function, "__module__", None) == where:  # it is no import
            return lambda: with_autoshard(function())
    what = f"no model of torchtitan's that could be imported has a config function {name!r}"
    if failed:
        raise ImportError(f"{what}; these could not be: {', '.join(failed)}")
    raise AttributeError(what)
