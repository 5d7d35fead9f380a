"""Sharded data-parallel training as a torch.compile backend.

torch.compile(model, backend="autoshard")     # one line, any nn.Module, under torchrun
autoshard.fully_shard(block)                  # or explicit and composable
autoshard.shard(model, policy=...)            # or the whole model in one call

Each name is imported when it is first asked for: the command line's help needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoshard import wrap as wrap
    from autoshard.passes.ir.plan import Plan as Plan
    from autoshard.runtime.access import register_forward_method as register_forward_method
    from autoshard.runtime.checkpoint import CheckpointError as CheckpointError
    from autoshard.runtime.checkpoint import load_checkpoint as load_checkpoint
    from autoshard.runtime.checkpoint import save_checkpoint as save_checkpoint
    from autoshard.runtime.plans import plans as plans
    from autoshard.runtime.shard import fully_shard as fully_shard
    from autoshard.runtime.shard import replicate as replicate
    from autoshard.runtime.shard import shard as shard
    from autoshard.runtime.sharded_module import ShardedModule as ShardedModule
    from autoshard.runtime.sharded_module import share_comm_ctx as share_comm_ctx
    from autoshard.runtime.unit_policies import CPUOffloadPolicy as CPUOffloadPolicy
    from autoshard.runtime.unit_policies import MixedPrecisionPolicy as MixedPrecisionPolicy
    from autoshard.runtime.unit_policies import OffloadPolicy as OffloadPolicy
    from autoshard.runtime.watchdog import watchdog as watchdog
    from autoshard.runtime.wrap_policies import ModuleWrapPolicy as ModuleWrapPolicy
    from autoshard.tools.parity import parity as parity

__version__ = "0.1.0"

_PLACES = {
    "CPUOffloadPolicy": "runtime.unit_policies",
    "CheckpointError": "runtime.checkpoint",
    "MixedPrecisionPolicy": "runtime.unit_policies",
    "ModuleWrapPolicy": "runtime.wrap_policies",
    "OffloadPolicy": "runtime.unit_policies",
    "Plan": "passes.ir.plan",
    "ShardedModule": "runtime.sharded_module",
    "fully_shard": "runtime.shard",
    "load_checkpoint": "runtime.checkpoint",
    "parity": "tools.parity",
    "plans": "runtime.plans",
    "register_forward_method": "runtime.access",
    "replicate": "runtime.shard",
    "save_checkpoint": "runtime.checkpoint",
    "shard": "runtime.shard",
    "share_comm_ctx": "runtime.sharded_module",
    "watchdog": "runtime.watchdog",
}
_MODULES = ("backend", "passes", "runtime", "tools", "wrap")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"autoshard.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    found = getattr(import_module(f"autoshard.{_PLACES[name]}"), name)
    globals()[name] = found  # the next time, and for Dynamo, it is an attribute like any other
    return found


def __dir__() -> list[str]:
    dunders = [name for name in globals() if name.startswith("__")]
    return sorted([*dunders, *_PLACES, *_MODULES])
