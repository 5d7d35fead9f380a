"""Reduce: what becomes of a unit's whole gradients once backward has the last of them.

    whole gradients --launch--> in flight --wait--> mean, this rank's rows --> `.grad`

[Note: gradients that are not there]
All trainable parameters of a unit are sent, whichever of them got a gradient on this
rank: another rank may have used others (experts do so), and what is sent must match.
Zeros stand for a gradient that is not there, and one number a parameter, summed with
the rest, tells whether any rank had one. Where none had, `.grad` stays as it is. A rank
looks at these numbers only if it lacks a gradient itself: it need not wait for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.passes.layout import Member
from autoshard.runtime import collectives
from autoshard.runtime.collectives import InFlight
from autoshard.runtime.param import ShardedParam

MAX_IN_FLIGHT = 2  # one being sent while the next is filled; more only holds memory


class Reduction:
    """The gradients of some parameters of one unit, of one dtype, on their way.

    grads: whole, None where this rank has none; see [Note: gradients that are not there].
    wanted: the parameters whose gradient is asked for; the others' are sent all the same.
    Raises NotImplementedError for a sparse gradient.
    """

    def __init__(self, grads: dict[ShardedParam, Tensor | None], wanted: set[ShardedParam]) -> None:
        for param, grad in grads.items():
            if grad is not None and grad.layout != torch.strided:
                raise NotImplementedError(
                    f"the gradient of {param.name} is sparse, which can't be reduced: build the "
                    "embedding with sparse=False"
                )
        self._grads: dict[ShardedParam, Tensor | None] | None = grads
        self._params = tuple(grads)
        self._has_grad = tuple(grad is not None for grad in grads.values())
        self._wanted = wanted
        self._flight: InFlight | None = None

    def launch(self) -> None:
        """Start averaging; a world of one has nothing to send."""
        first = self._params[0]
        assert self._grads is not None
        if first.world == 1:
            return
        whole = [
            p.shard.new_zeros(p.member.size) if grad is None else grad
            for p, grad in self._grads.items()
        ]
        flags = first.shard.new_tensor(self._has_grad).repeat(first.world)  # all go to each rank
        members = (*(p.member for p in self._params), Member(first.member.dtype, (len(flags),)))
        self._flight = collectives.launch_reduce([*whole, flags], members, first.group)
        self._grads = None

    def wait(self) -> dict[ShardedParam, Tensor]:
        """This rank's rows of the mean gradients, of wanted parameters that have one anywhere."""
        if self._flight is None:
            assert self._grads is not None
            reduced = {param: grad for param, grad in self._grads.items() if grad is not None}
        else:
            *shards, anywhere = collectives.wait_reduce(self._flight)
            rows = zip(self._params, shards, self._has_grad, strict=True)
            reduced = {
                param: shard
                for index, (param, shard, has) in enumerate(rows)
                if has or anywhere[index].item() > 0
            }
        return {param: grad for param, grad in reduced.items() if param in self._wanted}

    def accumulate(self) -> None:
        """Wait, and add what comes to `.grad`."""
        for param, shard in self.wait().items():
            accumulate(param, shard)


def accumulate(sharded: ShardedParam, shard: Tensor) -> None:
    """Add this rank's rows of a mean gradient to `.grad`, then run the parameter's hooks."""
    param = sharded.param
    grad: Tensor = sharded.grad_from(shard.contiguous())
    for hook in list((param._backward_hooks or {}).values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    with torch.no_grad():
        if param.grad is None:
            param.grad = grad
        else:
            param.grad += grad
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)
