"""Values that a joint graph's forward may save for backward, as numbers for the planner."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from torch import fx

from autoshard import _torch
from autoshard.passes.ir.match import (
    forward_part,
    is_barrier,
    is_marker,
    is_unshard,
    param_of,
    tangents,
)
from autoshard.passes.ir.meta import ParamInfo
from autoshard.passes.ir.plan import SavedBlock
from autoshard.passes.ir.recompute import is_recomputed, is_tagged
from autoshard.passes.planner.save import Block, Choice, Value, choices
from autoshard.passes.plans.fusion import fuse
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.values import base_of, is_result, num_bytes_of, numbered, tensors_of


def can_be_recomputed(node: fx.Node) -> bool:
    """Tell whether backward may compute `node` again: the op writes nothing, and meets no rank."""
    if is_marker(node) or is_barrier(node):
        return False
    if is_result(node):
        return can_be_recomputed(node.all_input_nodes[0])
    if not isinstance(node.target, _torch.ops.OpOverload):
        return False
    return not _torch.ops.schema_of(node.target).is_mutable


def saved_names(joint: fx.Graph, backward: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes that forward hands to `backward`, a part of `joint`."""
    given = {node.name for node in backward.find_nodes(op="placeholder")}
    return frozenset(given - {node.name for node in tangents(joint)})


class SavedValues:
    """Values that the forward of a joint graph hands to its backward, by blocks of the model.

    A value is what owns memory: views of it, and the results of one op, are saved together. A value
    that another block reads is not computed again, so that blocks don't depend on each other.

    blocks: names of blocks, in order of their first parameter. A block may have no values.
    curves: the best choices for each block; see `planner.save`.
    """

    def __init__(
        self,
        graph: fx.Graph,
        saved: Collection[str],
        prices: Prices,
        table: Sequence[ParamInfo],
    ) -> None:
        """Price the ops of `graph`'s forward, of which the nodes `saved` are saved.

        What is tagged to be computed again is there in backward anyway, as inputs and gathered
        parameters are; what is tagged to be saved stays so.

        table: facts about parameters; a block begins where a unit's first one is read.
        """
        forward = [node for node in forward_part(graph) if node.op == "call_function"]
        self._name = {node: name for name, node in numbered(forward).items()}
        self._block_of = _blocks(forward, table)
        self.blocks = tuple(dict.fromkeys(self._block_of.values()))
        nodes = [node for node in forward if not is_recomputed(node)]
        owners = [node for node in nodes if base_of(node) is node and not is_unshard(node)]
        self._owners = frozenset(owners)
        self._saved = {base_of(node) for node in nodes if node.name in saved} & self._owners
        fusion = fuse(graph, self._saved) if prices.is_fused else None
        microseconds = {node: prices.op_us(node, fusion) for node in owners}
        own: dict[str, list[fx.Node]] = {name: [] for name in self.blocks}
        for node in owners:
            own[self._block_of[node]].append(node)
        made = [self._values(name, nodes, microseconds) for name, nodes in own.items()]
        self._nodes = [nodes for nodes, _ in made]
        self.curves = tuple(_choices(block) for _, block in made)

    def names(self, taken: Sequence[int]) -> frozenset[str]:
        """Return the nodes to save, by the names that `numbered` gives them.

        The partitioner does not obey tags of views: what owns the memory is named.

        taken: a choice for each block, by its number.
        """
        found: set[fx.Node] = set()
        for number, nodes, curve in zip(taken, self._nodes, self.curves, strict=True):
            for each in curve[number].saved:
                found |= set(_results(nodes[each]))
        return frozenset(self._name[node] for node in found)

    def saved_blocks(self, taken: Sequence[int]) -> tuple[SavedBlock, ...]:
        """Describe a choice for each block, by its number."""
        found = []
        for name, number, curve in zip(self.blocks, taken, self.curves, strict=True):
            choice = curve[number]
            given_up = curve[0].num_bytes - choice.num_bytes
            found.append(SavedBlock(name, choice.num_bytes, given_up, choice.again_us))
        return tuple(found)

    def blocks_of(self, part: fx.Graph) -> Mapping[fx.Node, int]:
        """Number the blocks that nodes of a part of this graph are from, those of its forward."""
        number = {name: each for each, name in enumerate(self.blocks)}
        known = {node.name: number[name] for node, name in self._block_of.items()}
        return {node: known[node.name] for node in part.nodes if node.name in known}

    def _values(
        self, block: str, own: Sequence[fx.Node], microseconds: Mapping[fx.Node, float]
    ) -> tuple[list[fx.Node], Block]:
        """List the nodes and values of `block`: its `own`, and those of others that it reads.

        Of a value of another block that is not saved yet, each block that reads it bears a part.
        """
        read = (base_of(source) for node in own for source in node.all_input_nodes)
        others = {
            node: None
            for node in read
            if node in self._owners and node not in self._saved and self._block_of[node] != block
        }
        nodes = [*others, *own]
        number = {node: each for each, node in enumerate(nodes)}
        values = []
        for node in nodes:
            num_bytes = sum(map(num_bytes_of, tensors_of(node)))
            readers = {self._block_of.get(user, block) for user in _readers(node)}
            if node in others:
                values.append(Value(num_bytes // len(readers), 0.0, is_fixed=True))
                continue
            sources = {base_of(source) for source in node.all_input_nodes}
            is_fixed = is_tagged(node) or not can_be_recomputed(node) or bool(readers - {block})
            values.append(
                Value(
                    num_bytes,
                    microseconds[node],
                    tuple(sorted(number[each] for each in sources if each in number)),
                    is_read=node in self._saved,
                    is_fixed=is_fixed,
                )
            )
        return nodes, tuple(values)


@lru_cache(maxsize=64)  # blocks of one kind are equal
def _choices(block: Block) -> tuple[Choice, ...]:
    return choices(block)


def _blocks(forward: Sequence[fx.Node], table: Sequence[ParamInfo]) -> dict[fx.Node, str]:
    """Name the block that each of forward's nodes is in: after the unit that was read last.

    Of units that are numbered in a list, each is a block, with the units in it. Where a unit is
    read again after another one, a block begins that is numbered: "root 2". What stands before the
    first one is "start". What a block begins with before it reads a parameter, as a norm does, is
    in it, too: it begins where fewest bytes are handed on.
    """
    runs: list[tuple[str, list[fx.Node]]] = [("start", [])]
    times: Counter[str] = Counter()
    unit = None
    for node in forward:
        if is_unshard(node) and (now := _block_name(table[param_of(node)].unit)) != unit:
            unit = now
            times[now] += 1
            runs.append((now if times[now] == 1 else f"{now} {times[now]}", []))
        runs[-1][1].append(node)
    position = {node: at for at, node in enumerate(forward)}
    for (_, nodes), (_, following) in itertools.pairwise(runs):
        begin = _begin_of_next(nodes, position)
        following[:0] = nodes[begin:]
        del nodes[begin:]
    return {node: name for name, nodes in runs for node in nodes}


def _begin_of_next(nodes: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> int:
    """Return where in a block's `nodes` the next one begins: after all that reads its parameters.

    Of these places it is the one at which fewest bytes of the block's values are read later, and of
    several the last.

    position: of all of forward's nodes.
    """
    reads = [
        at
        for at, node in enumerate(nodes)
        if is_unshard(node) or any(map(_is_of_parameter, node.all_input_nodes))
    ]
    if not reads:
        return len(nodes)
    first = reads[-1] + 1
    last_read: dict[fx.Node, int] = {}
    for node in nodes:
        if base_of(node) is node and not is_unshard(node):
            last_read[node] = max((position.get(each, 0) for each in _readers(node)), default=0)
    num_bytes = {node: sum(map(num_bytes_of, tensors_of(node))) for node in last_read}
    best, fewest = len(nodes), math.inf
    for at in range(len(nodes), first - 1, -1):
        here = position[nodes[at]] if at < len(nodes) else position[nodes[-1]] + 1
        handed_on = sum(
            num_bytes[node] for node, last in last_read.items() if position[node] < here <= last
        )
        if handed_on < fewest:
            best, fewest = at, handed_on
    return best


def _is_of_parameter(node: fx.Node) -> bool:
    """Tell whether `node` is an unsharded parameter, or a view of one."""
    return is_unshard(base_of(node))


def _block_name(unit: str) -> str:
    """Name of the block of a unit: up to its first number, "layers.0" of "layers.0.mlp"."""
    numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", unit)
    return numbered.group() if numbered else unit


def _results(node: fx.Node) -> list[fx.Node]:
    """List the nodes that save a value: its op's result, or each of several that is read."""
    return [user for user in node.users if is_result(user) and user.users] or [node]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read `node`, or a view of it."""
    for user in node.users:
        yield user
        if base_of(user) is node:
            yield from _readers(user)
