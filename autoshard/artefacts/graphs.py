"""Graphs as files: a planned graph as text, in which process groups have names of no process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autoshard import _torch
from autoshard.options import CompileSettings
from autoshard.passes.ir.text import parse, render
from autoshard.passes.lowering.inductor import lower_inductor


class CannotBeKept(ValueError):
    """Error for a graph, or a call, that an artefact can't hold."""


def written(gm: fx.GraphModule, tokens: Mapping[str, str]) -> str:
    """Write the planned graph `gm` as text, with `tokens` for groups, and strides of its inputs.

    Raises CannotBeKept for what text can't hold: large constants of the graph, graphs inside of it.
    """
    constants = {
        str(node.target): _constant(gm, str(node.target))
        for node in gm.graph.find_nodes(op="get_attr")
    }
    strides = [_stride(node) for node in gm.graph.find_nodes(op="placeholder")]
    text = render(gm.graph, axes=tokens)
    try:
        parse(text)
    except ValueError as error:
        raise CannotBeKept(f"a graph can't be written as text: {error}") from None
    head = json.dumps({"constants": constants, "strides": strides}, sort_keys=True)
    return f"# {head}\n{text}"


def _constant(gm: fx.GraphModule, name: str) -> list[Any]:
    """Write a constant tensor of a graph: [kind of device, dtype, size, its bytes].

    Raises CannotBeKept for a graph inside of a graph, or a large constant.
    """
    value = getattr(gm, name, None)
    if not isinstance(value, Tensor):
        raise CannotBeKept(
            f"the graph has another graph, {name}, inside of it: checkpoints and control flow "
            "can't be in an artefact yet"
        )
    if value.nbytes > MOST_BYTES:
        raise CannotBeKept(
            f"the graph has a constant of size {list(value.shape)} inside of it: make it a buffer"
        )
    size = list(map(int, value.shape))
    with _torch.tensors.unset_fake_temporarily(), torch.no_grad():
        raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    dtype = str(value.dtype).removeprefix("torch.")
    return [value.device.type, dtype, size, bytes(raw).hex()]


MOST_BYTES = 1 << 16  # of a constant that is made in forward, as `torch.tensor(...)` is


def _stride(node: fx.Node) -> list[int] | None:
    """Strides of an input, None for what is no tensor. Raises CannotBeKept if they vary."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        if value is not None and not isinstance(value, (int, float)):
            raise CannotBeKept(
                f"input %{node.name} is a {type(value).__name__}, whose value varies"
            )
        return None
    found = list(value.stride())
    if not all(type(each) is int for each in (*found, *value.shape)):
        raise CannotBeKept(f"input %{node.name} has a size that varies, {list(value.shape)}")
    return found


def read(text: str, names: Mapping[str, str], device: torch.device) -> fx.GraphModule:
    """Read a graph that `written` wrote; `names` of groups stand by their tokens.

    Inputs get examples with their strides, and `device`, this rank's, is that of the first rank in
    the text. Raises ValueError for text that can't be read.
    """
    first, _, rest = text.partition("\n")
    head = json.loads(first.removeprefix("# "))
    graph = parse(rest)
    for node, stride in zip(graph.find_nodes(op="placeholder"), head["strides"], strict=True):
        value = node.meta["val"]
        if stride is not None:
            with value.fake_mode:
                node.meta["val"] = value.new_empty_strided(tuple(value.shape), tuple(stride))
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = map_aggregate(node.args, lambda each: _here(each, names, device))
            node.kwargs = map_aggregate(node.kwargs, lambda each: _here(each, names, device))
    constants = {}
    for name, (where, dtype, size, raw) in head["constants"].items():
        flat = torch.tensor(list(bytes.fromhex(raw)), dtype=torch.uint8)
        whole = flat.view(getattr(torch, dtype)).reshape(size)
        constants[name] = whole.to(where)
    return fx.GraphModule(constants, graph)


def _here(argument: Any, names: Mapping[str, str], device: torch.device) -> Any:
    """Return `argument` with the name of a group, if it is a token, or ends in one.

    A device of the kind of `device` becomes that.
    """
    if isinstance(argument, torch.device) and argument.type == device.type:
        return device
    if not isinstance(argument, str):
        return argument
    head, space, last = argument.rpartition(" ")
    return names.get(argument) or f"{head}{space}{names.get(last, last)}"


def lower_again(
    gms: Mapping[str, fx.GraphModule],
    shards: Mapping[int, Tensor],
    num_outputs: int,
    settings: CompileSettings,
) -> dict[str, Any]:
    """Lower graphs that were read, by Inductor, whose kernels come from its cache if it has them.

    gms: by kind; a "backward" takes what its "forward" hands to it.
    shards: this rank's, by number of the forward's input; they may have fewer rows than another's.
    num_outputs: of forward, before what it hands on.
    """
    found: dict[str, Any] = {}
    has_budget = settings.budget_bytes is not None
    handed: list[Any] = []
    for kind in sorted(gms, key=("inference", "forward", "backward").index):
        gm = gms[kind]
        given = gm.graph.find_nodes(op="placeholder")
        likes = handed if kind == "backward" else [shards.get(at) for at in range(len(given))]
        for node, like in zip(given, likes, strict=False):
            if isinstance(like, Tensor):
                node.meta["val"] = _as_example(like, node.meta["val"].fake_mode)
        examples = [node.meta["val"] for node in given]
        count = 0 if kind == "backward" else num_outputs
        with _torch.inductor.lowering_again(gm, examples, count, settings.inductor) as strides:
            made = [_example(node) for node in outputs_of(gm)]
            found[kind] = lower_inductor(
                gm,
                examples,
                has_budget=has_budget,
                is_backward=kind == "backward",
                is_inference=kind == "inference",
            )
        pairs = zip(made, strides or [None] * len(made), strict=True)
        handed = [_restrided(*each) for each in pairs][num_outputs:]
    return found


def outputs_of(gm: fx.GraphModule) -> list[Any]:
    """List the outputs of a graph that returns a list or a tuple."""
    returned: Any = gm.graph.output_node().args[0]
    return list(returned)


def _example(node: Any) -> Any:
    """Example of what an output of a graph is; None for none."""
    return node.meta["val"] if isinstance(node, fx.Node) else None


def _as_example(like: Tensor, mode: Any) -> Tensor:
    """Make an example, of `mode`, with the size, strides, dtype and device of `like`."""
    with mode:
        return torch.empty_strided(
            like.shape, like.stride(), dtype=like.dtype, device=like.device
        ).requires_grad_(like.requires_grad)


def _restrided(value: Any, stride: Sequence[int] | None) -> Any:
    """Return an example like `value`, with the strides that it is given by lowered code."""
    if stride is None or not isinstance(value, Tensor):
        return value
    return value.new_empty_strided(tuple(value.shape), tuple(map(int, stride)))
