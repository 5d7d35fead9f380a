"""Access is gather: reading a parameter in forward gives the unsharded parameter.

A sharded module's class is replaced by a subclass with one property per parameter.
The property reads the module's DTensor and answers by where it is read:

    under torch.compile     autoshard::unshard(local shard): a marker for the passes
    in a forward, eagerly   the unsharded parameter, from the open step
    in backward             likewise: a checkpoint runs a part of forward again
    after `unshard()`       likewise, until `reshard()`
    in another method       likewise, or in a module that is called by itself (`methods.py`)
    anywhere else           the DTensor itself, so `init.normal_(m.weight)`,
                            `SGD([m.weight])` and printing see the parameter

The subclasses hold no module's state (which parameter, which policy): that stays on
the module, so modules of one class can be sharded differently.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.errors import UsageTypeError
from autoshard.runtime.eager import methods, outside, reads
from autoshard.runtime.eager import step as steps
from autoshard.runtime.unit import precision
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import UNIT, Unit, heads
from autoshard.runtime.unit.unit import unit_of as unit_of

PARAMS = "_autoshard_params"  # module attribute: {parameter's attribute: ShardedParam}

unsharded_heads: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Heads of units inside `full_params()`: they have plain parameters there, and open no step."""

_classes: weakref.WeakKeyDictionary[type, dict[tuple[Any, ...], type]] = weakref.WeakKeyDictionary()


def bind(module: nn.Module, attribute: str, param: ShardedParam) -> None:
    """Register `param` as `module.attribute`, and have a read of that in forward gather it.

    The class of `module` is replaced by a subclass with a property for each parameter bound so far.
    `param` notes the place, and puts there what a read under torch.compile hands to the marker.
    """
    module._parameters[attribute] = param.param
    bound = module.__dict__.setdefault(PARAMS, {})
    bound[attribute] = param
    param.registrations.append((module, attribute))
    param.write_markers()
    _set_class(module, mixins=())


def head(module: nn.Module, unit: Unit, mixin: type) -> None:
    """Make `module` the head of `unit`: hooks on its forward begin and end the unit's use.

    The hook before forward runs before all others, the one after it also where forward raises. A
    hook on `state_dict()` gives buffers the dtypes from before casts. torch's `fully_shard` and
    `replicate` are made to leave the module alone.
    mixin: the class that gives `module` its methods, put before its own class: `ShardedModule`.
    """
    module.__dict__[UNIT] = unit
    heads.add(module)
    _torch.fsdp.enter_contract(module)
    _set_class(module, mixins=(mixin,))
    module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_after_forward, always_call=True)
    module.register_state_dict_post_hook(precision.keep_buffer_dtypes)


def named_registered(named: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Any]]:
    """Yield the pairs of `named`, with a parameter's unsharded copy in its place if it has one now.

    May wait for a gather that was launched before.
    named: what `nn.Module.named_parameters()` yields. `reads.registered` says which parameters have
        a copy. Parameters of no unit, and all inside `as_sharded()`, are yielded as they are.
    """
    for name, param in named:
        sharded = None if _asks_for_shards.get() else find(param)
        stands_there = sharded is not None and sharded.param is param
        yield name, reads.registered(sharded) if sharded and stands_there else param


_asks_for_shards: ContextVar[bool] = ContextVar("_asks_for_shards", default=False)


@contextlib.contextmanager
def as_sharded() -> Iterator[None]:
    """Have `named_parameters()` and `parameters()` give no unsharded copies in this context.

    They give the DTensors, also after `unshard()`, and between forward and backward.
    """
    token = _asks_for_shards.set(True)
    try:
        yield
    finally:
        _asks_for_shards.reset(token)


def named_sharded(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List (name, parameter) in `module` and below, each parameter once.

    Sharded parameters are DTensors, as optimizers train them, also where copies are given out.
    Inside `full_params()` plain ones stand in their places, and are listed.
    """
    with as_sharded():
        return list(module.named_parameters())


def params_below(module: nn.Module) -> list[ShardedParam]:
    """List the sharded parameters of `module` and of modules in it, each once."""
    found: dict[ShardedParam, None] = {}
    for each in module.modules():
        found.update(dict.fromkeys(each.__dict__.get(PARAMS, {}).values()))
    return list(found)


def original_class(module: nn.Module) -> type:
    """Return the class that the user wrote, behind the subclass that sharding has made, if any."""
    cls = type(module)
    original: type = cls.__dict__.get("_autoshard_original", cls)
    return original


def mix_in(module: nn.Module, mixin: type) -> None:
    """Put the methods of `mixin` before those of `module`, which is in a sharded model."""
    _set_class(module, (mixin, *type(module).__dict__.get("_autoshard_mixins", ())))


def is_mixed_in(module: nn.Module) -> bool:
    """Tell whether sharding has given `module` methods, as the head of a unit or inside of one."""
    return bool(type(module).__dict__.get("_autoshard_mixins"))


def _set_class(module: nn.Module, mixins: tuple[type, ...]) -> None:
    """Give `module` the subclass with a property for each parameter that is bound to it.

    Modules of one class that have the same names and mixins share a subclass, made once.
    mixins: classes put before its own; () for those that it has already.
    """
    original = original_class(module)
    mixins = mixins or type(module).__dict__.get("_autoshard_mixins", ())
    names = tuple(module.__dict__.get(PARAMS, {}))
    made = _classes.setdefault(original, {})
    key = (names, mixins)
    if key not in made:
        made[key] = _make_class(original, names, mixins)
    module.__class__ = made[key]


def _make_class(original: type, names: tuple[str, ...], mixins: tuple[type, ...]) -> type:
    """Make a subclass of `mixins` and `original` with a property for each of the `names`.

    It has the name of `original`, and methods of its own for conversions and loads (`_make_apply`,
    `_make_load`); deepcopy and pickle of a module raise TypeError.
    The forward of an `nn.RNNBase` reads its weights by the properties, not from a list kept before.
    """
    namespace: dict[str, Any] = {name: _make_property(name) for name in names}
    if issubclass(original, nn.RNNBase):
        namespace.update(_torch.nn.replaced_weights(_read_flat_weights))
    namespace.update(
        _autoshard_original=original,
        _autoshard_mixins=mixins,
        __module__=original.__module__,
        __qualname__=original.__qualname__,
        __doc__=original.__doc__,
        **_torch.nn.replaced_methods(_make_apply(original), _make_load(original)),
        __deepcopy__=_refuse_deepcopy,
        __reduce_ex__=_refuse_pickle,
    )
    return type(original.__name__, (*mixins, original), namespace)


def _make_apply(original: type) -> Callable[..., nn.Module]:
    """Make the method `_apply` for the subclass of `original`; `to()` and its like call it.

    It converts as `original` does, and units take over new dtypes. Sharded parameters are left
    alone where the conversion would change none of a module's own.
    """

    def apply(module: Any, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Convert `module` as `original._apply(module, convert, recurse)` does, and return it.

        Its own sharded parameters then learn the new dtype (`ShardedParam.refresh`), before a
        forward is traced. `convert` is first tried on its own shards. If it returns each of them
        itself, as in a forward that converts to the dtype that is there, or if there are none, only
        buffers and children are converted: torch would put new tensors into parameters that
        autograd knows already.
        """
        if _changes_nothing(module, convert):
            if recurse:
                for child in module.children():
                    _torch.nn.convert_module(type(child), child, convert)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = convert(buffer)
            return module
        result = _torch.nn.convert_module(original, module, convert, recurse)
        for sharded in module.__dict__.get(PARAMS, {}).values():
            sharded.refresh()
        return result

    return apply


def _changes_nothing(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether `module`'s own parameters are all DTensors whose shards `convert` returns as is.

    Calls `convert` on the shards, up to the first that it replaces. True without parameters.
    """
    for param in module._parameters.values():
        if param is not None:
            if not isinstance(param, DTensor):
                return False
            with torch.no_grad():
                shard = param.to_local()
                if convert(shard) is not shard:
                    return False
    return True


def _make_load(original: type) -> Callable[..., None]:
    """Make the method `_load_from_state_dict` for the subclass of `original`.

    It loads as `original` does. An unsharded tensor that `load_state_dict(assign=True)` would put
    in place of a sharded parameter is left out, with a message in `error_msgs`, which torch raises.
    """

    def load(module: nn.Module, state: Any, prefix: str, *rest: Any, **named: Any) -> None:
        """Load as `original` does, but let no unsharded tensor replace a sharded parameter.

        For that an error is added to `error_msgs`, in `named` or the last of `rest`; nothing is
        raised.
        """
        errors: list[str] = named["error_msgs"] if "error_msgs" in named else rest[-1]
        before = dict(module._parameters)
        _torch.nn.load_module(original, module, state, prefix, *rest, **named)
        for attribute in module.__dict__.get(PARAMS, {}):
            loaded = module._parameters.get(attribute)
            if isinstance(before.get(attribute), DTensor) and not isinstance(loaded, DTensor):
                module._parameters[attribute] = before[attribute]
                errors.append(
                    f"parameter {prefix}{attribute} is sharded, and what was to be assigned is "
                    "not: load it with torch.distributed.checkpoint.state_dict."
                    "set_model_state_dict(..., options=StateDictOptions(full_state_dict=True))"
                )

    return load


def _make_property(name: str) -> property:
    """Make the property for parameter `name` of a module: what a read gives depends on where it is.

    Under torch.compile a read gives a marker, `autoshard::unshard` of the local shard. Eagerly it
    gives the unsharded parameter in forward and backward, in methods and after `unshard()`, else
    the DTensor. There is no setter. Dynamo is told not to compile the getter by itself: it is only
    traced inside of other code.
    """

    def read(module: Any) -> Any:
        """Return the marker of the parameter under torch.compile; eagerly, what `_read` gives.

        What was put in its place and is no DTensor is returned as it is.
        """
        if not torch.compiler.is_compiling():
            return _read_eagerly(module, name)
        # What follows is traced at every read: most of them need one tuple. (`module.__dict__`
        # would have all that is in it traced.)
        param = module._parameters[name]
        if not isinstance(param, DTensor):
            return param
        asked = module._autoshard_marker_arguments[name]
        if asked is None:
            return _read_with_care(param, module.__dict__[PARAMS][name])
        members, group, keep, reduce, _ = asked
        return torch.ops.autoshard.unshard(
            param.to_local(), members, group, keep, -1, reduce=reduce
        )

    _torch.dynamo.skip_code(read.__code__)
    return property(read)


def _read_with_care(param: DTensor, sharded: ShardedParam) -> Any:
    """Return the marker, under torch.compile, of a parameter that needs more than fixed arguments.

    If its dtype depends on eval mode (`full_precision_in_eval`), the mode of now decides on the
    arguments. If it was a tensor-parallel DTensor, the marker is wrapped as such a DTensor again.
    """
    in_full = sharded.follows_mode and sharded.unit.asks_for_full_precision
    members, group, keep, reduce = (
        sharded.marker_arguments_in_full if in_full else sharded.marker_arguments
    )
    whole = torch.ops.autoshard.unshard(param.to_local(), members, group, keep, -1, reduce=reduce)
    return whole if sharded.tp is None else sharded.tp.wrap(whole)


@_torch.dynamo.disable
def _read_eagerly(module: nn.Module, name: str) -> Any:
    """Read parameter `name` of `module` as `_read` does, hidden from what would follow the gather.

    These are transforms of torch.func, and checkpoints that save some results.
    """
    if _torch.autograd.in_selective_checkpoint():
        with _torch.autograd.outside_selective_checkpoint():
            return _read_eagerly(module, name)
    if _torch.autograd.in_functorch():
        with _torch.autograd.outside_functorch():
            return _read(module, name)
    return _read(module, name)


def _read(module: nn.Module, name: str) -> Any:
    """Read parameter `name` of `module` eagerly: unsharded, or the DTensor.

    It is unsharded, gathered if need be and waited for, in a forward, in a backward, as where a
    checkpoint runs forward again, and from `unshard()` to `reshard()`. Likewise in another method
    of the model, or in a module that is called by itself: the read then opens a step for that. A
    gather may wait for other ranks, and launch those of the units that come next. Anywhere else it
    is the DTensor, and the read is noted for hints. What was put in its place and is no DTensor is
    returned as it is. Raises AttributeError if the parameter was deleted, RuntimeError if other
    ranks gather another unit now.
    """
    try:
        param = module._parameters[name]
    except KeyError:
        raise AttributeError(
            f"{type(module).__name__!r} object has no attribute {name!r}"
        ) from None
    if not isinstance(param, DTensor):
        return param  # deleted and set again, or put there by functional_call
    sharded: ShardedParam = module.__dict__[PARAMS][name]
    step = steps.open_step()
    if step is not None:
        return step.read(sharded)
    if _torch.autograd.in_backward():
        return steps.step_in_backward(sharded.unit).read_in_backward(sharded)
    late = methods.step_open_for(sharded.unit)
    if late is not None:
        return late.read(sharded)
    if sharded.unit.is_unsharded_by_user:
        return reads.read_unsharded(sharded)
    late = methods.begin_step(module, sharded)
    if late is not None:
        return late.read(sharded)
    outside.note_read(sharded.name)
    return param


def _before_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Begin a forward of `module`, a head, and return (args, kwargs), cast as its unit asks.

    Eagerly, it opens a step if none is open, and casts buffers (`_enter`); inside `full_params()`
    it begins and casts nothing. Under torch.compile it only casts the inputs.
    """
    if torch.compiler.is_compiling():
        unit: Unit = module.__dict__[UNIT]
        return precision.cast_inputs(unit, args, kwargs, in_full=unit.asks_for_full_precision)
    return _enter(module, args, kwargs)


def _after_forward(module: nn.Module, args: Any, output: Any) -> Any:
    """End a forward of `module`, a head, and return `output`, cast as its unit asks.

    Eagerly, unsharded parameters are dropped unless kept for backward, and the outermost forward
    closes the step and puts hooks on its output (`_leave`, which also says what is raised); inside
    `full_params()` nothing is done. Under torch.compile it only casts.
    """
    if torch.compiler.is_compiling():
        unit: Unit = module.__dict__[UNIT]
        return precision.cast_output(unit, output)
    return _leave(module, output)


@_torch.dynamo.disable
def _enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Begin an eager forward of `module`, a head; returns `(args, kwargs)`, cast as its unit asks.

    Opens a step if none is open, with hooks on what autograd saves, and with `strict_order=False`
    launches the gathers of all units then. Notes in which precision the unit computes, and casts
    buffers of its modules. Steps of methods that have returned are closed first.
    Inside `full_params()` nothing begins, and nothing is cast; RuntimeError is raised if gradients
    would be made.
    """
    if module in unsharded_heads:
        _refuse_training(module)
        return args, kwargs
    methods.close_returned()
    unit: Unit = module.__dict__[UNIT]
    unit.note_mode()
    steps.enter(unit)
    precision.cast_buffers(unit)
    return precision.cast_inputs(unit, args, kwargs, in_full=unit.computes_in_full_precision)


@_torch.dynamo.disable
def _leave(module: nn.Module, output: Any) -> Any:
    """End what `_enter` began, also after an exception; returns `output`, cast as the unit asks.

    Unsharded parameters are dropped unless kept for backward; the outermost forward closes the
    step, which may wait for other ranks. torch's error about a DTensor and a plain tensor gets a
    hint as a note. Hooks on the output of the outermost forward have backward refuse gradients that
    are DTensors, and see `watch_backward`. Inside `full_params()` it returns `output` as it is.
    Raises RuntimeError, but not after an exception, if an unsharded parameter was written to, or if
    other ranks gather more.
    """
    if module in unsharded_heads:
        return output
    unit: Unit = module.__dict__[UNIT]
    outside.explain(steps.failure_of(unit))
    steps.leave(unit)
    output = precision.cast_output(unit, output)
    if steps.open_step() is None:
        outside.watch_output(output)
        watch_backward(unit, output)
    return output


def watch_backward(unit: Unit, output: Any) -> None:
    """Have a backward from `output` gather and reduce the whole model, with `strict_order=False`.

    A rank whose part of the model trains no parameter still has to take part in the collectives of
    the other ranks. Without `strict_order=False`, on a single rank, or without gradients, nothing
    is done.

    unit: of the outermost forward, which gave `output`.
    """
    if unit.is_unordered and torch.is_grad_enabled():
        for tensor in outside.tensors_in(output):
            if tensor.requires_grad:
                _watch_gradient(tensor, functools.partial(steps.take_part_in_backward, unit))


def _watch_gradient(tensor: Tensor, function: Callable[[], object]) -> None:
    """Call `function` whenever backward has a gradient of `tensor`; for a leaf only the first time.

    A leaf outlives the step, and would gather hooks.
    """

    is_leaf = tensor.is_leaf

    def hook(grad: Tensor) -> None:
        if is_leaf:
            handle.remove()
        function()

    handle = tensor.register_hook(hook)


sharded_by_first_call: weakref.WeakKeyDictionary[nn.Module, Callable[[], object]]
sharded_by_first_call = weakref.WeakKeyDictionary()
"""Function that shards a module, for each module that was compiled before it was sharded."""


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have `module.name(...)`, a method other than `forward`, gather parameters as forward does.

    The method is replaced on this instance. Its arguments and output are cast as those of forward.
    module: heads a unit, or was compiled with backend "autoshard" and is not sharded yet; then a
        call of the method shards it first. What `torch.compile` returned stands for the module.
    Any other module is left alone. Raises ValueError if the module has no such method.
    """
    module = _torch.dynamo.compiled_module(module) or module
    if unit_of(module) is None and module not in sharded_by_first_call:
        return
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} does not have a method {name!r}")

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Run the method as a forward of `module`, which is sharded first if it is not yet.

        If a module around it was sharded instead, the method just runs.
        """
        if unit_of(module) is None:
            sharded_by_first_call[module]()
        if unit_of(module) is None:  # a module around it is sharded
            return method(*args, **kwargs)
        args, kwargs = _enter(module, args, kwargs)
        output = None
        try:
            output = method(*args, **kwargs)
        finally:
            output = _leave(module, output)
        return output

    module.__dict__[name] = call


_torch.fsdp.share_register_forward_method(
    lambda module: unit_of(module) is not None or module in sharded_by_first_call,
    register_forward_method,
)


def _refuse_training(module: nn.Module) -> None:
    """Raise RuntimeError if a forward of `module` inside `full_params()` would make gradients."""
    if torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters()):
        unit: Unit = module.__dict__[UNIT]
        raise RuntimeError(
            f"the forward of {type(module).__name__} (unit {unit.name!r}) was called inside "
            "full_params(), where gradients would be lost: call it under torch.no_grad(), or "
            "outside of full_params()"
        )


def _read_flat_weights(rnn: Any) -> list[Any]:
    return [getattr(rnn, name, None) for name in _torch.nn.weight_names(rnn)]


def _refuse_deepcopy(module: nn.Module, memo: Any) -> Any:
    """Raise UsageTypeError, a TypeError, that says how to copy a sharded module instead."""
    raise UsageTypeError(
        f"{type(module).__name__} is sharded and can't be deep-copied: build another one and load "
        "this one's state_dict() into it. For an average of weights (EMA, AveragedModel), "
        "copy.deepcopy() the model before it is sharded, shard the copy alike, and update "
        "the copy's parameters from this one's under torch.no_grad()"
    )


def _refuse_pickle(module: nn.Module, protocol: Any) -> Any:
    """Raise TypeError that says how to save a sharded module instead."""
    raise TypeError(
        f"{type(module).__name__} is sharded and can't be pickled: save its state_dict() with "
        "torch.distributed.checkpoint"
    )


# These run in frames of their own where a forward runs eagerly. Were Dynamo to compile
# such a frame by itself, `is_compiling()` would be true in it and the hook would do
# nothing, for ever; skipped, it is still traced when a compiled forward calls it.
for _function in (_read_with_care, _before_forward, _after_forward, _read_flat_weights):
    _torch.dynamo.skip_code(_function.__code__)
