"""Check shapes and dtypes of what a pass has changed, by computing them again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from autoshard import _torch
from autoshard.passes.ir.layout import DTYPE_NAMES

Arguments = Mapping[fx.Node, tuple[Any, Any]]


def arguments(graph: fx.Graph) -> Arguments:
    """Map each node to its (args, kwargs): taken before a pass, for `verify_changed` after it."""
    return {node: (node.args, node.kwargs) for node in graph.nodes}


def verify_changed(graph: fx.Graph, before: Arguments) -> None:
    """Raise ValueError, naming the node, where shapes or dtypes are no longer what `meta` says.

    Where a node takes another node than it did in `before`, both must be alike in shape and dtype.
    A call that is new, or has other arguments changed, is run again on the fake tensors in `meta`,
    and its result compared; a call without "val" is not. What the call raises is passed on. Devices
    and strides are not compared.

    before: see `arguments`.
    """
    for node in graph.nodes:
        then, now = before.get(node), (node.args, node.kwargs)
        if then is not None:
            if now[0] is then[0] and now[1] is then[1]:
                continue
            if _without_nodes(now) == _without_nodes(then):
                _check_taken(node, _taken(then), _taken(now))
                continue
        if node.op != "call_function" or "val" not in node.meta:
            continue
        found, known = _shapes(_run_again(node)), _shapes(node.meta["val"])
        if found != known:
            raise ValueError(f"%{node.name} gives {found}, and its meta says {known}")


def _without_nodes(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda node: None)


def _taken(arguments: Any) -> list[fx.Node]:
    """Nodes among `arguments`, in order; a node that is taken twice is there twice."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, nodes.append)
    return nodes


def _check_taken(node: fx.Node, then: list[fx.Node], now: list[fx.Node]) -> None:
    """Raise ValueError unless each input in `now` has the shape and dtype of the one in `then`.

    An input that is no tensor is compared by its type. node: takes them, for the error.
    """
    for old, new in zip(then, now, strict=True):
        if old is new:
            continue
        expected, found = _shapes(old.meta.get("val")), _shapes(new.meta.get("val"))
        if found != expected:
            raise ValueError(
                f"%{node.name} takes %{new.name}, {found}, where %{old.name} was {expected}"
            )


def _run_again(node: fx.Node) -> Any:
    """Return what the call of `node` gives on the fake tensors of its inputs, in their mode.

    Raises KeyError if an input has no "val" in its `meta`, and what the call raises.
    """
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    leaves = _torch.tensors.tree_leaves((args, kwargs))
    fake = (each for each in leaves if isinstance(each, _torch.tensors.FakeTensor))
    mode = next((each.fake_mode for each in fake), contextlib.nullcontext())
    with mode:
        return target(*args, **kwargs)


def _shapes(value: Any) -> str:
    """Describe `value` by dtype and shape, "f32[4,2]", or a list of these; else by its type."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shapes, value))}]"
    if isinstance(value, Tensor):
        dtype = DTYPE_NAMES.get(value.dtype, str(value.dtype))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__name__
