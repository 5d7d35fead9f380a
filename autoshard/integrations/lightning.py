"""Lightning: strategies for `Trainer(strategy="autoshard")` and `Fabric(strategy="autoshard")`.

Import this module to have both registered by that name, or give one of the classes' instances.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from autoshard.integrations.compiled import compile_and_shard
from autoshard.options import CompileOptions
from autoshard.runtime.eager.access import register_forward_method
from autoshard.runtime.unit.unit import unit_of

_OF_LIGHTNING = ("save_distributed_checkpoint", "process_group_backend", "timeout")
"""Arguments of Lightning's own strategies that ours take."""

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class AutoshardStrategy(ModelParallelStrategy):
    """Strategy of Lightning's Trainer that shards and compiles the model with autoshard.

        trainer = Trainer(strategy=AutoshardStrategy(bucketing="auto"))

    The LightningModule is sharded as a whole before its optimizers are made, and needs no
    `configure_model`. What its steps call is compiled: itself, if it has a forward, and the modules
    that are its attributes. Checkpoints are those of Lightning's ModelParallelStrategy: a folder
    with a file for each rank, or one file with `save_distributed_checkpoint=False`. Microbatches of
    `accumulate_grad_batches` are reduced once.

    settings: options of the backend, arguments of `autoshard.shard` among them; and
        `save_distributed_checkpoint`, `process_group_backend` and `timeout`, of Lightning's.
    """

    def __init__(self, **settings: Any) -> None:
        theirs, self._options = _split(settings)
        super().__init__(**theirs)

    def setup_environment(self) -> None:
        """Make the process group, with all ranks for data."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Shard and compile the model, then make its optimizers."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module: nn.Module = self.precision_plugin.convert_module(self.lightning_module)
        self.model = module
        if unit_of(module) is None:
            compile_and_shard(module, self._options)
            for each in module.children():
                if next(each.parameters(), None) is not None:
                    each.compile(backend="autoshard", options=self._options)
            for name in _STEPS:
                register_forward_method(module, name)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Leave gradients of microbatches unreduced, until one outside of this context."""
        module: Any = self.lightning_module
        with module.no_sync():
            yield


class AutoshardFabricStrategy(FabricModelParallelStrategy):
    """Strategy of Lightning's Fabric that shards and compiles modules with autoshard.

        fabric = Fabric(strategy=AutoshardFabricStrategy(bucketing="auto"))
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(AdamW(model.parameters()))

    settings: as of `AutoshardStrategy`.
    """

    def __init__(self, **settings: Any) -> None:
        theirs, self._options = _split(settings)
        super().__init__(self._shard, **theirs)

    def setup_environment(self) -> None:
        """Make the process group, with all ranks for data."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def _shard(self, module: nn.Module, mesh: object) -> nn.Module:
        compile_and_shard(module, self._options)
        return module


def _split(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split `settings` into arguments of Lightning's own strategies, and options of the backend."""
    theirs = {key: value for key, value in settings.items() if key in _OF_LIGHTNING}
    options = {key: value for key, value in settings.items() if key not in theirs}
    CompileOptions.read(options)
    return theirs, options


StrategyRegistry.register("autoshard", AutoshardStrategy, "Sharded and compiled by autoshard")
STRATEGY_REGISTRY.register("autoshard", AutoshardFabricStrategy, "Sharded by autoshard")
