"""Warnings about unsharded parameters that are trained beside a sharded model.

A head of the user's own, say, or loss weights. Their gradients are each rank's own, so the ranks
drift apart. An optimizer that steps such parameters may as well train another model, replicated
by other means. The difference is whether it also trains sharded parameters, or whether
gradients come from a backward that sharded parameters are part of. So the backward after an
optimizer's first step is watched.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque

import torch
from torch import nn

from autoshard import _torch
from autoshard.runtime.ranks.ledger import Ledger
from autoshard.runtime.unit.unit import Unit, root_unit, unit_of

_backwards: deque[int] = deque(maxlen=64)  # graph tasks of late in which something was reduced
_WATCH = "_autoshard_watch"  # on a parameter: the hook that watches, or watched, it


def note_backward(owner: Unit) -> None:
    """Note that parameters of `owner`'s model are part of the backward now running.

    Raises RuntimeError if ranks have not done the same before it (`Ledger`).
    """
    task = _torch.autograd.graph_task()
    _backwards.append(task)
    root = root_unit(owner)
    if not root.is_unordered:
        root.state(Ledger).note_backward(task)


def tell_or_watch(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer, *, has_sharded: bool
) -> None:
    """Warn of unsharded `params`, about to be stepped, if they are trained with sharded ones.

    has_sharded: whether `optimizer` trains sharded parameters, too: then the warning comes now.
        Else the next backward that gives a parameter a gradient is watched, and the warning comes
        at its end if sharded parameters are part of it.
    Each parameter is looked at once only. There is no warning for one that torch's own `replicate`
    or `fully_shard` manages.
    """
    for param in params:
        if not hasattr(param, _WATCH):
            setattr(param, _WATCH, None)
            if has_sharded:
                _tell(param, type(optimizer).__name__)
            else:
                _watch(param, type(optimizer).__name__)


def unwatch(param: nn.Parameter) -> None:
    """Stop watching `param`, which is going to be sharded, if it is watched."""
    handle = getattr(param, _WATCH, None)
    if handle is not None:
        handle.remove()


def _watch(param: nn.Parameter, owner: str) -> None:
    """Watch the next backward that gives `param` a gradient, and no other.

    At its end `_tell` warns, if sharded parameters were part of it. `unwatch` finds the handle of
    the hook on `param`.

    owner: name of the optimizer's class, for the message.
    """

    def check(param: nn.Parameter) -> None:
        """Stop watching `param`, and see at the end of this backward whether to warn.

        There is a warning if sharded parameters were part of it.
        """
        handle.remove()
        task = _torch.autograd.graph_task()

        def tell() -> None:
            if task in _backwards:
                _tell(param, owner)

        _torch.autograd.queue_backward_callback(tell)  # the sharded ones' turn may be yet to come

    handle = param.register_post_accumulate_grad_hook(check)
    setattr(param, _WATCH, handle)


def _is_taken_by_torch(param: nn.Parameter) -> bool:
    """Tell whether torch's own `replicate` or `fully_shard` averages the gradient of `param`.

    Looks through all objects of the process for modules that were given to one of them.
    """
    modules = (each for each in gc.get_objects() if issubclass(type(each), nn.Module))
    around = [each for each in modules if _torch.fsdp.contracts(each) and unit_of(each) is None]
    return any(each is param for module in around for each in module.parameters())


def _tell(param: nn.Parameter, owner: str) -> None:
    """Warn that `param` is trained and its gradient not averaged, unless torch's functions do so.

    owner: name of the optimizer's class, for the message.
    """
    if _is_taken_by_torch(param):
        return
    warnings.warn(
        f"{owner} trains a parameter of size {list(param.shape)} that is not sharded, with a loss "
        "that sharded parameters are part of: its gradient is not averaged over ranks, which "
        "drift apart; shard the module that holds it too",
        RuntimeWarning,
        stacklevel=2,
    )
