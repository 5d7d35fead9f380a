"""Find where two runs part: the first op, in order, whose result differs.

`parity` says which parameter differs after which step. That step is taken again, and looked at:

    eager, replicated     the results of all ops, as they are dispatched
    compiled              the results of all nodes of planned graphs
    ... by Inductor       the shortest beginning of a planned graph that, lowered, gives other
                          values than the same nodes one by one

Ops are identified by their results, not by their place: one run may call twice what the other calls
once, or not at all. So runs part at the first op of one whose result the other never has. This may
be an op that only one of them has, because it computes the same in another way, but no earlier op
differs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker

from autoshard import _torch
from autoshard.compilation import Lowered, watch_lowered
from autoshard.passes.ir.match import event_of, is_pack
from autoshard.passes.plans.values import is_view

_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided")


@dataclass(frozen=True)
class OpResult:
    """Result of one op.

    where: the op and its module, in words.
    digests: of the tensors it gave.
    """

    where: str
    digests: frozenset[str]


class _Ops(_torch.tensors.TorchDispatchMode):
    """Dispatch mode that notes the result of every op, but for ops that leave memory unwritten."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[OpResult] = []
        self._modules: Any = ModuleTracker()

    def __enter__(self) -> _Ops:
        self._modules.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._modules.__exit__(*raised)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and return its result, which is added to `found` as digests.

        For that it is copied to the host, which waits. Left out are ops that only allocate memory.
        """
        given = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in _UNWRITTEN:
            module = max(self._modules.parents - {"Global"}, key=len, default="no module")
            phase = "backward" if self._modules.is_bw else "forward"
            self.found.append(OpResult(f"{func} in {module}, {phase}", _digests(given)))
        return given


@contextlib.contextmanager
def ops_of() -> Iterator[list[OpResult]]:
    """Yield a list that gets the result of every op that runs in this context, in order.

    For runs that are not compiled: ops inside compiled code are not seen.
    """
    with _Ops() as ops:
        yield ops.found


@contextlib.contextmanager
def nodes_of() -> Iterator[list[OpResult]]:
    """Yield a list that gets the results of graphs that are compiled and run in this context.

    Planned graphs run node by node, in place of what they were lowered to, also after the context,
    when they go on filling the list. None of them comes from a cache. Each node that computes
    something, views and collectives apart, has a result, which is copied to the host for digests.
    """
    found: list[OpResult] = []

    class Nodes(fx.Interpreter):
        """Interpreter that adds results to `found`, under the name of its graph, `kind`."""

        kind: str

        def run_node(self, n: fx.Node) -> Any:
            """Run `n`, add its result to `found` if it computes something, and return it."""
            given = super().run_node(n)
            if _is_op(n):
                found.append(OpResult(f"{_name(n)}, {self.kind}", _digests(given)))
            return given

    def watcher(gm: fx.GraphModule, kind: str, call: Lowered, lower: Any) -> Lowered:
        """Return a function that interprets `gm` in place of `call`."""

        def run(args: list[Any]) -> Any:
            nodes = Nodes(gm)
            nodes.kind = kind
            return nodes.run(*args)

        return run

    with watch_lowered(watcher):
        yield found


def first_unknown(results: Sequence[OpResult], known: Sequence[OpResult]) -> str | None:
    """Name the first of `results` with a tensor that none of `known` has, and the rank.

    Each rank compares its own results; the first one in order, of those found on all ranks, counts.
    Returns the same on all ranks, None if there is none. All ranks call this.
    """
    there = {digest for each in known for digest in each.digests}
    unknown = ((n, each.where) for n, each in enumerate(results) if each.digests - there)
    return _first_of_all_ranks(next(unknown, None))


def _first_of_all_ranks(mine: tuple[int, str] | None) -> str | None:
    """Return the text with the least number on any rank, and its rank; None if all have None.

    Every rank returns the same; all ranks call this.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    first = min(((*each, rank) for rank, each in enumerate(found) if each), default=None)
    return f"{first[1]}, on rank {first[2]}" if first else None


@contextlib.contextmanager
def miscompiled(rtol: float) -> Iterator[list[str]]:
    """Yield a list of nodes at which graphs that are compiled and run in this context go wrong.

    A graph goes wrong if its lowered code gives other values, on any rank, than its nodes one by
    one. The list gets a line for each such graph, the first time: the last node of the shortest
    beginning of the graph that goes wrong, found by bisection, for which beginnings are lowered.
    What the lowered code gives is used all the same. Until a graph has gone wrong it is compared at
    each call, also after the context: it is lowered again, and run twice more, with its
    collectives. No graph comes from a cache. All ranks run the same graphs, and wait for each
    other.
    rtol: the largest difference that counts as rounding, relative to a tensor's largest element.
    """
    found: list[str] = []

    def watcher(
        gm: fx.GraphModule, kind: str, call: Lowered, lower: Callable[[fx.GraphModule], Lowered]
    ) -> Lowered:
        """Return a function that calls `call`, after a comparison of lowered code with nodes.

        The comparisons end once `gm` has gone wrong, for which `found` gets one line.
        """
        nodes = [node for node in gm.graph.nodes if _is_op(node)]
        is_found = False

        def differs(last: fx.Node, args: Sequence[Any]) -> bool:
            """Tell whether `gm` up to `last`, lowered, goes wrong on any rank; all call this.

            That part is lowered here, and runs twice, lowered and node by node, on copies of
            `args`.
            """
            part = _beginning(gm, last)
            want = fx.Interpreter(part).run(*_copied(args))
            got = lower(part)(_copied(args))
            worst = max((_relative(a, b) for a, b in zip(got, want, strict=True)), default=0.0)
            return _first_of_all_ranks((0, "") if worst > rtol else None) is not None

        def run(args: list[Any]) -> Any:
            """Call `call`, and return its result; before that, look for where `gm` goes wrong.

            That is done at each call until it does; then `found` gets a line, which names the node.
            """
            nonlocal is_found
            kept = _copied(args)
            if not is_found and nodes and differs(nodes[-1], kept):
                low, high = 0, len(nodes) - 1
                while low < high:
                    middle = (low + high) // 2
                    if differs(nodes[middle], kept):
                        high = middle
                    else:
                        low = middle + 1
                found.append(f"{_name(nodes[low])}, {kind}")
                is_found = True
            return call(args)

        return run

    with watch_lowered(watcher):
        yield found


def _beginning(gm: fx.GraphModule, last: fx.Node) -> fx.GraphModule:
    """Return the beginning of `gm`, up to `last`, as a new graph with the same inputs.

    Its outputs are the tensors that nodes behind `last` read, and the gradients that are packed to
    be reduced: for these no later op shows whether they are right. Outputs are neither inputs nor
    views.
    """
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    end = order[last]

    def is_wanted(node: fx.Node) -> bool:
        is_read = any(order[user] > end or is_pack(user) for user in node.users)
        return _is_op(node) and isinstance(node.meta.get("val"), Tensor) and is_read

    wanted = [node for node in list(order)[: end + 1] if is_wanted(node)]
    needed: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in needed or node.op == "placeholder":
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in wanted))
    return _torch.fx.graph_module(gm, part)


def _is_op(node: fx.Node) -> bool:
    """Tell whether `node` computes something: it is no view, and sends nothing."""
    is_sent = is_pack(node) or event_of(node) is not None
    return node.op == "call_function" and not is_sent and not is_view(node)


def _name(node: fx.Node) -> str:
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    module = modules[-1] if modules else "no module"
    return f"%{node.name} ({node.target}) in {module}"


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in `value` and in its tuples and lists; of DTensors, local shards."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _digests(value: Any) -> frozenset[str]:
    return frozenset(_digest(each) for each in _tensors(value) if each.numel())


def _digest(tensor: Tensor) -> str:
    """Digest of a tensor's dtype, and of its elements in order, whatever its sizes.

    Elements are copied to the host, which waits. A zero has one digest, with or without a minus.
    """
    plain = tensor.detach().cpu().contiguous().view(-1)
    plain = plain + 0 if plain.is_floating_point() else plain  # -0.0 is 0.0
    data = plain.view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {hashlib.sha256(data).hexdigest()}"


def _copied(args: Collection[Any]) -> list[Any]:
    """Clone the tensors among `args`: graphs may write to their inputs."""
    return [each.clone() if isinstance(each, Tensor) else each for each in args]


def _relative(got: Any, want: Any) -> float:
    """Largest difference of two tensors, relative to the largest element of `want`.

    It is 0 if they are equal, empty, or no tensors; else infinite if there is a NaN, or `want` is
    all 0.
    """
    if not isinstance(want, Tensor) or torch.equal(got, want) or not want.numel():
        return 0.0
    difference = (got.double() - want.double()).abs().max().item()
    largest = want.double().abs().max().item()
    if difference != difference or not largest:
        return float("inf")
    return float(difference / largest)
