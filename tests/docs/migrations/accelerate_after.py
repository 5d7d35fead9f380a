"""Lines of docs/migrate/accelerate.md: autoshard in Accelerate."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, merge_fsdp_weights, set_seed
from accelerate_before import _accelerator, _llama, _llama_loss, _train
from common import Block, adamw, build, data, loss_of, numbers
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import autoshard
from autoshard.integrations.accelerate import with_autoshard


def _sharding(options=None, **arguments) -> Accelerator:
    """Make an accelerator anew that trains with autoshard; eagerly if nothing else is asked for."""
    return with_autoshard(_accelerator(**arguments), **(options or {"lowering": "eager"}))


def replicas() -> list[float]:
    accelerator = _accelerator()
    accelerator = with_autoshard(accelerator, strategy="no_shard")
    return _train(accelerator)


def units() -> list[float]:
    options = {"policy": autoshard.ModuleWrapPolicy({Block})}
    return _train(_sharding(options))


def config() -> list[float]:
    return _train(_sharding())


def kept_after_forward() -> list[float]:
    return _train(_sharding({"lowering": "eager", "strategy": "shard_grad_op"}))


def by_size() -> list[float]:
    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return autoshard.wrap.size_based_auto_wrap_policy(
            module, recurse, nonwrapped_numel, min_num_params=3000
        )

    return _train(_sharding({"lowering": "eager", "policy": policy}))


def no_units() -> list[float]:
    return _train(_sharding({"lowering": "eager", "policy": lambda module: False}))


def offload() -> list[float]:
    offloads = autoshard.CPUOffloadPolicy()
    return _train(_sharding({"lowering": "eager", "offload_policy": offloads}))


def precision_by_config() -> list[float]:
    return _train(_sharding(mixed_precision="bf16"))


def ignored() -> list[float]:
    model = build()
    model.head.requires_grad_(False)
    options = {"lowering": "eager", "ignored_modules": [model.head]}
    return _train(_sharding(options), model)


def loading() -> list[float]:
    return _train(_sharding({"lowering": "eager", "sync_module_states": True}))


def empty_weights() -> None:
    if dist.get_rank() == 0:
        _llama().save_pretrained("downloaded")
    dist.barrier()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("downloaded"))
    autoshard.load_pretrained(model, "downloaded")
    accelerator = _sharding()
    _llama_loss(accelerator, model)


def activation_checkpoints() -> list[float]:
    model = _llama()
    model.gradient_checkpointing_enable()
    return [_llama_loss(_sharding(), model)]


def shards_and_replicas() -> list[float]:
    mesh = autoshard.hybrid_mesh(2)
    return _train(_sharding({"lowering": "eager", "strategy": "hybrid_shard", "mesh": mesh}))


def precision() -> list[float]:
    return _train(_sharding(mixed_precision="bf16"))


def precision_by_a_policy() -> None:
    policy = autoshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    _train(_sharding({"mp_policy": policy}))


def unused_parameters() -> list[float]:
    return _train(_sharding({"strict_order": False}))


def compiled() -> list[float]:
    accelerator = with_autoshard(_accelerator(), bucketing="auto")
    return _train(accelerator)


def a_loop() -> list[float]:
    set_seed(0)
    accelerator = _sharding(gradient_accumulation_steps=2)
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
    accelerator = _sharding(gradient_accumulation_plugin=plugin)
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    for step in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, step))
            optimizer.step()
            optimizer.zero_grad()
    return [loss_of(model, 0).item()]


def no_sync() -> list[float]:
    accelerator = _sharding()
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, 0))
    accelerator.backward(loss_of(model, 1))
    optimizer.step()
    return [loss_of(model, 0).item()]


def clipping_by_value() -> None:
    accelerator = _sharding()
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, 0))
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


def autocast() -> list[float]:
    accelerator = _sharding(mixed_precision="bf16")
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    with accelerator.autocast():
        return [loss_of(model, 0).item()]


def states() -> list[float]:
    accelerator = _sharding()
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
    accelerator = _sharding()
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.save(state, "model.pt")
    return numbers(state)


def saved_model() -> None:
    accelerator = _sharding()
    model = build()
    model, _ = accelerator.prepare(model, adamw(model))
    accelerator.save_model(model, "saved")
    accelerator.wait_for_everyone()
    assert Path("saved", "model.safetensors").exists()


def saved_as_pretrained() -> None:
    accelerator = _sharding()
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


def saved_by_ranks() -> None:
    accelerator = _sharding()
    model = _llama()
    model, _ = accelerator.prepare(model, adamw(model))
    autoshard.save_pretrained(model, "written")
    LlamaForCausalLM.from_pretrained("written")


def merged() -> None:
    merge_fsdp_weights("state/pytorch_model_fsdp_0", "merged")
    assert Path("merged", "model.safetensors").exists()


def ended() -> None:
    accelerator = _sharding()
    model = build()
    model, optimizer = accelerator.prepare(model, adamw(model))
    model, optimizer = accelerator.free_memory(model, optimizer)
