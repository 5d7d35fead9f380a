"""First call of what `torch.compile(..., backend="autoshard")` returns: it shards the module.

The backend itself is only called if Dynamo captures a graph, and then in the middle of
a forward. A model that Dynamo captures nothing of (a recurrent network, say) would run
unsharded, each rank for itself, without a message. So a compiled module is sharded when
it is first called, before its forward begins; graphs come after that. Of a compiled
function the modules in its graphs are sharded. An optimizer's step raises if it trains unsharded
parameters of other modules that the function can name, or of compiled modules that were never
called.
"""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autoshard import _torch
from autoshard.runtime.comm.mesh import world_size
from autoshard.runtime.compiled import tables
from autoshard.runtime.eager import access, outside
from autoshard.runtime.eager.unordered import begin_forward
from autoshard.runtime.sharding.adopt import adopt_module, modules_named_by
from autoshard.runtime.sharding.sharded_module import ShardedModule
from autoshard.runtime.training.optimizers import uncalled_modules, watch_optimizers
from autoshard.runtime.training.state_dict_names import keep_names
from autoshard.runtime.unit.param import find
from autoshard.runtime.unit.precision import cast_buffers, units_that_cast
from autoshard.runtime.unit.unit import Unit, unit_of

ReadOptions = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Function that checks the backend's options and gives the arguments of `shard()` in them."""


def watch_first_calls(read_options: ReadOptions) -> None:
    """Have modules that are compiled with autoshard from now on sharded at their first call.

    So is the module of a compiled method. A compiled function warns if its first call runs no
    graph that reads sharded parameters. What torch.compile returns for a module has that module's
    own state-dict keys. Warns at once if TORCHDYNAMO_DISABLE=1 and there are several ranks. Patches
    torch for good, by `watch_compile` and `may_leave_layouts_unguarded`: call it once in a process.

    read_options: makes arguments of `shard()` of the backend's options, when torch.compile is
        called, which raises what this raises.
    """

    def wrap(fn: Any, compiled: Any, options: dict[str, Any]) -> Any:
        """Return what torch.compile is to return for `fn` in place of `compiled`.

        Nothing is sharded here. A module's wrapper is returned itself, with the module's state-dict
        keys. Made of a method of a module, `compiled` is wrapped so that its first call shards the
        module, which gets the methods of `ShardedModule` now; made of another function, so that
        the first call warns if it compiles no graph over sharded parameters. Raises as
        `read_options` for wrong options.
        """
        arguments = read_options(options)
        if isinstance(compiled, nn.Module):
            keep_names(compiled)  # its forward comes here too, as a method
            return compiled
        owner = getattr(fn, "__self__", None) or getattr(fn, "__wrapped__", None)
        if isinstance(owner, nn.Module):
            return sharding_first(owner, compiled, arguments)
        return _expecting_a_graph(fn, compiled)

    _torch.dynamo.watch_compile("autoshard", wrap)
    _torch.dynamo.may_leave_layouts_unguarded()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1" and world_size() > 1:
        warnings.warn(
            "TORCHDYNAMO_DISABLE=1 switches torch.compile off, and with it the sharding of models "
            "by it: call autoshard.shard(model), or set TORCH_COMPILE_DISABLE=1 instead, which "
            "leaves the eager runtime",
            RuntimeWarning,
            stacklevel=2,
        )


def sharding_first(module: nn.Module, compiled: Any, arguments: dict[str, Any]) -> Any:
    """Wrap `compiled`, made of a method of `module`, to shard `module` at the first call.

    Gives `module` the methods of `ShardedModule` now, and has all optimizers' steps of this process
    checked: until that call, one that trains `module` raises, with several ranks. If a part of
    `module` is sharded already, the first call shards nothing. Each call also casts buffers to the
    units' `buffer_dtype`, gathers the model if it has `strict_order=False`, and adds a hint to
    torch's error about DTensors.

    arguments: of `shard()`.
    """
    module = _torch.ddp.inside(module)
    _offer_methods(module, arguments)
    uncalled_modules.add(module)  # an optimizer that steps it uncalled is told so
    watch_optimizers()
    pending = looks = True
    casting: list[Unit] = []

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call `compiled`, the first time after sharding `module`, and return its output.

        Sharding waits for other ranks, by default; it is left out if a part of `module` is sharded
        already. Buffers of units with a `buffer_dtype` are cast first. With `strict_order=False`
        the gathers of all units are launched first, and a backward from the output takes part in
        the reduces of all units. A RuntimeError about DTensors gets a note. Warns after the first
        call that returns, if Dynamo compiles then, and has captured no graph.
        """
        nonlocal pending, looks
        if pending:
            adopt_module(module, arguments)
            uncalled_modules.discard(module)
            casting.extend(units_that_cast(module))
            pending = False
        for unit in casting:  # Dynamo looks at dtypes before it runs any hook
            cast_buffers(unit)
        own = unit_of(module)
        if own is not None and own.is_unordered:
            begin_forward(own)  # also on a rank that will read nothing
        before = tables.counts() if looks else None
        try:
            output = compiled(*args, **kwargs)
        except RuntimeError as error:
            outside.explain(error)
            raise
        if looks and _torch.dynamo.compiles_now():
            looks = False
            if before == tables.counts():
                _warn_of_no_graph(module)
        if own is not None:
            access.watch_backward(own, output)
        return output

    return call


def _warn_of_no_graph(module: nn.Module) -> None:
    """Warn that the first call of `module` was not compiled, if it has sharded parameters."""
    if any(find(param) is not None for param in module.parameters()):
        warnings.warn(
            f"Dynamo captured no graph of {type(module).__name__}, which runs on the eager "
            "runtime: TORCH_LOGS=graph_breaks says why; RNN, GRU and LSTM need "
            "torch._dynamo.config.allow_rnn = True",
            RuntimeWarning,
            stacklevel=3,
        )


_METHODS = [
    name
    for name, its in vars(ShardedModule).items()
    if name[0] != "_" and callable(its) and not hasattr(nn.Module, name)
]

_arguments: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
"""Arguments of `shard()` for each module that its first call, of whatever method, shards."""

_classes: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()


def _offer_methods(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Give `module`, to be sharded at its first call, the methods of `ShardedModule` now.

    Its class is replaced by a subclass with those of them that `nn.Module` lacks. The first call of
    one shards it, and so does that of a method given to `register_forward_method`; for the call of
    the module itself its caller sees to that. A method raises RuntimeError if a part of `module`
    was sharded before it. Does nothing if `module` heads a unit, or has a sharded parameter of its
    own or methods by sharding already.

    arguments: of `shard()`.
    """
    if access.PARAMS in module.__dict__ or access.is_mixed_in(module):
        return  # it is sharded, or a part of what is
    _arguments[module] = arguments
    access.sharded_by_first_call[module] = functools.partial(_shard, weakref.ref(module))
    original = access.original_class(module)
    if original not in _classes:
        _classes[original] = _class_with_methods(original)
    module.__class__ = _classes[original]


def _shard(known: weakref.ref[nn.Module]) -> None:
    """Shard the module behind `known` with the arguments that `_offer_methods` was given.

    It stays as it is if it, or a part of it, is sharded already. Ranks wait for each other, by
    default. Optimizers' steps no longer take it for a module that was not called.
    """
    module = known()
    assert module is not None
    adopt_module(module, _arguments[module])
    uncalled_modules.discard(module)


def shard_as_compiled(module: nn.Module) -> bool:
    """Shard `module`, if it was compiled with autoshard, as its first call would; tell whether.

    Raises as `adopt_module`; ranks wait for each other, by default.
    """
    if module not in _arguments:
        return False
    adopt_module(module, _arguments[module])
    uncalled_modules.discard(module)
    return True


def _class_with_methods(original: type) -> type:
    """Make a subclass of `original`, of the same name, with a sharding method for each of _METHODS.

    Copies and pickles of its modules are of `original`.
    """
    namespace: dict[str, Any] = {name: _sharding_method(name) for name in _METHODS}
    namespace.update(
        _autoshard_original=original,
        __module__=original.__module__,
        __qualname__=original.__qualname__,
        __doc__=original.__doc__,
        __reduce_ex__=_reduce_as_original,
    )
    return type(original.__name__, (original,), namespace)


def _sharding_method(name: str) -> Callable[..., Any]:
    """Make a method that shards its module, and calls the `ShardedModule` method called `name`.

    It raises RuntimeError if the module heads no unit after that, as a part of it was sharded
    before. Nothing is sharded here.
    """

    @functools.wraps(getattr(ShardedModule, name))
    def method(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Shard `module`, unless it is sharded, and return what the method of its new class does.

        All ranks call this together, as sharding waits for them. Raises RuntimeError if `module`
        heads no unit after that.
        """
        shard_as_compiled(module)
        if unit_of(module) is None:
            raise RuntimeError(
                f"{type(module).__name__} was compiled with autoshard, and a part of it is sharded "
                f"already, so that it heads no unit and has no {name}(): call fully_shard on the "
                "whole model, too, before it is compiled"
            )
        return getattr(module, name)(*args, **kwargs)

    return method


def _reduce_as_original(module: nn.Module, protocol: Any) -> Any:
    """Reduce `module`, which is not sharded yet, to an instance of the user's class.

    Its `__reduce_ex__`, for copies and pickles: a call of the copy does not shard it.
    """
    original: Any = access.original_class(module)
    _, _, *rest = original.__reduce_ex__(module, protocol)
    return (_empty, (original,), *rest)


def _empty(cls: Any) -> Any:
    return cls.__new__(cls)


def _expecting_a_graph(fn: Any, compiled: Any) -> Any:
    """Wrap `compiled`, made of the function `fn`, to look after its first call at what was sharded.

    Warns if the call compiled no graph that reads sharded parameters, on a single rank too. From
    then on, with several ranks, an optimizer's step raises if it trains unsharded parameters of
    modules that `fn` can name. A call that raises doesn't count as the first.
    """
    pending = True

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call `compiled`, and return its result.

        After the first call that returns, warn if it compiled no graph that reads sharded
        parameters, and have optimizers' steps refuse unsharded parameters of modules that `fn` can
        name.
        """
        nonlocal pending
        before = tables.num_runs
        result = compiled(*args, **kwargs)
        if pending:
            uncalled_modules.update(modules_named_by(fn))
            watch_optimizers()
        if pending and tables.num_runs == before:
            warnings.warn(
                f"Dynamo captured no model in {compiled.__qualname__}: autoshard has sharded "
                "nothing in it; compile the model itself, or call autoshard.shard(model) first",
                RuntimeWarning,
                stacklevel=2,
            )
        pending = False
        return result

    return call
