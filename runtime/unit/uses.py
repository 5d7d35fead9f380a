"""Uses of a unit's parameters: forwards that have read them, and gradients that are to come.

A unit may be read by several forwards before one backward: a discriminator of real and of made
samples, both halves of a contrastive loss. Their gradients are summed unsharded, as for an
unsharded model, and reduced once, with the last: the sum of two means is rounded otherwise than
the mean of a sum. So code that is about to reduce a gradient asks whether another one of the same
parameter is still to come in this backward, and lets it wait if so.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from autoshard import _torch

if TYPE_CHECKING:
    from autoshard.runtime.unit.param import ShardedParam
    from autoshard.runtime.unit.unit import Unit


class Use:
    """Reading of `params` by one forward, for as long as autograd has a graph of it.

    node: autograd's node that runs in backward once the gradients of `params` are in.
    """

    def __init__(self, params: Container[ShardedParam], node: Any) -> None:
        """Note the use, whose gradients are still to come; `node` is held weakly."""
        self._params = params
        self._node: weakref.ref[Any] = weakref.ref(node)  # which holds this, or is held with it
        self._ended_in = -1

    def end(self) -> None:
        """Note that the running backward has the gradients of this use."""
        self._ended_in = _torch.autograd.graph_task()

    def is_to_come(self, param: ShardedParam) -> bool:
        """Tell whether this use is still to bring a gradient of `param` in the running backward."""
        if param not in self._params or self._ended_in == _torch.autograd.graph_task():
            return False
        node = self._node()
        return node is not None and _torch.autograd.will_run(node)


def num_to_come(param: ShardedParam) -> int:
    """Number of uses of `param` that have yet to bring gradients in the running backward.

    0 if none is running.
    """
    uses = param.unit.uses
    if not uses or not _torch.autograd.in_backward():
        return 0
    return sum(use.is_to_come(param) for use in uses)


def may_repeat(unit: Unit) -> bool:
    """Tell whether autograd has graphs of several forwards that have read `unit`.

    If so, more than one gradient of a parameter may come, in this backward or another.
    """
    return len(unit.uses) > 1
