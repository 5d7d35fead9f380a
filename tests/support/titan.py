"""torchtitan's Trainer on CPUs, for a tiny Llama: what stands in for an accelerator, and runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import hosts
from torch import nn


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Have torchtitan take CPUs for its accelerators, in this context, and from its import on.

    torchtitan 0.3 takes a machine without accelerators for one with CUDA, asks its device for
    memory, and sleeps at the end of training. torch before 2.14 has no `set_timeout`, which it
    calls. It leaves garbage collection disabled.
    """
    device = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda: None,
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (torch._utils, "_get_available_device_type", lambda: "cpu"),
            (torch._utils, "_get_device_module", lambda kind: device),
            (dist, "set_timeout", lambda timeout, group=None: None),
            (time, "sleep", lambda seconds: None),
        ):
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        from torchtitan.tools import utils

        assert utils.device_type == "cpu", "torchtitan was imported outside of on_cpu()"
        try:
            yield
        finally:
            gc.enable()


def write_data(folder: Path) -> None:
    """Write a tokenizer and random lines of text, always the same, to `folder`."""
    made = hosts.tokenizer()
    made.bos_token = made.eos_token  # which texts of torchtitan's begin with
    made.save_pretrained(folder)
    (folder / "data").mkdir()
    hosts.lines(400).to_json(folder / "data" / "train.json")


def config(folder: Path, module: str, *arguments: str, recomputed: str = "none") -> Any:
    """Read a command line of torchtitan's, for four steps of a small Llama with `write_data`.

    recomputed: torchtitan's kind of activation checkpointing.
    """
    from torchtitan.config import ConfigManager
    from torchtitan.models.common.attention import ScaledDotProductAttention

    told = ["--module", module, "--config", "llama3_debugmodel", *SETTINGS, *arguments]
    told += ["--hf_assets_path", str(folder), "--dataloader.dataset_path", str(folder / "data")]
    made: Any = ConfigManager().parse_args([*told, f"activation-checkpoint:{recomputed}"])
    model = made.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:  # torch has no backward of FlexAttention for CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return made


SETTINGS = (
    *("--training.steps", "4", "--training.seq_len", "32", "--training.local_batch_size", "2"),
    *("--training.disable_cuda_graphs", "--debug.seed", "0"),
    "--debug.no-enable_structured_logging",
    *("--parallelism.spmd_backend", "partial_dtensor"),  # before torch 2.14 FSDP2 has no other
    *("--compile.components", "model"),
)


class Run:
    """Run of the Trainer: `found` has the loss and the norm of gradients of each step."""

    def __init__(self, config: Any) -> None:
        self.trainer = config.build()
        self.model: nn.Module = self.trainer.model_parts[0]
        (self.optimizer,) = self.trainer.optimizers
        self.found: list[tuple[int, float, float]] = []
        self.trainer.metrics_processor.log = self._note
        self.trainer.train()
        self.trainer.close()

    def _note(self, step: int, loss: float, largest: float, norm: float, **others: Any) -> None:
        self.found.append((step, loss, norm))


def by_sums(function: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Have FSDP2's gradients summed as gloo can: it has no sum with a factor, not even of one."""

    @functools.wraps(function)
    def sharded(*args: Any, **kwargs: Any) -> nn.Module:
        model = function(*args, **kwargs)
        for module in model.modules():
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return sharded
