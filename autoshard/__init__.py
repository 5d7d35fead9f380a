"""Sharded data-parallel training as a torch.compile backend.

torch.compile(model, backend="autoshard")     # one line, any nn.Module, under torchrun
autoshard.fully_shard(block)                  # or explicit and composable
autoshard.shard(model, policy=...)            # or the whole model in one call
"""

from autoshard import wrap as wrap
from autoshard.passes.ir.plan import Plan as Plan
from autoshard.runtime.compiled.plans import plans as plans
from autoshard.runtime.eager.access import register_forward_method as register_forward_method
from autoshard.runtime.ranks.watchdog import watchdog as watchdog
from autoshard.runtime.sharding.shard import fully_shard as fully_shard
from autoshard.runtime.sharding.shard import replicate as replicate
from autoshard.runtime.sharding.shard import shard as shard
from autoshard.runtime.sharding.sharded_module import ShardedModule as ShardedModule
from autoshard.runtime.sharding.sharded_module import share_comm_ctx as share_comm_ctx
from autoshard.runtime.sharding.wrap_policies import ModuleWrapPolicy as ModuleWrapPolicy
from autoshard.runtime.training.checkpoint.on_ranks import CheckpointError as CheckpointError
from autoshard.runtime.training.checkpoint.save_and_load import load_checkpoint as load_checkpoint
from autoshard.runtime.training.checkpoint.save_and_load import save_checkpoint as save_checkpoint
from autoshard.runtime.unit.policies import CPUOffloadPolicy as CPUOffloadPolicy
from autoshard.runtime.unit.policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from autoshard.runtime.unit.policies import OffloadPolicy as OffloadPolicy
from autoshard.tools.parity import parity as parity

__version__ = "0.1.0"
