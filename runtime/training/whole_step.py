"""A whole training step in one call: microbatches, reduction, clipping, the optimizer's update.

    step = autoshard.train_step(model, optimizer, loss, accumulate=4, clip=1.0)
    for microbatches in data:
        mean = step(microbatches)

It does what a loop written by hand does, with the same numbers:

    each microbatch but the last    forward and backward; gradients wait, unsharded
    the last microbatch             forward and backward, which reduces all of them
                                    gradients unscaled; callbacks for "reduced"
                                    the global norm, clipping; callbacks for "clipped"
                                    the optimizer, the schedule; callbacks for "updated"
                                    gradients are let go of

Graphs of microbatches have no reduces, and are compiled beside that of the last one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autoshard import _torch
from autoshard.runtime.unit.unit import unit_of

POINTS = ("reduced", "clipped", "updated")
"""Points of a step at which callbacks run."""

Loss = Callable[[Any, Any], Tensor]
"""loss(model, batch): a scalar to differentiate."""

Callback = Callable[["TrainStep"], Any]
"""callback(step): None, or whether the step goes on."""


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loss: Loss,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    schedule: Any = None,
) -> TrainStep:
    """Make a function that runs one training step of `model`, for a batch or for microbatches.

    A model that autoshard has compiled or sharded stays as it is, with its options. Another one is
    compiled with autoshard, in place, and so is `loss` with it, in one graph; the first call shards
    it. All ranks call the function together. Learning rates, `clip` and the loss scale may change
    at any time: none is a constant of compiled code.

    optimizer: trains parameters of `model`; or several, such as Muon for matrices and AdamW for the
        rest, which step in this order.
    loss: called as loss(model, batch), once a microbatch; the mean over a rank's microbatches is
        differentiated.
    accumulate: microbatches of a step. Gradients of all but the last wait unsharded.
    clip: largest global norm of gradients, after which they are scaled down; None: as they are.
    scaler: scales losses, and leaves out the update after an inf or a NaN, on all ranks.
    schedule: of learning rates, or several; each one's `step()`, without an argument, is called
        after each update that was not left out.

    Raises ValueError for a number out of range; for an optimizer that trains none of `model`'s
    parameters, or whose step takes a closure; for a schedule that steps by a metric; or for a model
    of which only parts are sharded. Warns of parameters that no optimizer trains, whose gradients
    are part of the norm.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    schedules = [] if schedule is None else [schedule] if hasattr(schedule, "step") else schedule
    return TrainStep(model, optimizers, loss, accumulate, clip, scaler, schedules)


class TrainStep:
    """Function that runs one training step; `train_step` makes it.

    Calling it runs `gradients` and then `update`, which can be called one after the other as well.

    accumulate: microbatches of a step. clip: largest norm, or None. Both may be set.
    norm: of the gradients before clipping, at the last step that had `clip`; a scalar, the same on
        all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: Loss,
        accumulate: int,
        clip: float | None,
        scaler: torch.amp.GradScaler | None,
        schedules: Sequence[Any],
    ) -> None:
        """Compile `model` and `loss` if `model` is neither compiled nor sharded.

        Arguments are those of `train_step`, with optimizers and schedules as sequences.
        """
        self.accumulate, self.clip = accumulate, clip
        self.norm: Tensor | None = None
        self._model = model
        # Compiled with autoshard or sharded, it has the methods of `ShardedModule`.
        self._module: Any = _torch.ddp.inside(model)
        self._optimizers, self._loss = tuple(optimizers), loss
        self._scaler, self._schedules = scaler, tuple(schedules)
        self._callbacks = {point: OrderedDict[int, Callback]() for point in POINTS}
        self._has_gradients = False
        self._check()
        self._warn_of_untrained()
        if not hasattr(self._module, "no_sync"):
            self._module.compile(backend="autoshard")
            self._loss = torch.compile(loss, backend="autoshard")

    def __call__(self, batch: Any) -> Tensor:
        """Run a step for `batch`, and return the loss, a scalar of this rank without a gradient.

        batch: with `accumulate` over 1 a sequence of as many microbatches, else one batch, of
            whatever type. The loss is the mean of theirs.
        Raises as `gradients` and `update` do.
        """
        found = self.gradients(batch)
        self.update()
        return found

    def gradients(self, batch: Any) -> Tensor:
        """Run forward and backward of all microbatches, which leaves reduced gradients.

        `batch` and the result are those of a call. After an exception gradients are as far as they
        had come, those of earlier microbatches waiting, as in a loop; `zero_grad()` lets go of
        them. Gradients of another call since the last update are added to.
        Raises ValueError for another number of microbatches than `accumulate`, and TypeError for a
        loss that is no scalar.
        """
        self._check_numbers()
        microbatches = self._microbatches(batch)
        total: Tensor | None = None
        for number, each in enumerate(microbatches):
            is_last = number + 1 == len(microbatches)
            with contextlib.nullcontext() if is_last else self._module.no_sync():
                found = self._scalar(self._loss(self._model, each), number)
                if len(microbatches) > 1:
                    found = found / len(microbatches)
                scaled = found if self._scaler is None else self._scaler.scale(found)
                scaled.backward()
            total = found.detach() if total is None else total + found.detach()
        self._has_gradients = True
        assert total is not None
        return total

    def update(self) -> None:
        """Clip gradients, step optimizers and schedules, and let go of gradients.

        Optimizers do not step if a callback said no, and one of them does not if the scaler found
        an inf or a NaN in its gradients; schedules stay where they are in both cases.
        Raises RuntimeError if `gradients` was not called since the last update.
        """
        if not self._has_gradients:
            raise RuntimeError(
                "update() has no gradients to step with: call gradients(batch) first, or the step "
                "itself, which does both"
            )
        scaler = self._scaler
        is_unscaled = self.clip is not None or any(self._callbacks[each] for each in POINTS[:2])
        if scaler is not None and is_unscaled:
            for optimizer in self._optimizers:
                scaler.unscale_(optimizer)
        goes_on = self._tell("reduced")
        if goes_on and self.clip is not None:
            self.norm = self._module.clip_grad_norm_(self.clip)
        if goes_on and self._tell("clipped"):
            self._step()
        elif scaler is not None:
            scaler.update()
        self._has_gradients = False
        self._tell("updated")
        self._module.zero_grad()
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def on(self, point: str, callback: Callback) -> RemovableHandle:
        """Have `callback(step)` called at a point of each step; callbacks run in order.

        point: "reduced", with all gradients reduced and unscaled; "clipped", after that, without
            `clip`, too; "updated", at the end, with the gradients still there, and also if the
            update was left out.
        callback: returns None, or a bool, of NumPy or a tensor, too. With False of the first two
            points, what follows is left out, up to "updated": on all ranks, or on none.
        Returns a handle, whose `remove()` takes the callback off. Raises ValueError for another
        point. The step raises TypeError for another result.
        """
        if point not in POINTS:
            raise ValueError(f"a step has no point {point!r}; expected one of {list(POINTS)}")
        handle = RemovableHandle(self._callbacks[point])
        self._callbacks[point][handle.id] = callback
        return handle

    def _tell(self, point: str) -> bool:
        """Run the callbacks of `point`; tell whether none of them returned False."""
        answers = [callback(self) for callback in list(self._callbacks[point].values())]
        for answer in answers:
            if answer is not None and not _is_bool(answer):
                raise TypeError(
                    f"a callback for {point!r} returned {answer!r}: return True, False or None"
                )
        return all(answer is None or bool(answer) for answer in answers)

    def _step(self) -> None:
        """Step optimizers and schedules, unless the scaler has found an inf or a NaN."""
        stepped, scaler = True, self._scaler
        if scaler is None:
            for optimizer in self._optimizers:
                optimizer.step()
        else:
            for optimizer in self._optimizers:
                scaler.step(optimizer)
            # The host waits for a scale only where a schedule depends on it.
            before = scaler.get_scale() if self._schedules else None
            scaler.update()
            stepped = before is None or scaler.get_scale() >= before
        if stepped:
            for schedule in self._schedules:
                schedule.step()

    def _microbatches(self, batch: Any) -> Sequence[Any]:
        """Return the microbatches of `batch`, or raise ValueError if there are not as many."""
        if self.accumulate == 1:
            return [batch]
        given = f"one {type(batch).__name__}"
        if isinstance(batch, Sequence) and not isinstance(batch, str):
            if len(batch) == self.accumulate:
                return batch
            given = f"a sequence of {len(batch)}"
        raise ValueError(
            f"a step of {self.accumulate} microbatches was given {given}: give it a list of "
            f"{self.accumulate} batches"
        )

    def _scalar(self, found: Any, number: int) -> Tensor:
        """Return the loss `found` of microbatch `number`, or raise TypeError if it is no scalar."""
        if not isinstance(found, Tensor) or found.numel() != 1:
            what = f" of size {list(found.shape)}" if isinstance(found, Tensor) else ""
            rank = dist.get_rank() if dist.is_initialized() else 0
            raise TypeError(
                f"the loss of microbatch {number} is a {type(found).__name__}{what} on rank "
                f"{rank}, and a scalar tensor is expected: return a mean, or output.loss of a "
                "model of transformers"
            )
        return found.reshape(()) if found.dim() else found

    def _check_numbers(self) -> None:
        """Raise ValueError if a number that may be set is out of range."""
        if type(self.accumulate) is not int or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r}: a number from 1 on is expected")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip={self.clip!r}: a norm over 0 is expected, or None")

    def _check(self) -> None:
        """Raise ValueError as `train_step` does."""
        self._check_numbers()
        mine = {id(param) for param in self._module.parameters()}
        if not self._optimizers:
            raise ValueError("there is no optimizer: give train_step one, or a list of several")
        for optimizer in self._optimizers:
            if mine.isdisjoint(_trained_by(optimizer)):
                raise ValueError(
                    f"{type(optimizer).__name__} trains no parameter of "
                    f"{type(self._module).__name__}: build it from model.parameters(), and after "
                    "sharding"
                )
            if isinstance(optimizer, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS runs forward and backward several times in its step: call it in a loop "
                    "of your own, with a closure"
                )
        for schedule in self._schedules:
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "ReduceLROnPlateau steps by a metric, which a training step has not: call its "
                    "step(metric) yourself, after an evaluation"
                )
        if unit_of(self._module) is None:
            inside = [name for name, each in self._module.named_modules() if unit_of(each)]
            if inside:
                raise ValueError(
                    f"{inside[0]} is sharded, and {type(self._module).__name__} around it is not: "
                    "call autoshard.fully_shard(model) at last"
                )

    def _warn_of_untrained(self) -> None:
        """Warn of a parameter with gradients that no optimizer trains."""
        trained = set().union(*map(_trained_by, self._optimizers))
        for name, param in self._module.named_parameters():
            if param.requires_grad and id(param) not in trained:
                warnings.warn(
                    f"{name} requires a gradient, which is part of the norm, and no optimizer "
                    "trains it: freeze it by requires_grad_(False), or give it to an optimizer",
                    RuntimeWarning,
                    stacklevel=4,
                )
                return


def _trained_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Collect the ids of the parameters that `optimizer` trains."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _is_bool(answer: Any) -> bool:
    """Tell whether `answer` is a bool, of NumPy or a tensor, too."""
    if isinstance(answer, Tensor):
        return answer.dtype == torch.bool and answer.numel() == 1
    return type(answer).__name__ in ("bool", "bool_")
