"""Run passes, in order, over one private copy of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from autoshard import _torch
from autoshard.passes.ir.verify import verify
from autoshard.passes.ir.verify_changed import arguments, verify_changed

Pass = Callable[[fx.GraphModule], fx.GraphModule]
"""A pass takes ownership of the module it is given and returns it transformed."""

PassObserver = Callable[[str, fx.GraphModule], None]
"""Sees `(pass_name, gm)` after every pass."""


class PassError(RuntimeError):
    """Error for a graph that passes have left broken, or unfinished."""


def run(
    gm: fx.GraphModule, passes: Sequence[Pass], *, after_each: PassObserver | None = None
) -> fx.GraphModule:
    """Apply `passes` in order to a copy of `gm`, and return the result; `gm` itself is not changed.

    The copy has nodes of its own, all placeholders first, and shares parameters with `gm`. After
    every pass the graph is linted and verified; then `after_each` is called with the pass's name
    and the module. Print, time or dump there: passes carry no logging of their own. The module is
    recompiled once, at the end.
    Raises PassError, naming the pass, if a pass breaks the graph; what a pass itself raises is
    passed on.
    """
    gm = copied(gm)
    for transform in passes:
        gm = run_one(gm, transform)
        if after_each:
            after_each(pass_name(transform), gm)
    gm.recompile()  # it may have been looked at meanwhile; code is generated once that is wanted
    return gm


def run_one(gm: fx.GraphModule, transform: Pass) -> fx.GraphModule:
    """Return `transform(gm)`, checked by FX's lint, `verify` and `verify_changed`.

    `gm` is not copied: a pass changes it in place. It is not recompiled, either. A fake tensor mode
    of the caller's is off meanwhile.
    Raises PassError naming `transform` if the graph that it returns is broken; what `transform`
    itself raises is passed on.
    """
    before = arguments(gm.graph)
    # A caller's mode: values of the graph have their own.
    with _torch.tensors.unset_fake_temporarily():
        gm = transform(gm)
        try:
            gm.graph.lint()
            verify(gm)
            verify_changed(gm.graph, before)
        except Exception as error:  # whatever an op says of what it can't take
            raise PassError(f"{pass_name(transform)} broke the graph: {error}") from error
    return gm


def pass_name(transform: Pass) -> str:
    """Name of the function behind `transform`, seen through `functools.partial`."""
    return str(getattr(transform, "func", transform).__name__)


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy `gm`: new nodes, same weights. `copy.deepcopy(gm)` would clone every parameter.

    In the copy all placeholders come first: AOTAutograd puts the token of an effect before them.
    Its `meta` is a shallow copy.
    """
    made = _torch.fx.graph_module(gm, _torch.fx.copied(gm.graph))
    body = next((node for node in made.graph.nodes if node.op != "placeholder"), None)
    for each in made.graph.find_nodes(op="placeholder"):
        if body is not None and body < each:
            body.prepend(each)
    made.meta = dict(gm.meta)
    return made
