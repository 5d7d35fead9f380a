"""Hugging Face Accelerate: what `prepare` is given is sharded and compiled by autoshard."""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    extract_model_from_parallel,
)
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import _torch
from autoshard.integrations.compiled import compile_and_shard
from autoshard.options import CompileOptions
from autoshard.runtime.unit.unit import unit_of

_Accelerator = TypeVar("_Accelerator", bound=Accelerator)

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def with_autoshard(accelerator: _Accelerator, **options: Any) -> _Accelerator:
    """Have `accelerator` shard and compile models with autoshard; return it.

        accelerator = with_autoshard(Accelerator(mixed_precision="bf16"), bucketing="auto")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    It is Accelerate's FSDP2 from then on, on GPUs and on CPUs, in which autoshard does the work:
    `accumulate`, `clip_grad_norm_`, `save_state`, `load_state`, `get_state_dict` and `save_model`
    are Accelerate's own for it. Settings of an `fsdp_plugin` with `fsdp_version=2` count:
    `reshard_after_forward`, `mixed_precision_policy`, `cpu_offload`, `state_dict_type`, classes or
    sizes to wrap, `ignored_modules`; and the data-parallel sizes of a `parallelism_config`. Without
    a plugin, mixed precision means gathers and computation in that dtype, reductions in float32,
    and outputs as the model makes them; shards are checkpointed by each rank. Trainable parameters
    become float32 first, as there.

    options: of `torch.compile(..., backend="autoshard")`, arguments of `autoshard.shard` among
        them; they go before those of the plugin.

    Raises ValueError for a wrong option, and for what can't be had together with autoshard: another
    engine, FSDP1, a backend in Accelerate's dynamo settings, activation checkpointing by the
    plugin, tensor, context or sequence parallelism, or models that are prepared already; also if
    Accelerate takes each of several processes for the only one, as it does on CPUs unless it is
    told.
    """
    state = accelerator.state
    plugin = getattr(state, "fsdp_plugin", None)
    if state.distributed_type in _REFUSED:
        raise ValueError(
            f"Accelerate is set up for {state.distributed_type.value}, which distributes the model "
            "itself: configure it without, to have autoshard shard the model"
        )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise ValueError(
            f"{started} processes were started, and Accelerate takes them for "
            f"{accelerator.num_processes}: on CPUs give Accelerator(cpu=True), or "
            "TrainingArguments(use_cpu=True)"
        )
    if accelerator._models:
        raise ValueError("call with_autoshard() before accelerator.prepare(), not after it")
    if state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError(
            f"autoshard compiles the model: leave dynamo_backend out, which is "
            f"{state.dynamo_plugin.backend.value}, and ACCELERATE_DYNAMO_BACKEND"
        )
    if plugin is None:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT"
        )
        if state.mixed_precision != "no":
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=_DTYPES[state.mixed_precision], reduce_dtype=torch.float32
            )
    if plugin.fsdp_version != 2:
        raise ValueError("autoshard stands in for FSDP2: give fsdp_version=2 to the fsdp_plugin")
    if plugin.activation_checkpointing:
        raise ValueError(
            "the plugin's activation_checkpointing wraps modules: call "
            "model.gradient_checkpointing_enable() in its place"
        )
    given = {**_settings_of(plugin), **_mesh_of(accelerator, plugin), **options}
    CompileOptions.read(given)
    state.fsdp_plugin = plugin
    for each in (state, PartialState()):  # the first is made of the second again and again
        each.distributed_type = DistributedType.FSDP
    original = type(accelerator)
    accelerator.__class__ = type(original.__name__, (_Sharding, original), {})
    accelerator._autoshard_options = given
    return accelerator


def _settings_of(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """Return the options that say what `plugin` does."""
    keeps = plugin.reshard_after_forward is False
    return {
        "strategy": "shard_grad_op" if keeps else "full_shard",
        "mp_policy": plugin.mixed_precision_policy,
        "offload_policy": plugin.cpu_offload or None,
    }


def _mesh_of(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    """Return the options that say how many replicas there are, if a ParallelismConfig does.

    Raises ValueError if it asks for more than data parallelism.
    """
    config = accelerator.parallelism_config
    if config is None:
        return {}
    others = {name: getattr(config, f"{name}_size") for name in ("tp", "cp", "sp")}
    others = {f"{name}_size": size for name, size in others.items() if size > 1}
    if others:
        raise ValueError(
            f"autoshard shards data-parallel ranks alone, and the ParallelismConfig has {others}: "
            "leave out all but dp_replicate_size and dp_shard_size"
        )
    if config.dp_replicate_size == 1:
        return {}
    if config.dp_shard_size == 1:
        return {"strategy": "no_shard"}
    keeps = plugin.reshard_after_forward is False
    return {
        "strategy": "hybrid_shard_zero2" if keeps else "hybrid_shard",
        "mesh": accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)],
    }


def _units_of(plugin: FullyShardedDataParallelPlugin, model: nn.Module) -> dict[str, Any]:
    """Return the options that say which modules of `model` are units, or ignored, by `plugin`.

    Without names of classes or a size, units are found as `autoshard.shard` finds them.
    """
    found: dict[str, Any] = {}
    if plugin.transformer_cls_names_to_wrap or plugin.min_num_params:
        found["policy"] = fsdp2_prepare_auto_wrap_policy(plugin, model)
    ignored = plugin.ignored_modules
    if isinstance(ignored, str):
        named = model.named_modules()
        ignored = [module for name, module in named if re.fullmatch(ignored, name)]
    if ignored is not None:
        found["ignored_modules"] = list(ignored)
    return found


class _Sharding(Accelerator):
    """Accelerator that shards models, with its `_autoshard_options`, before it prepares them."""

    _autoshard_options: dict[str, Any]

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard and compile models, and prepare all as Accelerate does.

        A model needs no optimizer beside it, as it does with FSDP2.
        """
        models = [each for each in args if isinstance(each, nn.Module)]
        for model in models:
            self._shard(model)
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        if models and not optimizers:
            prepared = tuple(
                self.prepare_model(each)
                if isinstance(each, nn.Module)
                else super(_Sharding, self).prepare(each)
                for each in args
            )
            return prepared if len(prepared) > 1 else prepared[0]
        # Accelerate knows parameters by their addresses, and those of shards without rows are one.
        held = [[list(group["params"]) for group in each.param_groups] for each in optimizers]
        result = super().prepare(*args, device_placement=device_placement)
        for each, params in zip(optimizers, held, strict=True):
            for group, of_group in zip(each.param_groups, params, strict=True):
                group["params"] = of_group
        return result

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard and compile a model, and prepare it as Accelerate does for evaluation."""
        self._shard(model)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def _shard(self, given: nn.Module) -> None:
        """Compile the module in `given` with autoshard and shard it, unless that is done."""
        module = extract_model_from_parallel(given)
        if self.state.mixed_precision != "no":
            _keep_in_float32(module)
        units = _units_of(self.state.fsdp_plugin, module)
        compile_and_shard(module, {**units, **self._autoshard_options})
        if unit_of(module) is None:
            raise ValueError(
                f"{type(module).__name__} is not sharded, and a part of it is: shard or load the "
                "whole model or nothing of it; adapters come first, by get_peft_model(), and then "
                "load_pretrained()"
            )


def _keep_in_float32(model: nn.Module) -> None:
    """Make trainable parameters of `model` float32, in place, whether they are sharded or not.

    Frozen ones beside them, in the same module, become so, too.
    """
    buffers = set(model.buffers())

    def widen(tensor: Tensor) -> Tensor:
        is_weight = tensor.is_floating_point() and tensor not in buffers
        return tensor.float() if is_weight else tensor

    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if any(param.requires_grad and param.dtype != torch.float32 for param in own):
            _torch.nn.convert_module(type(module), module, widen, False)
