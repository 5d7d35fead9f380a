"""Lines of docs/migrate/deepspeed.md: DeepSpeed."""

from __future__ import annotations

import contextlib
import copy

import deepspeed
import torch
import torch.distributed as dist
from common import STEPS, Block, build, device, loss_of, numbers, on_gpu
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    set_z3_leaf_modules,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

# By default DeepSpeed rounds a linear layer's product before it adds the bias, and so do all
# linear layers of a process from then on.
ZERO = {"memory_efficient_linear": False}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {**ZERO, "stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}


def _engine(entries=None, zero=None, model=None, **arguments):
    """Make an engine with some more entries, and some more of `zero_optimization`."""
    config = {**copy.deepcopy(CONFIG), **(entries or {})}
    config["zero_optimization"] |= {**ZERO, **(zero or {})}
    if "optimizer" in arguments:
        del config["optimizer"]
    engine, _, _, _ = deepspeed.initialize(model=model or build(), config=config, **arguments)
    return engine


def _train(engine, steps: int = STEPS) -> list[float]:
    """Take some steps, and return their losses."""
    losses = []
    for step in range(steps):
        loss = loss_of(engine, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def started() -> list[float]:
    deepspeed.init_distributed("nccl" if on_gpu else "gloo")
    engine, _, _, _ = deepspeed.initialize(model=build(), config=CONFIG)
    return _train(engine)


def own_optimizer() -> list[float]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    entries = {"zero_allow_untested_optimizer": True}
    engine = _engine(entries, model=model, optimizer=optimizer)
    return _train(engine)


def stage_0() -> list[float]:
    return _train(_engine({"zero_optimization": {"stage": 0}}))


def stage_1() -> list[float]:
    return _train(_engine({"zero_optimization": {"stage": 1}}))


def stage_2() -> list[float]:
    return _train(_engine({"zero_optimization": {"stage": 2}}))


def stage_3() -> list[float]:
    return _train(_engine({"zero_optimization": {"stage": 3}}))


def accumulation() -> list[float]:
    engine = _engine({"gradient_accumulation_steps": 2})
    return _train(engine, 2 * STEPS)


def clipping() -> list[float]:
    engine = _engine({"gradient_clipping": 0.1})
    losses = _train(engine)
    return [*losses, float(engine.get_global_grad_norm())]


def bf16() -> list[float]:
    return _train(_engine({"bf16": {"enabled": True}}))


def fp16() -> list[float] | None:
    entries = {"fp16": {"enabled": True, "initial_scale_power": 8}}
    if not on_gpu:  # DeepSpeed asks the CPU whether it can compute in it
        with contextlib.suppress(ValueError):
            _engine(entries)
        return None
    return _train(_engine(entries))


def autocast() -> list[float]:
    return _train(_engine({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}))


def communication() -> list[float]:
    return _train(_engine({"communication_data_type": "bf16", "zero_optimization": {"stage": 1}}))


def divided_before() -> list[float]:
    entries = {
        "zero_optimization": {"stage": 0},
        "prescale_gradients": True,
        "gradient_predivide_factor": 2.0,
    }
    return _train(_engine(entries))


def offload() -> list[float]:
    zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    engine = _engine({"zero_force_ds_cpu_optimizer": False}, zero)
    return _train(engine)


def buckets() -> list[float]:
    zero = {
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 1_000_000,
        "stage3_prefetch_bucket_size": 1_000_000,
        "stage3_max_live_parameters": 1_000_000,
        "stage3_max_reuse_distance": 1_000_000,
        "stage3_param_persistence_threshold": 0,
        "sub_group_size": 1_000_000,
    }
    return _train(_engine(zero=zero))


def buckets_of_stage_2() -> list[float]:
    zero = {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 1_000_000,
        "reduce_scatter": True,
        "round_robin_gradients": True,
        "ignore_unused_parameters": True,
    }
    return _train(_engine(zero=zero))


def secondary_shards() -> list[float]:
    return _train(_engine(zero={"zero_hpz_partition_size": 2}))


def schedule() -> None:
    entries = {
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
        }
    }
    _train(_engine(entries))


def prints() -> list[float]:
    return _train(_engine({"steps_per_print": 100, "wall_clock_breakdown": False}))


def boundaries() -> list[float]:
    engine = _engine({"gradient_accumulation_steps": 2})
    found = []
    for step in range(4):
        engine.backward(loss_of(engine, step))
        found.append(float(engine.is_gradient_accumulation_boundary()))
        engine.step()
    return found


def no_sync() -> list[float]:
    engine = _engine({"zero_optimization": {"stage": 1}})
    with engine.no_sync():
        engine.backward(loss_of(engine, 0))
    engine.backward(loss_of(engine, 1))
    engine.step()
    return [loss_of(engine, 0).item()]


def evaluation() -> list[float]:
    engine = _engine()
    engine.eval()
    with torch.no_grad():
        return [loss_of(engine, 0).item()]


def the_module() -> list[float]:
    engine = _engine()
    return [float(len(engine.module.layers))]


def checkpoints() -> list[float]:
    engine = _engine()
    _train(engine)
    engine.save_checkpoint("checkpoints", tag="step3", client_state={"step": 3})
    _, state = engine.load_checkpoint("checkpoints", tag="step3")
    return [*_train(engine), float(state["step"])]


def whole_state() -> list[float]:
    dist.barrier()
    return numbers(get_fp32_state_dict_from_zero_checkpoint("checkpoints", tag="step3"))


def saved_model() -> list[float]:
    engine = _engine(zero={"stage3_gather_16bit_weights_on_model_save": True})
    engine.save_16bit_model("saved", "model.pt")
    dist.barrier()
    return numbers(torch.load("saved/model.pt"))


def on_meta() -> list[float]:
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    engine = _engine(model=model)
    return [float(sum(param.ds_numel for param in engine.module.parameters()))]


def whole_parameters() -> list[float]:
    engine = _engine()
    model = engine.module
    with deepspeed.zero.GatheredParameters(list(model.head.parameters()), modifier_rank=0):
        nn.init.constant_(model.head.bias, 0.5)
        total = model.head.weight.sum().item()
    return [total, loss_of(engine, 0).item()]


def one_parameter() -> list[float]:
    engine = _engine()
    param = engine.module.head.weight
    engine.backward(loss_of(engine, 0))
    whole = safe_get_full_fp32_param(param)
    gradient = safe_get_full_grad(param)
    safe_set_full_fp32_param(param, 2 * whole)
    return [whole.sum().item(), gradient.abs().sum().item()]


def leaves() -> list[float]:
    model = build()
    set_z3_leaf_modules(model, [Block])
    return _train(_engine(model=model))


def activation_checkpoints() -> list[float]:
    model = build()
    engine = _engine(model=model)
    x = torch.ones(2, 16, device=device, requires_grad=True)
    deepspeed.checkpointing.configure(None, deepspeed_config=None)
    y = deepspeed.checkpointing.checkpoint(model.layers[0], x)
    del engine
    return [y.sum().item()]


def compiled() -> list[float]:
    engine = _engine({"zero_optimization": {"stage": 1}})
    engine.compile()
    return _train(engine)


def parsed() -> None:
    DeepSpeedZeroConfig(
        stage=3,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        offload_param={"device": "nvme", "nvme_path": "/nvme"},
        offload_optimizer={"device": "nvme", "nvme_path": "/nvme"},
    )
