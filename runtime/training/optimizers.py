"""Optimizers: moved over if built before sharding, and checked before each step."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoshard import _torch
from autoshard.passes.ir.layout import part_of
from autoshard.runtime.comm.mesh import world_size
from autoshard.runtime.eager import access, unmanaged
from autoshard.runtime.ranks.ledger import Ledger
from autoshard.runtime.training.host_states import params_from_host, step_from_host
from autoshard.runtime.training.loaded_states import watch
from autoshard.runtime.training.local_step import STEP, stand_in_for, stand_in_of
from autoshard.runtime.unit.param import ShardedParam, check_wanted, find, is_ignored, lent_by
from autoshard.runtime.unit.reduce import is_waiting
from autoshard.runtime.unit.unit import heads, root_unit

_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEPTH = 4  # an optimizer keeps parameters in a list in a dict in a list in its __dict__


def rebind_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], moved: Mapping[nn.Parameter, ShardedParam]
) -> None:
    """Have `optimizers` train the sharded parameters instead of those from before sharding.

    Lists of parameters are changed in place, so whoever shares them sees the change. The state of a
    parameter moves to the sharded one, in the same dict: tensors of the parameter's size are cut to
    this rank's part, as DTensors; other values, and the count of steps, stay. Nothing is sent.

    moved: sharded parameter of each one from before sharding. Other parameters stay.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [
                moved[param].param if param in moved else param for param in group["params"]
            ]
        for param, state in list(optimizer.state.items()):
            if isinstance(param, nn.Parameter) and param in moved:
                del optimizer.state[param]
                sharded = moved[param]
                # The same dict: a step that is running, and whose closure shards, may hold it.
                state.update({key: _cut(key, value, sharded) for key, value in state.items()})
                optimizer.state[sharded.param] = state


def move_to_shards(
    optimizers: Iterable[torch.optim.Optimizer], moved: Mapping[nn.Parameter, ShardedParam]
) -> None:
    """Have `optimizers` train sharded parameters instead of others that are cut alike.

    Lists of parameters are changed in place; the state of a parameter stays as it is.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [
                moved[param].param if param in moved else param for param in group["params"]
            ]
        for param, sharded in moved.items():
            if param in optimizer.state:
                optimizer.state[sharded.param] = optimizer.state.pop(param)


def check_owners(
    model: nn.Module,
    params: Mapping[str, nn.Parameter],
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Raise RuntimeError if something other than `optimizers` trains one of `model`'s `params`.

    That is: an object with a `step` method that holds one, through a few lists, dicts and the
    like; modules and torch's own objects don't count. Also raised for a parameter with gradient
    hooks, which would never run again.

    params: those that are going to be sharded, by name. Hooks by which `unmanaged` watches for
        unsharded parameters are taken off them first. The search goes through all objects of the
        process, and is left out if nothing unknown holds one.
    """
    for name, param in params.items():
        unmanaged.unwatch(param)
        if _torch.autograd.hooks_of(param):
            raise RuntimeError(
                f"parameter {name} has gradient hooks, which sharding can't move: call "
                "autoshard.shard(model) before registering them"
            )
    names = {id(param): name for name, param in params.items()}
    known = [params, *_holders(model, optimizers)]
    seen = set(map(id, known))
    holders: list[Any] = _held_elsewhere(params, known)
    # A look for referrers goes through all objects there are, and compares with each holder.
    for _ in range(_DEPTH):
        if not holders:
            return
        seen.add(id(holders))
        referrers = [each for each in gc.get_referrers(*holders) if id(each) not in seen]
        seen.update(map(id, referrers))
        for each in referrers:
            if _is_foreign_optimizer(each):
                raise RuntimeError(_cannot_move(each, names))
        # An object's __dict__ may be its own referrer, with the object one level up.
        holders = [each for each in referrers if type(each) in _CONTAINERS]


def _holders(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> Iterable[Mapping[Any, Any] | list[Any]]:
    """Yield the containers in which `model`'s modules and `optimizers` hold parameters."""
    for module in model.modules():
        yield module._parameters
    for optimizer in optimizers:
        yield optimizer.state
        for group in optimizer.param_groups:
            yield group["params"]


def _held_elsewhere(
    params: Mapping[str, nn.Parameter], known: Iterable[Mapping[Any, Any] | list[Any]]
) -> list[nn.Parameter]:
    """Select those of `params` that have more references than the `known` containers hold."""
    counts: Counter[int] = Counter()
    for container in known:
        counts.update(map(id, container))
        if isinstance(container, Mapping):
            counts.update(map(id, container.values()))
    passing = 2  # the loop's variable and getrefcount's argument
    return [
        param for param in params.values() if sys.getrefcount(param) > counts[id(param)] + passing
    ]


def _is_foreign_optimizer(holder: object) -> bool:
    """Tell whether `holder` has a method `step`, and is no module, class, frame or torch's own."""
    cls = type(holder)
    if issubclass(cls, (torch.optim.Optimizer, nn.Module, type, types.FrameType)):
        return False
    if cls.__module__.startswith("torch."):  # torch's own: schedulers, Dynamo's tracer
        return False
    return callable(getattr(cls, "step", None))


def _cannot_move(holder: object, names: Mapping[int, str]) -> str:
    """Make the error's text for `holder`, with a parameter that it holds if one is found.

    names: of parameters, by id.
    """
    held = next(
        (
            names[id(each)]
            for each in gc.get_referents(*gc.get_referents(holder), holder)
            if id(each) in names
        ),
        "one of the model's",
    )
    cls = type(holder)
    return (
        f"{cls.__module__}.{cls.__qualname__} holds parameter {held} but is no "
        "torch.optim.Optimizer, so it can't be moved to the sharded parameters and would train "
        "nothing: call autoshard.shard(model) before building it"
    )


def live_optimizers() -> list[torch.optim.Optimizer]:
    """List all live instances of `torch.optim.Optimizer` and its subclasses in this process."""
    kinds = _with_subclasses(torch.optim.Optimizer)
    # type(o), not isinstance: that asks o.__class__, and a dead weak proxy raises.
    return [o for o in gc.get_objects() if type(o) in kinds]


def _with_subclasses(cls: type[Any]) -> set[type[Any]]:
    """Collect `cls` and all classes that derive from it, directly or not."""
    found = {cls}
    for each in cls.__subclasses__():
        found |= _with_subclasses(each)
    return found


def _cut(key: str, value: Any, sharded: ShardedParam) -> Any:
    """Cut an optimizer's state tensor of its parameter's size to this rank's part, as a DTensor.

    Other values, and the count of steps, are returned as they are.

    key: of `value` in the parameter's state.
    """
    if key == STEP:
        return value
    if not isinstance(value, Tensor) or tuple(value.shape) != sharded.member.size:
        return value
    world, rank, member = sharded.world, sharded.axes.shard_rank, sharded.member
    return sharded.grad_from(part_of(value, member, world, rank))


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Check a step of `optimizer` right before it begins, as the last of the hooks before it.

    Parameters whose states live on the host are stepped here; a closure is called before that.
    Returns the arguments (args, kwargs) that run it on a stand-in, see `local_step.py`, or with a
    closure that is checked after its first call: the backward in it may be the one that reduces.
    None to run the step as it is: if it is given other arguments, or if there is no stand-in.
    Raises as `_check_before_step` and `params_from_host`.
    """
    _, *given = args
    mine = params_from_host(optimizer)
    closure = given[0] if given else kwargs.get("closure")
    if callable(closure):
        checked = _called_now(closure) if mine else _checked_after(closure, optimizer)
        given, kwargs = (
            ([checked, *given[1:]], kwargs) if given else ([], {**kwargs, "closure": checked})
        )
        if not mine:
            return (optimizer, *given), kwargs
    _check_before_step(optimizer)
    if mine:
        watch(optimizer)
        left = step_from_host(optimizer, mine, given, kwargs)
        return (stand_in_for(optimizer, left, optimizer.state), *given), kwargs
    if any(value is not None for value in (*given, *kwargs.values())):
        return None
    stand_in = stand_in_of(optimizer)
    return None if stand_in is None else ((stand_in, *given), kwargs)


_handles: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = (
    weakref.WeakKeyDictionary()
)
"""Handle of `_before_step` among the hooks of each optimizer."""


@_torch.dynamo.disable  # where a step is compiled, it would be taken to be the first each time
def _be_last(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Have `_before_step` run after all other hooks: they may change gradients, groups and states.

    It is torch's hook before all optimizers' steps, which runs before an optimizer's own.
    """
    handle = _handles.get(optimizer)
    if handle is not None:
        if _torch.nn.is_last_before_step(optimizer, handle.id):
            return
        handle.remove()
    _handles[optimizer] = optimizer.register_step_pre_hook(_before_step)


def _called_now(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call `closure`, and return a function that returns what it did."""
    with torch.enable_grad():
        loss = closure()
    return lambda: loss


def _checked_after(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Any:
    """Return `closure` with a check of the step of `optimizer` after its first call."""
    is_checked = False

    @functools.wraps(closure)
    def call() -> Any:
        """Run the closure; the first time, check the step that goes on after it."""
        nonlocal is_checked
        loss = closure()
        if not is_checked:
            is_checked = True
            _check_before_step(optimizer)
        return loss

    return call


def _check_before_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a step of `optimizer` would train something else than the model.

    That is: a parameter from before sharding, one that another stands in the place of, a gathered
    copy, one whose gradient still waits to be reduced, or, with several ranks, as `_check_plain`.
    Also raised if `backward(inputs=...)` was given a gathered copy. Warns, now or after the next
    backward, of plain parameters that are trained together with sharded ones, with several ranks;
    plain ones are not looked at if all learning rates are 0, or without a gradient. Counts the
    step for each sharded parameter, which tells that its values change, and notes it in the ledger
    that ranks compare.
    """
    check_wanted()
    plain: list[nn.Parameter] = []
    has_sharded, first = False, None
    for group in optimizer.param_groups:
        for param in group["params"]:
            sharded = find(param)
            _refuse_lent(optimizer, param)
            if sharded is None:
                plain_grad = param.grad is not None and not isinstance(param, DTensor)
                if plain_grad and not is_ignored(param):
                    plain.append(param)
            elif sharded.param is not param:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds parameter {sharded.name} from before "
                    "sharding, before load_state_dict(assign=True) or inside full_params(), so its "
                    "step would train nothing: build the optimizer from model.parameters() after "
                    "sharding and loading"
                )
            elif _is_out_of_place(sharded):
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds parameter {sharded.name}, but another one "
                    "was put in its place, so its step would train nothing: step outside of "
                    "full_params(), and replace parameters before sharding"
                )
            elif is_waiting(sharded):
                raise RuntimeError(
                    f"{type(optimizer).__name__} steps {sharded.name}, whose gradient is still "
                    "waiting to be reduced: let the last backward before the step synchronise "
                    "gradients (leave no_sync(), or set_requires_gradient_sync(True) and "
                    "set_requires_all_reduce(True))"
                )
            else:
                sharded.num_updates += 1
                first = first or sharded
                has_sharded |= sharded.axes.num_ranks > 1
    if first is not None:
        _refuse_factored(optimizer)
        _refuse_without_dtensors(optimizer, first)
    if plain and world_size() > 1 and not _is_idle(optimizer):
        _check_plain(type(optimizer).__name__, plain)
        unmanaged.tell_or_watch(plain, optimizer, has_sharded=has_sharded)
    if first is not None and not _makes_state(optimizer):
        root = root_unit(first.unit)
        if not root.is_unordered:
            root.state(Ledger).note_step(optimizer, root.identity, root.axes.mesh)


def _refuse_factored(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if `optimizer` is an Adafactor, of whatever library, and trains shards.

    It keeps means over the rows and columns of a matrix, which no rank has.
    """
    if "Adafactor" not in type(optimizer).__name__:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            sharded = find(param)
            if sharded is not None and sharded.world > 1:
                raise RuntimeError(
                    f"{type(optimizer).__name__} keeps means over rows and columns of whole "
                    f"matrices, and a rank has some rows of {sharded.name} only: train with "
                    "torch.optim.AdamW, or with torch.optim.Adafactor and strategy='no_shard'"
                )


def _refuse_without_dtensors(optimizer: torch.optim.Optimizer, sharded: ShardedParam) -> None:
    """Raise RuntimeError if `optimizer`, which trains `sharded`, is one of bitsandbytes.

    Its kernels take plain tensors, and parameters are DTensors.
    """
    if any(each.__module__.split(".")[0] == "bitsandbytes" for each in type(optimizer).__mro__):
        raise RuntimeError(
            f"{type(optimizer).__name__} of bitsandbytes takes no DTensors, as parameter "
            f"{sharded.name} is: train with torchao.optim.AdamW8bit, which does"
        )


def _refuse_lent(optimizer: torch.optim.Optimizer, param: Tensor) -> None:
    """Raise RuntimeError if `param`, of `optimizer`, is a copy that `named_parameters()` gave."""
    name = lent_by(param)
    if name is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds a gathered copy of parameter {name}, so its step "
            "would train nothing: build the optimizer from model.parameters() before unshard() or "
            "after reshard(), and not between forward and backward"
        )


def _is_out_of_place(sharded: ShardedParam) -> bool:
    """Tell whether a module has another parameter, not none, where `sharded` is registered."""
    for module, attribute in sharded.registrations:
        stands_there = module._parameters.get(attribute)
        if stands_there is not None and stands_there is not sharded.param:
            return True
    return False


def _is_idle(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step of `optimizer` changes no parameter, as its learning rates are 0.

    torch.distributed.checkpoint makes state with such a step.
    """
    return all(float(group.get("lr", 1.0)) == 0.0 for group in optimizer.param_groups)


def _makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step may be one of torch.distributed.checkpoint, which makes state so.

    Unlike `_is_idle` it looks at no tensor, which may be on a device.
    """
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(isinstance(rate, float) and rate == 0.0 for rate in rates)


def _check_plain(kind: str, plain: list[nn.Parameter]) -> None:
    """Raise RuntimeError if one of `plain`, unsharded parameters, should have been sharded.

    That is one of `uncalled_modules`, or one put into a module of a unit after sharding.

    kind: the optimizer's type, for the message.
    """
    uncalled = _names_of_params(uncalled_modules)
    inside = _names_of_params(heads)
    for param in plain:
        if id(param) in uncalled:
            raise RuntimeError(
                f"{kind} trains {uncalled[id(param)]}, which was compiled with autoshard but never "
                "called through what torch.compile gave back, or that Dynamo captured nothing of, "
                "so that it is not sharded: call that first, or autoshard.shard(model); if another "
                "method comes first, autoshard.register_forward_method(model, its name) before"
            )
        if id(param) in inside:
            raise RuntimeError(
                f"{kind} trains {inside[id(param)]}, which was put into its module after sharding: "
                "it is not sharded, and its gradient is each rank's own. Add modules and "
                "parameters before sharding"
            )


uncalled_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that are an error if an optimizer trains unsharded parameters of theirs.

They were compiled, and not called yet; or a compiled function that was called can name them."""


def _names_of_params(modules: Iterable[nn.Module]) -> dict[int, str]:
    """Map the id of each parameter in `modules` to its name, behind the class of its module."""
    return {
        id(param): f"{type(module).__name__}.{name}"
        for module in list(modules)
        for name, param in access.named_sharded(module)
    }


_hook = None


def watch_optimizers() -> None:
    """Check each step of torch's optimizers from now on, in all of this process.

    A step that would train outdated parameters raises RuntimeError: see `_check_before_step`. Steps
    of optimizers that `local_step.py` knows update shards as plain tensors. A second call does
    nothing.
    """
    global _hook
    if _hook is None:
        _hook = register_optimizer_step_pre_hook(_be_last)
