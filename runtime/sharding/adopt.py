"""One-line form, torch.compile alone: shard a plain model in place, and move its optimizers over.

A compiled module is sharded at its first call (`first_call.py`). Where a function was
compiled, the backend gets a graph over plain parameters, finds the modules that hold
them, shards those, and has Dynamo trace the frame again. A DTensor can't take over a
Parameter's identity, so optimizers built before are moved to the new parameters.

[Note: parameters from before sharding]
What may still hold an old parameter, and what becomes of it:
- a `torch.optim.Optimizer`: rebound here, and checked before each of its steps;
- another object with a `step` method: an error here;
- a list of the user's own (for clipping, or an average of weights): it can't be found for
  certain, so any use of an old parameter is an error from then on (`_StaleParameter`), unless
  the model was sharded in the middle of a forward, which may still be using it;
- a graph of autograd's, if a part of forward ran before the first frame was compiled:
  the gradient that arrives at the old parameter is reduced into the new one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.eager import access, methods
from autoshard.runtime.sharding import from_fsdp2
from autoshard.runtime.sharding.shard import said_otherwise, shard
from autoshard.runtime.training.checkpoint.on_ranks import this_rank
from autoshard.runtime.training.optimizers import check_owners, live_optimizers, rebind_optimizers
from autoshard.runtime.unit.param import ShardedParam, find, is_ignored
from autoshard.runtime.unit.reduce import Reduction
from autoshard.runtime.unit.unit import root_unit


def plain_parameters(example_inputs: Sequence[Any]) -> list[nn.Parameter]:
    """List the plain parameters among the inputs of a captured graph, without ignored ones.

    DTensors are not plain, nor are parameters from before sharding.
    """
    return [
        value
        for value in example_inputs
        if isinstance(value, nn.Parameter)
        and not isinstance(value.data, DTensor)
        and find(value) is None
        and not is_ignored(value)
    ]


def adopt(params: list[nn.Parameter], shard_arguments: dict[str, Any]) -> bool:
    """Shard the outermost modules that hold `params`, which a captured graph reads, in place.

    They are modules that were compiled or whose call is on the stack, or that the code being traced
    can name. Each is sharded, and its optimizers moved over, by `adopt_module`, for which ranks
    wait for each other. Only to be called while Dynamo compiles a frame.

    shard_arguments: of `shard()`.
    Returns whether anything was sharded: not if the model was sharded explicitly
    before, and these are parameters that the user left out.
    Raises RuntimeError, before anything is sharded, if a parameter is in no such module; and as
    `adopt_module`.
    """
    adopted = [adopt_module(root, shard_arguments) for root in _find_roots(params)]
    return any(adopted)


@_torch.dynamo.disable  # a function that is traced may be the first to call the model
def adopt_module(root: nn.Module, shard_arguments: dict[str, Any]) -> bool:
    """Shard `root`, and have all optimizers that hold its parameters train the sharded ones.

    Returns True; or False, and does nothing, if `root` heads a unit, or a parameter in it is
    sharded already. All ranks call this together: `shard()` makes the process group if there is
    none, moves the model to this rank's device, and by default broadcasts its values. From now on
    any use of an old parameter raises, unless a forward of `root` is running, which may need it:
    for that a step is opened, in which further reads gather. See [Note: parameters from before
    sharding]. Gradients that still arrive at old parameters, of graphs made before, are reduced
    into the sharded ones'.

    If `root` is a DistributedDataParallel, the module in it is meant; one around it only calls it
    from then on, with a warning. What torch's `fully_shard` has sharded is converted, see
    `from_fsdp2.py`.

    shard_arguments: of `shard()`.
    Raises as `shard()`, and, before anything is sharded, RuntimeError as `check_owners`, and
    ValueError for arguments that say how to shard what is sharded already, otherwise.
    """
    root = _torch.ddp.inside(root)
    unit = access.unit_of(root)
    if unit is not None:  # also one without parameters
        check_said(root, shard_arguments)
        return False
    if from_fsdp2.convert(root, shard_arguments):
        return True
    before = dict(access.named_sharded(root))
    known = next(filter(None, map(find, before.values())), None)
    if known is not None:
        check_said(root, shard_arguments)
        return False
    optimizers = live_optimizers()
    shells = _torch.ddp.around(root)
    check_owners(root, before, optimizers)
    _check_shells(shells, root)
    shard(root, **shard_arguments)
    _take_off(shells, root)
    found = {param: find(param) for param in before.values()}  # None: it is ignored
    moved = {param: sharded for param, sharded in found.items() if sharded is not None}
    rebind_optimizers(optimizers, moved)
    for old, sharded in moved.items():
        _forward_late_gradient(old, sharded)
    if not methods.began_before(root):
        for old in moved:
            old.__class__ = _StaleParameter
    return True


def check_said(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise ValueError if a module inside `module`, or it itself, was sharded otherwise.

    arguments: of `shard()`; those that are defaults say nothing.
    """
    unit = access.unit_of(module)
    if unit is None:
        sharded = (find(param) for _, param in access.named_sharded(module))
        unit = next((each.unit for each in sharded if each is not None), None)
    if unit is None:
        return
    names = said_otherwise(root_unit(unit).modules[0], arguments)
    if names:
        raise ValueError(
            f"{type(module).__name__} is sharded already, and options {names} of the backend say "
            "how to shard it, otherwise than it is: give them to autoshard.shard() or "
            "load_pretrained(), which sharded it, or leave them out"
        )


def _check_shells(shells: list[Any], root: nn.Module) -> None:
    """Raise RuntimeError if DistributedDataParallel modules around `root` train more than `root`.

    Nobody would average the rest.
    """
    own = set(root.parameters())
    for shell in shells:
        for name, param in shell.module.named_parameters():
            if param.requires_grad and param not in own:
                raise RuntimeError(
                    f"DistributedDataParallel around {type(shell.module).__name__} trains {name}, "
                    f"too, which is not in {type(root).__name__} that autoshard shards: compile "
                    "all of it, and leave DistributedDataParallel out"
                )


def _take_off(shells: list[Any], root: nn.Module) -> None:
    """Have DistributedDataParallel modules around `root` only call it, with a warning."""
    for shell in shells:
        _torch.ddp.let_go(shell)
    if shells and this_rank() == 0:
        warnings.warn(
            f"DistributedDataParallel around {type(root).__name__} does nothing from now on, as "
            "autoshard shards the model and averages its gradients: leave it out (with Accelerate, "
            "don't give the model to prepare())",
            UserWarning,
            stacklevel=4,
        )


def _find_roots(params: list[nn.Parameter]) -> list[nn.Module]:
    """Find the outermost modules that hold `params`: a compiled one, or several of a function's.

    Looks at compiled modules and then at others whose call is on the stack, outermost first, and
    then at modules that the traced frame can name, large ones first. Each is taken if it holds a
    parameter that none before it holds. Raises RuntimeError if a parameter is in none.
    """
    missing = dict.fromkeys(params)
    roots: list[nn.Module] = []
    for candidate in (*_compiled_modules(), *_running_modules(), *_modules_in_scope()):
        held = [param for param in candidate.parameters() if param in missing]
        if held:
            roots.append(candidate)
            for param in held:
                missing.pop(param, None)
    if missing:
        sizes = ", ".join(str(list(param.shape)) for param in missing)
        raise RuntimeError(
            f"the compiled code reads parameters of size {sizes} that belong to no module which "
            "was compiled: compile the module that holds them, or shard it with autoshard.shard()"
        )
    return roots


def _compiled_modules() -> list[nn.Module]:
    """List the modules given to torch.compile whose call is on the stack, outermost first.

    They are the modules in torch.compile's wrappers, not the wrappers; each is listed once. Any
    frame with such a module or wrapper as its local `self` counts as a call of it.
    """
    found: dict[nn.Module, None] = {}
    for frame in _stack():
        module = _torch.dynamo.compiled_module(frame.f_locals.get("self"))
        if module is not None:
            found[module] = None
    return list(found)


def _running_modules() -> list[nn.Module]:
    """List all modules whose call is on the stack, outermost first, compiled or not."""
    return [frame.f_locals["self"] for frame in _stack() if frame.f_code is _torch.nn.CALL]


def _stack() -> list[FrameType]:
    """List the frames of this thread's stack, outermost first."""
    frames = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _modules_in_scope() -> list[nn.Module]:
    """List the modules that the frame being traced can name, those with most modules inside first.

    It names them by its locals and globals: see `_modules_in`.
    """
    local, outer = _torch.dynamo.traced_scope()
    found = _modules_in((*local.values(), *outer.values()))
    return sorted(found, key=lambda module: -sum(1 for _ in module.modules()))


def modules_named_by(function: Any) -> list[nn.Module]:
    """List the modules that `function` names as globals, closes over, defaults to or is bound to.

    If it is a module itself, that is among them. Of a function that it names or defaults to, the
    modules which that one closes over or is bound to are listed, too. Empty for another object.
    """
    code = getattr(function, "__code__", None)
    outer = getattr(function, "__globals__", {})
    named = [outer.get(name) for name in code.co_names] if code is not None else []
    defaults = getattr(function, "__defaults__", None) or ()
    by_keyword = (getattr(function, "__kwdefaults__", None) or {}).values()
    return list(_modules_in((function, *named, *defaults, *by_keyword)))


def _modules_in(values: Iterable[Any]) -> dict[nn.Module, None]:
    """Find modules among `values`, or that a function among them is bound to or closes over.

    Returns them in order, as the keys of a dict.
    """
    found: dict[nn.Module, None] = {}
    for value in values:
        for each in (value, getattr(value, "__self__", None), *_closure(value)):
            if isinstance(each, nn.Module):
                found[each] = None
    return found


def _closure(value: Any) -> Iterable[Any]:
    """Yield the values that the function `value` closes over, without those that are not set yet.

    Yields nothing for what is no function.
    """
    for cell in getattr(value, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


class _StaleParameter(nn.Parameter):
    """Parameter from before sharding, which the model no longer reads.

    Any torch function or attribute that is used on it raises RuntimeError.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise RuntimeError, whatever `func` is.

        The message names `func`, and the sharded parameter if the old one is among `args` itself.
        """
        stale = next((each for each in args if type(each) is _StaleParameter), None)
        sharded = find(stale)
        name = sharded.name if sharded is not None else "a parameter"
        raise RuntimeError(
            f"{name} is used ({getattr(func, '__name__', func)}) through its parameter from before "
            "sharding, which the model no longer reads: take parameters from model.parameters() "
            "after the first call, or call autoshard.shard(model) before making lists of them"
        )


def _forward_late_gradient(old: nn.Parameter, sharded: ShardedParam) -> None:
    """Have gradients that arrive at `old`, of before sharding, reduced into `.grad` of `sharded`.

    A hook on `old` takes each gradient out of `old.grad`, reduces it over the ranks of the unit at
    once, also in `no_sync()`, and waits. Nothing is reduced now. See [Note: parameters from before
    sharding]. Does nothing if `old` is frozen. A gradient that arrives after `sharded` was written
    to since now raises RuntimeError in backward.
    """
    if not old.requires_grad:
        return
    stamp = sharded.stamp

    def forward(param: nn.Parameter) -> None:
        """Reduce the gradient of `param`, the old one, into the sharded one's `.grad`, and wait.

        `.grad` of `param` is emptied; hooks of the sharded parameter run. All ranks take part.
        Raises RuntimeError if the sharded parameter was written to since it was made.
        """
        if sharded.stamp != stamp:
            raise RuntimeError(
                f"{sharded.name} was read through its parameter from before sharding, after the "
                "first update: read it from the module, or call autoshard.shard(model) first"
            )
        with _torch.tensors.without_torch_function():
            grad, param.grad = param.grad, None
        assert grad is not None
        reduction = Reduction(sharded.unit, {sharded: grad}, {sharded}, sharded.member.dtype)
        reduction.launch()
        reduction.accumulate()

    old.register_post_accumulate_grad_hook(forward)
