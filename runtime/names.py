"""State dicts of `torch.compile(model)` under the model's own names.

torch.compile wraps a module in another, whose state dict says `_orig_mod.layers.0.w`.
A checkpoint should not depend on whether the model was compiled: for modules compiled
with autoshard the prefix is taken off on saving, and either spelling is read.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_PREFIX = "_orig_mod."


def keep_names(optimized: nn.Module) -> None:
    """Give `optimized`, what torch.compile made of a module, the module's state-dict keys."""
    optimized.register_state_dict_post_hook(_take_prefix_off)
    optimized.register_load_state_dict_pre_hook(_put_prefix_on)


def _take_prefix_off(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    start = prefix + _PREFIX
    for key in [key for key in state_dict if key.startswith(start)]:
        state_dict[prefix + key.removeprefix(start)] = state_dict.pop(key)


def _put_prefix_on(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(prefix + _PREFIX):
            state_dict[prefix + _PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
