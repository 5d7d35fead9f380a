"""Lines of docs/migrate/accelerate.md: Accelerate with FSDP2.

On CPUs Accelerate takes DistributedDataParallel whatever it is given, so `_fsdp` has it take FSDP2.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState, init_empty_weights
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    merge_fsdp_weights,
    set_seed,
)
from accelerate.utils.launch import prepare_multi_gpu_env
from common import STEPS, Model, adamw, build, data, loss_of, numbers, on_gpu
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

COMMON = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: 2
"""


def _accelerator(**arguments) -> Accelerator:
    """Make an accelerator anew, as DistributedDataParallel has it."""
    AcceleratorState._reset_state(True)
    with mock.patch.dict(os.environ, {} if on_gpu else {"ACCELERATE_USE_CPU": "true"}):
        return Accelerator(**arguments)


def _fsdp(plugin: FullyShardedDataParallelPlugin | None = None, **arguments) -> Accelerator:
    """Make an accelerator that takes FSDP2, on CPUs, too."""
    plugin = plugin or FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    accelerator = _accelerator(fsdp_plugin=plugin, **arguments)
    if not on_gpu:
        accelerator.state.fsdp_plugin = plugin
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        for each in (accelerator.state, PartialState()):
            each.distributed_type = DistributedType.FSDP
    return accelerator


def _by_config(text: str) -> Accelerator:
    """Make the accelerator that `accelerate launch` makes of a configuration."""
    file = Path(f"config{dist.get_rank()}.yaml")
    file.write_text(f"{COMMON}{text}")
    args = launch_command_parser().parse_args(["--config_file", str(file), "script.py"])
    args, _, _ = _validate_launch_command(args)
    args.main_process_port = 0
    with mock.patch.dict(os.environ, prepare_multi_gpu_env(args)):
        return _fsdp(FullyShardedDataParallelPlugin())


def _train(accelerator: Accelerator, model: nn.Module | None = None) -> list[float]:
    model = model or build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    losses = []
    for step in range(STEPS):
        with accelerator.autocast():
            loss = loss_of(model, step)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def replicas() -> list[float]:
    return _train(_accelerator())


def units() -> list[float]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    return _train(_fsdp(plugin))


def config() -> list[float]:
    """Entries as `accelerate config` writes them; `COMMON` stands before them."""
    config = """
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_activation_checkpointing: false
  fsdp_offload_params: false
"""
    return _train(_by_config(config))


def kept_after_forward() -> list[float]:
    config = """
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
"""
    accelerator = _by_config(config)
    assert accelerator.state.fsdp_plugin.reshard_after_forward is False
    return _train(accelerator)


def by_size() -> list[float]:
    config = """
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_min_num_params: 3000
"""
    return _train(_by_config(config))


def no_units() -> list[float]:
    config = """
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: NO_WRAP
"""
    return _train(_by_config(config))


def offload() -> list[float]:
    config = """
fsdp_config:
  fsdp_version: 2
  fsdp_offload_params: true
"""
    accelerator = _by_config(config)
    if not on_gpu:  # what is offloaded is pinned, which needs one
        with pytest.raises(RuntimeError):
            _train(accelerator)
    return _train(accelerator) if on_gpu else _train(_fsdp())


def precision_by_config() -> list[float]:
    config = """
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
"""
    return _train(_by_config(config))


def ignored() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=[model.head])
    return _train(_fsdp(plugin), model)


def loading() -> list[float]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
    return _train(_fsdp(plugin))


def empty_weights() -> None:
    with init_empty_weights():
        model = Model()
    assert model.head.weight.is_meta


def activation_checkpoints() -> list[float]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", activation_checkpointing=True
    )
    return [_llama_loss(_fsdp(plugin), _llama())]


def _llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def _llama_loss(accelerator: Accelerator, model: nn.Module) -> float:
    model, _ = accelerator.prepare(model, adamw(model))
    loss = model(input_ids=data(0), labels=data(0), use_cache=False).loss
    accelerator.backward(loss)
    return loss.item()


def shards_and_replicas() -> list[float]:
    sizes = ParallelismConfig(dp_replicate_size=1, dp_shard_size=2)
    if not on_gpu:  # Accelerate refuses it there
        with pytest.raises(ValueError, match="ParallelismConfig is only compatible"):
            _fsdp(parallelism_config=sizes)
        return _train(_fsdp())
    return _train(_fsdp(parallelism_config=sizes))


def precision() -> list[float]:
    return _train(_fsdp(mixed_precision="bf16"))


def unused_parameters() -> list[float]:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    return _train(_accelerator(kwargs_handlers=[handler]))


def compiled() -> list[float]:
    return _train(_fsdp(dynamo_backend="inductor"))


def a_loop() -> list[float]:
    set_seed(0)
    accelerator = _fsdp(gradient_accumulation_steps=2)
    model = build()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=4)
    loader = DataLoader([data(step)[0] for step in range(16)], batch_size=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    accelerator.print(losses[-1])
    accelerator.wait_for_everyone()
    metrics = accelerator.gather_for_metrics(torch.ones(2, device=accelerator.device))
    return [*losses, metrics.sum().item()]


def steps_of_accumulation() -> list[float]:
    plugin = GradientAccumulationPlugin(num_steps=2)
    accelerator = _fsdp(gradient_accumulation_plugin=plugin)
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def no_sync() -> list[float]:
    accelerator = _fsdp()
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, 0))
    accelerator.backward(loss_of(model, 1))
    optimizer.step()
    return [loss_of(model, 0).item()]


def clipping_by_value() -> None:
    accelerator = _fsdp()
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, 0))
    with pytest.raises(Exception, match="do not support"):
        accelerator.clip_grad_value_(model.parameters(), 0.01)


def autocast() -> list[float]:
    accelerator = _fsdp(mixed_precision="bf16")
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    with accelerator.autocast():
        return [loss_of(model, 0).item()]


def states() -> list[float]:
    accelerator = _fsdp()
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, 1.0)
    accelerator.register_for_checkpointing(schedule)
    accelerator.backward(loss_of(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state("state")
    accelerator.load_state("state")
    accelerator.backward(loss_of(model, 1))
    optimizer.step()
    return [loss_of(model, 0).item()]


def whole_state() -> list[float]:
    accelerator = _fsdp()
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.save(state, "model.pt")
    return numbers(state)


def saved_model() -> None:
    accelerator = _fsdp()
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.save_model(model, "saved")
    accelerator.wait_for_everyone()
    assert Path("saved", "model.safetensors").exists()


def saved_as_pretrained() -> None:
    accelerator = _fsdp(FullyShardedDataParallelPlugin(fsdp_version=2))
    model = _llama()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.unwrap_model(model).save_pretrained(
        "pretrained",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    LlamaForCausalLM.from_pretrained("pretrained")


def merged() -> None:
    merge_fsdp_weights("state/pytorch_model_fsdp_0", "merged")
    assert Path("merged", "model.safetensors").exists()


def ended() -> None:
    accelerator = _fsdp()
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    model, optimizer = accelerator.free_memory(model, optimizer)
