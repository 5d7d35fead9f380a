"""Policies and `wrap`, with the names and signatures of torch.distributed.fsdp.wrap.

A unit is made in place: where FSDP1 puts a wrapper module around a module, the module stays.
"""

from autoshard.runtime.sharding.wrap_context import enable_wrap as enable_wrap
from autoshard.runtime.sharding.wrap_context import wrap as wrap
from autoshard.runtime.sharding.wrap_policies import CustomPolicy as CustomPolicy
from autoshard.runtime.sharding.wrap_policies import ModuleWrapPolicy as ModuleWrapPolicy
from autoshard.runtime.sharding.wrap_policies import _or_policy as _or_policy
from autoshard.runtime.sharding.wrap_policies import (
    _wrap_module_cls_individually as _wrap_module_cls_individually,
)
from autoshard.runtime.sharding.wrap_policies import always_wrap_policy as always_wrap_policy
from autoshard.runtime.sharding.wrap_policies import (
    lambda_auto_wrap_policy as lambda_auto_wrap_policy,
)
from autoshard.runtime.sharding.wrap_policies import (
    size_based_auto_wrap_policy as size_based_auto_wrap_policy,
)
from autoshard.runtime.sharding.wrap_policies import (
    transformer_auto_wrap_policy as transformer_auto_wrap_policy,
)
