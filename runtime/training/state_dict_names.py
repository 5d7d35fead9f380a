"""State dicts of `torch.compile(model)` under the model's own names.

torch.compile wraps a module in another, whose state dict says `_orig_mod.layers.0.w`.
A checkpoint should not depend on whether the model was compiled: for modules compiled
with autoshard the prefix is taken off on saving, and either spelling is read.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoshard import _torch

_PREFIX = "_orig_mod."


def keep_names(optimized: nn.Module) -> None:
    """Give `optimized`, which torch.compile made of a module, the module's own state-dict keys.

    Its `state_dict()` has them, and its `load_state_dict()` takes them with torch.compile's prefix
    or without.

    Patched: `state_dict`, on `optimized` alone.
    Why:     a hook would run for torch.distributed.checkpoint, too, which takes the prefix off by
             itself (`_torch.checkpoint.look_behind`), on torch 2.11 to 2.15.
    Tests:   in tests/unit/test_patches.py `test_checkpoints_take_the_prefix_off`, needed; in
             tests/parity/training/test_state.py `test_names`, works.
    """
    # Set on the wrapper itself: its own __setattr__ hands everything on to the module.
    object.__setattr__(optimized, "state_dict", _StateDict(optimized))
    optimized.register_load_state_dict_pre_hook(_put_prefix_on)


class _StateDict:
    """Function in place of `optimized.state_dict`, which takes the prefix off the keys.

    All instances are equal. torch.distributed.checkpoint strips the prefix itself and needs to find
    it, so one instance is registered there: for any equal one it calls the class's `state_dict`.

    optimized: None for the instance that is only registered.
    """

    def __init__(self, optimized: nn.Module | None) -> None:
        self._optimized = optimized

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the module's state dict, in its order, with keys that lack torch.compile's prefix.

        Arguments are those of `nn.Module.state_dict`; a dict given as `destination` is changed in
        place, and its keys that do not begin with `prefix` stay.
        """
        assert self._optimized is not None
        state: dict[str, Any] = type(self._optimized).state_dict(self._optimized, *args, **kwargs)
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")  # torch takes both
        start = prefix + _PREFIX
        for key in list(state):
            value = state.pop(key)  # taken out and put back, so that the order stays
            if key.startswith(start):
                key = start.removesuffix(_PREFIX) + key.removeprefix(start)
            state[key] = value
        return state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StateDict)

    def __hash__(self) -> int:
        return hash(_StateDict)


_torch.checkpoint.look_behind(_StateDict(None))


def _put_prefix_on(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Put torch.compile's prefix, in place, behind `prefix` in keys of `state_dict` that lack it.

    Keys that do not begin with `prefix` stay. `load_state_dict()` calls it first, as a hook.
    """
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if not key.startswith(prefix + _PREFIX):
            state_dict[prefix + _PREFIX + key.removeprefix(prefix)] = state_dict.pop(key)
