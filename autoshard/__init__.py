"""Sharded data-parallel training as a torch.compile backend.

torch.compile(model, backend="autoshard")     # one line, any nn.Module, under torchrun
autoshard.fully_shard(block)                  # or explicit and composable
autoshard.shard(model, policy=...)            # or the whole model in one call

Each name is imported when it is first asked for: the command line's help needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "ArtefactError": "artefacts.folder",
    "CPUOffloadPolicy": "runtime.unit.policies",
    "CheckpointError": "runtime.training.checkpoint.on_ranks",
    "FlatShard": "runtime.comm.flat_shard",
    "LoadedWeights": "runtime.weights.load",
    "MixedPrecisionPolicy": "runtime.unit.policies",
    "ModuleWrapPolicy": "runtime.sharding.wrap_policies",
    "OffloadPolicy": "runtime.unit.policies",
    "OptimizerOffloadPolicy": "runtime.unit.policies",
    "PendingCheckpoint": "runtime.training.checkpoint.pending",
    "Plan": "passes.ir.plan",
    "ShardedModule": "runtime.sharding.sharded_module",
    "as_planned": "runtime.training.as_planned",
    "fully_shard": "runtime.sharding.shard",
    "full_state_dict": "runtime.weights.full_state",
    "hybrid_mesh": "runtime.comm.mesh",
    "load_checkpoint": "runtime.training.checkpoint.save_and_load",
    "load_compiled": "artefacts.load",
    "load_pretrained": "runtime.sharding.load_pretrained",
    "parity": "tools.parity.compare",
    "plans": "runtime.compiled.plans",
    "preempted": "runtime.training.preemption",
    "register_forward_method": "runtime.eager.access",
    "replicate": "runtime.sharding.shard",
    "save_checkpoint": "runtime.training.checkpoint.save_and_load",
    "shard": "runtime.sharding.shard",
    "save_pretrained": "runtime.weights.save",
    "share_comm_ctx": "runtime.sharding.sharded_module",
    "train_step": "runtime.training.whole_step",
    "watchdog": "runtime.ranks.watchdog",
}
_MODULES = ("errors", "passes", "runtime", "tools", "wrap")

if TYPE_CHECKING:
    from autoshard import wrap as wrap
    from autoshard.artefacts.folder import ArtefactError as ArtefactError
    from autoshard.artefacts.load import load_compiled as load_compiled
    from autoshard.passes.ir.plan import Plan as Plan
    from autoshard.runtime.comm.flat_shard import FlatShard as FlatShard
    from autoshard.runtime.comm.mesh import hybrid_mesh as hybrid_mesh
    from autoshard.runtime.compiled.plans import plans as plans
    from autoshard.runtime.eager.access import register_forward_method as register_forward_method
    from autoshard.runtime.ranks.watchdog import watchdog as watchdog
    from autoshard.runtime.sharding.load_pretrained import load_pretrained as load_pretrained
    from autoshard.runtime.sharding.shard import fully_shard as fully_shard
    from autoshard.runtime.sharding.shard import replicate as replicate
    from autoshard.runtime.sharding.shard import shard as shard
    from autoshard.runtime.sharding.sharded_module import ShardedModule as ShardedModule
    from autoshard.runtime.sharding.sharded_module import share_comm_ctx as share_comm_ctx
    from autoshard.runtime.sharding.wrap_policies import ModuleWrapPolicy as ModuleWrapPolicy
    from autoshard.runtime.training.as_planned import as_planned as as_planned
    from autoshard.runtime.training.checkpoint.on_ranks import CheckpointError as CheckpointError
    from autoshard.runtime.training.checkpoint.pending import PendingCheckpoint as PendingCheckpoint
    from autoshard.runtime.training.checkpoint.save_and_load import (
        load_checkpoint as load_checkpoint,
    )
    from autoshard.runtime.training.checkpoint.save_and_load import (
        save_checkpoint as save_checkpoint,
    )
    from autoshard.runtime.training.preemption import preempted as preempted
    from autoshard.runtime.training.whole_step import train_step as train_step
    from autoshard.runtime.unit.policies import CPUOffloadPolicy as CPUOffloadPolicy
    from autoshard.runtime.unit.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from autoshard.runtime.unit.policies import OffloadPolicy as OffloadPolicy
    from autoshard.runtime.unit.policies import OptimizerOffloadPolicy as OptimizerOffloadPolicy
    from autoshard.runtime.weights.full_state import full_state_dict as full_state_dict
    from autoshard.runtime.weights.load import LoadedWeights as LoadedWeights
    from autoshard.runtime.weights.save import save_pretrained as save_pretrained
    from autoshard.tools.parity.compare import parity as parity
else:  # type checkers read the imports: for them, `__getattr__` would offer any name

    def __getattr__(name: str) -> Any:
        """Import the public name or subpackage `name`, and return it; a public name is kept here.

        Raises AttributeError for any other name.
        """
        if name in _MODULES:
            return importlib.import_module(f"autoshard.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
        found = getattr(importlib.import_module(f"autoshard.{_PLACES[name]}"), name)
        globals()[name] = found  # the next time, and for Dynamo, it is an attribute like any other
        return found

    def __dir__() -> list[str]:
        special = [name for name in globals() if name.startswith("__")]
        return sorted({*special, *__all__})

    __all__ = [*_PLACES, *_MODULES]
