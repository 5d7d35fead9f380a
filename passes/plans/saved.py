"""Values that a joint graph's forward may save for backward, as numbers for the planner."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from torch import Tensor, fx

from autoshard import _torch
from autoshard.passes.ir.match import (
    forward_part,
    is_barrier,
    is_marker,
    is_unshard,
    param_of,
    tangents,
)
from autoshard.passes.ir.meta import VALUE, ParamInfo
from autoshard.passes.ir.plan import SavedBlock
from autoshard.passes.ir.recompute import is_recomputed, is_tagged
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.save import Block, Choice, Value, choices, with_host
from autoshard.passes.plans.fusion import fuse
from autoshard.passes.plans.prices import Prices
from autoshard.passes.plans.values import (
    base_of,
    bytes_of,
    hint_of,
    is_result,
    numbered,
    op_of,
    owner_of,
    tensors_of,
)


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


def movable(forward: fx.Graph, num_outputs: int) -> frozenset[str]:
    """Return the names, as of `numbered`, of saved values of a `forward` that may lie on the host.

    num_outputs: of the graph's outputs, those that are the user's; what it saves follows them.
    """
    (outputs,) = forward.output_node().args
    assert isinstance(outputs, (list, tuple))
    users = _owned_by_users(each for each in outputs[:num_outputs] if isinstance(each, fx.Node))
    saved = (each for each in outputs[num_outputs:] if isinstance(each, fx.Node))
    found = (VALUE.get(node) for node in saved if _can_move(node, users))
    return frozenset(name for name in found if name is not None)


def _owned_by_users(outputs: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return the nodes that own the memory of a graph's `outputs`."""
    return frozenset(map(owner_of, outputs))


def _can_move(node: fx.Node, users: Collection[fx.Node]) -> bool:
    """Tell whether a value may lie on the host: a copy lies like it, and no user has it.

    users: nodes whose memory the user gets.
    """
    tensors = tensors_of(node)
    is_one = node.op == "call_function" and len(tensors) == 1
    return is_one and _is_dense(tensors[0]) and owner_of(node) not in users


class SavedValues:
    """Values that the forward of a joint graph hands to its backward, by blocks of the model.

    A value is what owns memory: views of it are saved together; an op may make several. A value
    that another block reads is not computed again, so that blocks don't depend on each other.

    blocks: names of blocks, in order of their first parameter; of one in pieces, once for each. A
        block may have no values.
    saved: nodes that own what forward saves without a decision.
    curves: the best choices for each block, or piece; see `planner.save`.
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

        Blocks are whole, and no value lies on a host; see `in_pieces` and `near`.

        table: facts about parameters; a block begins where a unit's first one is read.
        """
        self._table, self._prices = table, prices
        self._forward = [node for node in forward_part(graph) if node.op == "call_function"]
        self._name = {node: name for name, node in numbered(self._forward).items()}
        nodes = [node for node in self._forward if not is_recomputed(node)]
        self._owners = dict.fromkeys(each for each in nodes if _owns(each) and not is_unshard(each))
        # A view may be one that backward makes, of what forward does.
        owners_of_saved = {owner_of(node) for node in graph.nodes if node.name in saved}
        self.saved = frozenset(owners_of_saved & self._owners.keys())
        self._outputs = _owned_by_users(graph.output_node().all_input_nodes)
        ops = frozenset(map(op_of, self.saved))
        self._fusion = fuse(graph, ops) if prices.is_fused else None
        self._us = {op: prices.op_us(op, self._fusion) for op in map(op_of, self._owners)}
        self._cut(1)

    def in_pieces(self, most: int) -> SavedValues:
        """Return the same values, with each block in up to `most` pieces, and without a host.

        A piece is a block of its own: less is computed again at a time, but what one piece hands to
        the next has to be saved.
        """
        found = copy.copy(self)
        found._cut(most)
        return found

    def near(self, host: HostLink | None) -> SavedValues:
        """Return the same blocks, whose values may lie on a host meanwhile; None: on none."""
        found = copy.copy(self)
        found.curves = tuple(map(_choices, self._block_values))
        if host is not None:
            op_us = self._prices.op_us
            own_us = [sum(op_us(node, self._fusion) for node in nodes) for _, nodes in self._runs]
            left_us = [sum(own_us[number + 1 :]) for number in range(len(own_us))]
            hidden_us = map(min, own_us, left_us)  # while the block itself, or what is left, runs
            found.curves = tuple(
                with_host(block, curve, host, most_us)
                for block, curve, most_us in zip(
                    self._block_values, found.curves, hidden_us, strict=True
                )
            )
        return found

    def _cut(self, pieces: int) -> None:
        """Find the blocks, in so many pieces, and their curves."""
        runs = _in_pieces(_blocks(self._forward, self._table), pieces, frozenset(self._forward))
        self._runs = runs
        self._block_of = {node: at for at, (_, nodes) in enumerate(runs) for node in nodes}
        self.blocks = tuple(name for name, _ in runs)
        own: list[list[fx.Node]] = [[] for _ in self.blocks]
        for node in self._owners:
            own[self._block_of[node]].append(node)
        made = [self._values(at, nodes) for at, nodes in enumerate(own)]
        self._nodes = [nodes for nodes, _ in made]
        self._block_values = [block for _, block in made]
        self.curves = tuple(map(_choices, self._block_values))

    def names(self, taken: Sequence[int]) -> frozenset[str]:
        """Return the nodes to save, by the names that `numbered` gives them.

        The partitioner does not obey tags of views: what owns the memory is named.

        taken: a choice for each block, by its number.
        """
        found: set[str] = set()
        for number, nodes, curve in zip(taken, self._nodes, self.curves, strict=True):
            found |= {self._name[nodes[each]] for each in curve[number].saved}
        return frozenset(found)

    def chosen(self, taken: Sequence[int]) -> Iterator[tuple[Choice, Block, Sequence[fx.Node]]]:
        """Yield, of each block, the choice taken there, its values, and their nodes.

        taken: as of `names`. A node may be a value of several blocks.
        """
        for number, curve, block, nodes in zip(
            taken, self.curves, self._block_values, self._nodes, strict=True
        ):
            yield curve[number], block, nodes

    def moved(self, taken: Sequence[int]) -> frozenset[str]:
        """Return those of `names(taken)` that lie on the host meanwhile."""
        chosen = zip(taken, self._nodes, self.curves, strict=True)
        return frozenset(
            self._name[nodes[each]]
            for number, nodes, curve in chosen
            for each in curve[number].moved
        )

    def saved_blocks(self, taken: Sequence[int]) -> tuple[SavedBlock, ...]:
        """Describe a choice for each block, by its number; pieces of a block are added up."""
        found: dict[str, SavedBlock] = {}
        for name, number, curve in zip(self.blocks, taken, self.curves, strict=True):
            choice, before = curve[number], found.get(name, SavedBlock(name, 0, 0, 0.0))
            found[name] = SavedBlock(
                name,
                before.num_bytes + choice.num_bytes,
                before.given_up_bytes + curve[0].num_bytes - choice.num_bytes,
                before.again_us + choice.again_us,
                before.host_bytes + choice.host_bytes,
            )
        return tuple(found.values())

    def blocks_of(self, part: fx.Graph) -> Mapping[fx.Node, int]:
        """Number the blocks that nodes of a part of this graph are from, those of its forward."""
        known = {node.name: number for node, number in self._block_of.items()}
        return {node: known[node.name] for node in part.nodes if node.name in known}

    def _values(self, block: int, own: Sequence[fx.Node]) -> tuple[list[fx.Node], Block]:
        """List the nodes and values of `block`: its `own`, and those of others that it reads.

        Of a value of another block that is not saved yet, each block that reads it bears a part.
        """
        read = (owner_of(source) for node in own for source in op_of(node).all_input_nodes)
        others = {
            node: None
            for node in read
            if node in self._owners and node not in self.saved and self._block_of[node] != block
        }
        nodes = [*others, *own]
        number = {node: each for each, node in enumerate(nodes)}
        firsts: dict[fx.Node, int] = {}  # of the results of an op
        values = []
        for node in nodes:
            num_bytes = bytes_of(node)
            readers = {self._block_of.get(user, block) for user in _readers(node)}
            if node in others:
                values.append(Value(num_bytes // len(readers), 0.0, is_fixed=True))
                continue
            op = op_of(node)
            sources = {owner_of(source) for source in op.all_input_nodes}
            first = firsts.setdefault(op, number[node])
            is_fixed = is_tagged(node) or not can_be_recomputed(node) or bool(readers - {block})
            values.append(
                Value(
                    num_bytes,
                    self._us[op] if first == number[node] else 0.0,
                    tuple(sorted(number[each] for each in sources if each in number)),
                    op=first,
                    is_read=node in self.saved,
                    is_fixed=is_fixed,
                    can_move=not is_tagged(node) and _can_move(node, self._outputs),
                )
            )
        return nodes, tuple(values)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether the elements of `tensor` lie in its memory one after another, in any order."""
    expected = 1
    sizes = zip(map(hint_of, tensor.stride()), map(hint_of, tensor.shape), strict=True)
    for stride, size in sorted(sizes):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=64)  # blocks of one kind are equal
def _choices(block: Block) -> tuple[Choice, ...]:
    return choices(block)


Run = tuple[str, list[fx.Node]]
"""Name of a block, and the nodes of forward that are in it, or in a piece of it."""


def _blocks(forward: Sequence[fx.Node], table: Sequence[ParamInfo]) -> list[Run]:
    """Divide forward's nodes into blocks, each named after the unit that is read there.

    Of units that are numbered in a list, each is a block, with the units in it. Where a unit is
    read again after another one, a block begins that is numbered: "root 2". What stands before the
    first one is "start". What a block begins with before it reads a parameter, as a norm does, is
    in it, too: it begins where fewest bytes are handed on.
    """
    runs: list[Run] = [("start", [])]
    times: Counter[str] = Counter()
    unit = None
    for node in forward:
        if is_unshard(node) and (now := _block_name(table[param_of(node)].unit)) != unit:
            unit = now
            times[now] += 1
            runs.append((now if times[now] == 1 else f"{now} {times[now]}", []))
        runs[-1][1].append(node)
    known = frozenset(forward)
    for (_, nodes), (_, following) in itertools.pairwise(runs):
        begin = _begin_of_next(nodes, known)
        following[:0] = nodes[begin:]
        del nodes[begin:]
    return [(name, nodes) for name, nodes in runs if nodes]


def _in_pieces(runs: Sequence[Run], most: int, forward: Collection[fx.Node]) -> list[Run]:
    """Cut each block into up to `most` pieces, of about as many bytes of values.

    Of the places that are nearer to one cut than to others, fewest bytes are handed on there.
    """
    if most == 1:
        return list(runs)
    found: list[Run] = []
    for name, nodes in runs:
        made = [_made_bytes(node) for node in nodes]
        before = list(itertools.accumulate(made, initial=0))
        handed_on = _handed_on(nodes, forward)
        begin = 0
        for piece in range(1, most):
            low, high = ((piece + by) / most * before[-1] for by in (-0.5, 0.5))
            near = [at for at in range(begin + 1, len(nodes)) if low <= before[at] < high]
            if near:
                end = min(near, key=lambda at: (handed_on[at], -at))
                found.append((name, nodes[begin:end]))
                begin = end
        found.append((name, nodes[begin:]))
    return found


def _begin_of_next(nodes: Sequence[fx.Node], forward: Collection[fx.Node]) -> int:
    """Return where in a block's `nodes` the next one begins: after all that reads its parameters.

    Of these places it is the one at which fewest bytes of the block's values are read later, and of
    several the last.
    """
    reads = [
        at
        for at, node in enumerate(nodes)
        if is_unshard(node) or any(map(_is_of_parameter, node.all_input_nodes))
    ]
    if not reads:
        return len(nodes)
    handed_on = _handed_on(nodes, forward)
    return min(range(reads[-1] + 1, len(nodes) + 1), key=lambda at: (handed_on[at], -at))


def _handed_on(nodes: Sequence[fx.Node], forward: Collection[fx.Node]) -> list[int]:
    """Add up, for each place in a block, bytes of its values that are made before and read behind.

    The last place is its end. What backward alone reads is read nowhere.
    """
    position = {node: at for at, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    for at, node in enumerate(nodes):
        if num_bytes := _made_bytes(node):
            readers = (each for each in _readers(node) if each in forward)
            last = max((position.get(each, len(nodes)) for each in readers), default=at)
            change[position[op_of(node)] + 1] += num_bytes
            change[last + 1] -= num_bytes
    return list(itertools.accumulate(change))[: len(nodes) + 1]


def _made_bytes(node: fx.Node) -> int:
    """Bytes of the memory that `node` owns; 0 for a gathered parameter, which is no value."""
    if is_unshard(node) or not _owns(node):
        return 0
    return bytes_of(node)


def _is_of_parameter(node: fx.Node) -> bool:
    """Tell whether `node` is an unsharded parameter, or a view of one."""
    return is_unshard(base_of(node))


def _block_name(unit: str) -> str:
    """Name of the block of a unit: up to its first number, "layers.0" of "layers.0.mlp"."""
    numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", unit)
    return numbered.group() if numbered else unit


def _owns(node: fx.Node) -> bool:
    """Tell whether `node` owns memory, and none of its results owns a part of it."""
    return owner_of(node) is node and bool(tensors_of(node)) and not any(map(is_result, node.users))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read the memory that `node` owns, itself or through views of it."""
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            yield user
            if owner_of(user) is node:
                waiting.append(user)
