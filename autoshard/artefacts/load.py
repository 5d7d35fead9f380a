"""Loading of an artefact: what it depends on is compared, then its graphs run for the model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from autoshard import _torch
from autoshard.artefacts import facts, guards
from autoshard.artefacts.entry import Entry, Signature, built, kinds_of, shown
from autoshard.artefacts.folder import Artefact, ArtefactError, given_options, here
from autoshard.artefacts.graphs import CannotBeKept, lower_again, read
from autoshard.artefacts.make import arguments_of, with_tokens
from autoshard.artefacts.watch import Watch
from autoshard.options import CompileOptions, CompileSettings
from autoshard.passes.ir.plan import Plan
from autoshard.passes.lowering.eager import lower_eagerly
from autoshard.runtime.comm.mesh import ensure_process_group
from autoshard.runtime.compiled.calls import call_of
from autoshard.runtime.compiled.frame import Frame
from autoshard.runtime.compiled.planned import Graphs
from autoshard.runtime.eager.access import named_sharded
from autoshard.runtime.sharding.adopt import adopt_module
from autoshard.runtime.sharding.first_call import sharding_first
from autoshard.runtime.training.checkpoint.on_ranks import CheckpointError, on_each_rank_with
from autoshard.runtime.unit.param import ShardedParam, find

_Result = TypeVar("_Result")
STALE = ("raise", "compile")
SHOWN = 8  # differences that a message names


def load_compiled(
    model: nn.Module, folder: str | os.PathLike[str], *, stale: str = "raise"
) -> nn.Module:
    """Have calls of `model` run the graphs that `autoshard compile` has written to `folder`.

    All ranks call this. A model that is not sharded is sharded first, in place, as the artefact's
    options say. Nothing is traced by Dynamo, now or when the model is called. What the graphs
    depend on is compared with what is here: sources of the model, its configuration, parameters and
    buffers, options, mesh, versions and flags.

    stale: what to do if that differs: "raise", or "compile" the model, as `torch.compile` does,
        with a warning that names what differs.
    Returns `model`. Raises ArtefactError on all ranks if there is no artefact, if a file is
    spoiled, or if something differs, and names it; ValueError for another `stale`. A call raises
    ArtefactError for arguments, modes or flags that the artefact has no graph for.
    """
    if stale not in STALE:
        raise ValueError(f"stale={stale!r}: expected one of {list(STALE)}")
    ensure_process_group()
    path = Path(folder).absolute()
    what = f"artefact in {path}"
    (artefact, digest), (lowest, highest) = _on_each_rank(lambda: _read(path), what)
    if lowest != highest:
        raise ArtefactError(f"{what}: ranks have different ones: give all of them the same folder")
    given = given_options(artefact.options, artefact.mesh)
    adopt_module(model, given.shard_arguments())
    different, (is_same, _) = _on_each_rank(
        lambda: _counted(_differences(artefact, model, given)), f"comparison with {path}"
    )
    if not is_same:
        said = different or ["what it depends on differs on another rank"]
        message = f"the artefact in {path} is not for this model as it is here: {_listed(said)}"
        if stale == "raise":
            raise ArtefactError(
                f"{message}. Make it anew with `autoshard compile`, or give stale='compile'"
            )
        warnings.warn(f"{message}. The model is compiled", RuntimeWarning, stacklevel=2)
        model.compile(backend="autoshard", options=here(artefact.options, artefact.mesh))
        return model
    settings = given.resolve(_device(model))
    calls = [_Call(model, entry, artefact.texts, digest, settings) for entry in artefact.entries]
    run = sharding_first(model, _Calls(model, calls, path), given.shard_arguments())
    _torch.nn.call_instead(model, run)
    return model


def _read(path: Path) -> tuple[tuple[Artefact, str], int]:
    artefact, digest = Artefact.read(path)
    return (artefact, digest), int(digest[:15], 16)


def _counted(different: list[str]) -> tuple[list[str], int]:
    return different, int(not different)


def _on_each_rank(
    work: Callable[[], tuple[_Result, int]], what: str
) -> tuple[_Result, tuple[int, int]]:
    """Call `work` on each rank: it returns a result, and a number.

    Returns (the result, (the lowest of all ranks' numbers, the highest)). Raises ArtefactError on
    all ranks if one fails.
    """

    def attempt() -> tuple[_Result, tuple[int, int]]:
        result, number = work()
        return result, (number, -number)

    try:
        result, (lowest, negative) = on_each_rank_with(attempt, what, 2)
    except CheckpointError as error:
        raise ArtefactError(str(error)) from None
    return result, (lowest, -negative)


def _differences(artefact: Artefact, model: nn.Module, given: CompileOptions) -> list[str]:
    """Say what the artefact, of these options, depends on that is not so here."""
    device = _device(model)
    here = {
        **facts.of_process(given.resolve(device), device),
        **facts.of_model(model),
        **facts.of_sources(artefact.sources),
    }
    reads = {
        path: value
        for entry in artefact.entries
        for path, value in entry.reads.items()
        if not guards.is_mode(path, model)  # each call has modes of its own
    }
    wanted = {**artefact.facts, **facts.named_reads(reads)}
    return facts.differences(wanted, {**here, **facts.named_reads(facts.of_reads(reads, model))})


def _device(model: nn.Module) -> torch.device:
    """Device on which `model`, which is sharded, computes."""
    known = (find(param) for _, param in named_sharded(model))
    return next(each.device for each in known if each is not None)


def _listed(said: Sequence[str]) -> str:
    """List differences for a message: the first, and how many there are beside them."""
    more = f"; and {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return "; ".join(said[:SHOWN]) + more


class _Call:
    """One way to call the model: when it is that, and what runs it."""

    def __init__(
        self,
        model: nn.Module,
        entry: Entry,
        texts: Mapping[str, str],
        digest: str,
        settings: CompileSettings,
    ) -> None:
        """Read and lower the graphs of `entry`, which belong to the parameters of `model`."""
        self.entry, self.name = entry, entry.call
        self._takes = json.dumps(entry.takes)
        params = dict(named_sharded(model))
        table = [_sharded(params[name]) for name in entry.table]
        tokens = facts.tokens_of(table)
        names = {token: group for group, token in tokens.items()}
        self._values = [params[at] if kind == "param" else None for kind, at in entry.inputs]
        self._args, self._buffers = [], []
        for number, (kind, at) in enumerate(entry.inputs):
            if kind == "arg":
                self._args.append((number, at))
            elif kind == "buffer":
                self._buffers.append((number, *_place(model, at)))
        self._table = table
        self._markers = [tuple(entry.markers[name]) for name in entry.table]
        self._tokens = tokens
        self._known: list[tuple[object, ...]] = []
        modules = dict(model.named_modules())
        modes = set(entry.modes)
        self._modes = [(module, name in modes) for name, module in modules.items()]
        plans = [Plan.from_json(text) for text in entry.plans]
        device = table[0].device
        gms = {kind: read(texts[name], names, device) for kind, name in entry.graphs.items()}
        if settings.lowering == "eager":
            graphs = {kind: lower_eagerly(gm) for kind, gm in gms.items()}
        else:
            shards = {at: _sharded(params[entry.inputs[at][1]]).shard for at in entry.local}
            graphs = lower_again(gms, shards, len(entry.trained), settings)
        forward = graphs.get("forward") or graphs["inference"]
        run = Graphs(forward, graphs.get("backward"), entry.trained, entry.tangents)
        frame = Frame(
            gm=fx.GraphModule({}, fx.Graph()),
            inputs=[],
            params=table,
            positions=[entry.inputs.index(["param", name]) for name in entry.table],
            stays=entry.stays,
            local={at: _sharded(params[entry.inputs[at][1]]) for at in entry.local},
        )
        self._run = call_of(frame, run, f"{entry.call} of artefact {digest[:16]}", plans)

    def mismatch(
        self, takes: Any, text: str, kinds: list[Any], ambient: dict[str, str]
    ) -> tuple[int, str] | None:
        """Say why this is not the way to call the model now; None if it is.

        takes, text, kinds: of the arguments, as a tree, as that in JSON, and as `kinds_of`.
        ambient: of torch, now. Returns (how much is as it should be, the reason).
        """
        entry, is_on = self.entry, torch.is_grad_enabled()
        if ("backward" in entry.graphs) != is_on:
            return 0, f"gradients are {'enabled' if is_on else 'off'}"
        for module, mode in self._modes:
            if module.training is not mode:
                kind = type(module).__name__
                return 1, f"a {kind} is in {'train' if module.training else 'eval'} mode"
        reason = self._marker_that_differs()
        if reason is not None:
            return 2, reason
        if text != self._takes:  # as text: 1 is not True, and order counts
            return 3, f"it is called with {shown(takes)}, and was made with {shown(entry.takes)}"
        for number, (kind, known) in enumerate(zip(kinds, entry.tensors, strict=True)):
            if kind != known:
                return 4, f"tensor {number} is {_kind(kind)}, and was {_kind(known)}"
        if ambient != entry.ambient:
            return 5, facts.differences(entry.ambient, ambient)[0]
        return None

    def _marker_that_differs(self) -> str | None:
        """Name a parameter that is gathered or reduced in another way; None if there is none."""
        now = [arguments_of(each) for each in self._table]
        if now == self._known:
            return None
        for param, arguments, wanted in zip(self._table, now, self._markers, strict=True):
            if tuple(with_tokens(str(each), self._tokens) for each in arguments) != wanted:
                return f"{param.name} is gathered or reduced in another way"
        self._known = now
        return None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run the graphs with `tensors`, the arguments, and return what the model does."""
        values: list[Any] = list(self._values)
        for number, at in self._args:
            values[number] = tensors[at]
        for number, module, name in self._buffers:
            values[number] = getattr(module, name)
        outputs = self._run(*values)
        return built(self.entry.returns, [*outputs, *tensors])


class _Calls:
    """All ways to call a model, in place of its forward and hooks."""

    def __init__(self, model: nn.Module, calls: Sequence[_Call], path: Path) -> None:
        self._model, self._calls, self._path = model, calls, path
        self._signature, self._device = Signature(model), _device(model)
        self._watch = Watch(model, sorted({path for call in calls for path in call.entry.reads}))
        self.__name__ = self.__qualname__ = type(model).__qualname__
        self.__doc__ = None
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graphs for these arguments. Raises ArtefactError if there are none."""
        try:
            takes, tensors = self._signature.describe(args, kwargs)
        except CannotBeKept as error:
            raise self._error(str(error)) from None
        changed = self._watch.changed()
        if changed is not None:
            raise self._error(changed)
        kinds, text, ambient = kinds_of(tensors), json.dumps(takes), facts.ambient(self._device)
        reasons = []
        for call in self._calls:
            reason = call.mismatch(takes, text, kinds, ambient)
            if reason is None:
                return call(tensors)
            reasons.append((*reason, call.name))
        _, why, name = max(reasons, key=lambda each: each[0])
        raise self._error(f"for {name!r}, {why}")

    def _error(self, why: str) -> ArtefactError:
        """Make the error that says why there is no graph for a call."""
        return ArtefactError(
            f"the artefact in {self._path} has no graph for this call of "
            f"{type(self._model).__name__}: {why}. Make one with `autoshard compile`, or compile "
            "the model"
        )


def _kind(kind: Sequence[Any]) -> str:
    """Show the kind of a tensor, as of `kinds_of`, for a message."""
    cls, dtype, size, strides, is_trained, shares = kind
    said = f"{cls}{' ' if cls else ''}{dtype} {size}, strides {strides}"
    said += ", with a gradient" if is_trained else ""
    return said if shares is None else f"{said}, in the memory of tensor {shares}"


def _sharded(param: nn.Parameter) -> ShardedParam:
    sharded = find(param)
    assert sharded is not None
    return sharded


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has the buffer called `name` in `model`, and its name there."""
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last
