"""Forecast of a step that saves other values than its parts do, without parting it anew.

    forward   made ...... read last |--------------------------| end    a value that is saved
              made ...... read last |                                   one that is not
              made ...... read last |- copied -|                        one on the host
    backward  |---------------------------- needed ..... read last |    a value that is saved
                                            needed ..... read last |    one computed again
                                 |- copied - needed .... read last |    one on the host

A value is needed where backward reads it, or computes again what is made of it. To part a joint
graph takes longer than anything else in a decision; this takes as long as a simulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from torch import fx

from autoshard.passes.planner.copies import place_offloads, place_reloads
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.problem import Problem
from autoshard.passes.planner.save import Block, Choice
from autoshard.passes.plans.auto_buckets import PricedGraph
from autoshard.passes.plans.fusion import fuse
from autoshard.passes.plans.liveness import reads
from autoshard.passes.plans.saved import SavedValues
from autoshard.passes.plans.values import bytes_of, is_view, op_of, owner_of


class Forecast:
    """Forecast of the parts of a joint graph under decisions, from parts that were made without.

    forward, backward: these parts.
    host: link to the host, if values may lie there.
    handed: bytes that forward hands to backward so. beside: as of `Prices`.
    """

    def __init__(
        self,
        joint: fx.Graph,
        forward: PricedGraph,
        backward: PricedGraph,
        host: HostLink | None,
        handed: int = 0,
        beside: float = 0.0,
    ) -> None:
        """Note where each value is made and read in both parts; they are only read."""
        self.forward, self.backward, self.host = forward, backward, host
        self.handed, self.beside = handed, beside
        is_fused = forward.fusion is not None
        self._inlined = fuse(joint).absent if is_fused else frozenset()  # unless they are saved
        made = {node.name: at for node, at in forward.position.items()}
        self._made = {
            node: made[op_of(node).name] for node in joint.nodes if op_of(node).name in made
        }
        self._read: dict[str, int] = {}  # last in forward, by name
        for at, nodes in _reads(forward):
            self._read.update((node.name, at) for node in nodes)
        in_joint = {node.name: node for node in joint.nodes}
        self._first: dict[fx.Node, int] = {}  # in backward
        self._last: dict[fx.Node, int] = {}
        for at, nodes in _reads(backward):
            for node in nodes:
                owner = owner_of(in_joint[node.name]) if node.name in in_joint else node
                self._first.setdefault(owner, at)
                self._last[owner] = at

    def problems(self, values: SavedValues, taken: Sequence[int]) -> tuple[Problem, Problem]:
        """Return the problems of forward and backward, if they save what a decision says.

        taken: a choice for each block of `values`, by its number.
        """
        forward, backward = _Changed(self.forward.problem), _Changed(self.backward.problem)
        saved: dict[fx.Node, int] = {}  # and until where backward needs them to compute others
        begins: dict[fx.Node, int] = {}  # where what is not saved is computed again
        passing: dict[int, int] = {}  # bytes of what is computed again for others alone, by place
        moved: list[fx.Node] = []
        for choice, block, nodes in values.chosen(taken):
            needed = self._needed(choice, block, nodes)
            for number in choice.again:
                node, (begin, end) = nodes[number], needed[number]
                begins[node] = begin
                backward.takes(begin, block[number].op_us)
                if node in self._inlined:
                    pass
                elif node not in self._last:
                    passing[begin] = max(passing.get(begin, 0), bytes_of(node))
                elif node not in values.saved:
                    backward.holds(begin, end + 1, bytes_of(node))
            for number in choice.saved:
                node = nodes[number]
                saved[node] = max(saved.get(node, 0), needed[number][1])
            moved += [nodes[number] for number in choice.moved]
        for node in values.saved - saved.keys():  # given up
            is_inlined = node in self._inlined
            freed = self._made.get(node, 0) if is_inlined else self._done(node)
            forward.holds(freed, forward.end, -bytes_of(node))
            begin = backward.end if is_inlined else begins.get(node, backward.end)
            backward.holds(0, begin, -bytes_of(node))
        for node in saved.keys() - values.saved:  # others are computed from it
            forward.holds(self._done(node), forward.end, bytes_of(node))
            backward.holds(0, saved[node] + 1, bytes_of(node))
        for at, most in passing.items():
            backward.holds_before(at, most)
        if moved and self.host is not None:
            self._move(moved, saved, forward, backward, self.host)
        more = sum(map(bytes_of, saved)) - sum(map(bytes_of, moved))
        handed = self.handed + more - sum(map(bytes_of, values.saved))
        others = round(self.beside * handed)
        return forward.problem(others), backward.problem(others)

    def _needed(
        self, choice: Choice, block: Block, nodes: Sequence[fx.Node]
    ) -> list[tuple[int, int]]:
        """Return where backward needs each value of a block first, and where last.

        What is computed again is so where it is needed, and needs its own sources there.
        """
        end = self.backward.problem.num_ops
        first = [self._first.get(node, end) for node in nodes]
        last = [self._last.get(node, -1) for node in nodes]
        for number in sorted(choice.again, reverse=True):
            if first[number] == end:
                continue  # a result that nobody reads
            is_inlined = nodes[number] in self._inlined  # and computed where it is read
            until = last[number] if is_inlined else first[number]
            for source in block[number].sources:
                first[source] = min(first[source], first[number])
                last[source] = max(last[source], until)
        return list(zip(first, last, strict=True))

    def _done(self, node: fx.Node) -> int:
        """Position in forward from which a value is not read any more."""
        return 1 + self._read.get(node.name, self._made.get(node, 0))

    def _move(
        self,
        moved: Sequence[fx.Node],
        saved: dict[fx.Node, int],
        forward: _Changed,
        backward: _Changed,
        link: HostLink,
    ) -> None:
        """Have values lie on the host in between, with copies placed as the pass places them."""
        ordered = sorted(moved, key=self._done)
        times = [link.time_us(bytes_of(node)) for node in ordered]
        ready = [min(self._done(node), forward.end) for node in ordered]
        for node, copy in zip(ordered, place_offloads(forward.op_us, ready, times), strict=True):
            forward.holds(copy.wait, forward.end, -bytes_of(node))
            forward.takes(copy.wait, copy.exposed_us + link.call_us)
        used = {node: min(self._first.get(node, saved[node]), backward.end) for node in moved}
        ordered = sorted(moved, key=used.__getitem__)
        times = [link.time_us(bytes_of(node)) for node in ordered]
        copies = place_reloads(backward.op_us, [used[node] for node in ordered], times)
        for node, copy in zip(ordered, copies, strict=True):
            backward.holds(0, copy.launch, -bytes_of(node))
            backward.takes(copy.wait, copy.exposed_us + link.call_us)


class _Changed:
    """Problem with other times and bytes in use.

    op_us: microseconds of each op. end: number of ops.
    """

    def __init__(self, was: Problem) -> None:
        self.was, self.end = was, was.num_ops
        self.op_us = list(was.op_us)
        self._change = np.zeros(self.end + 1, dtype=np.int64)

    def holds(self, begin: int, end: int, more: int) -> None:
        """Have `more` bytes in use at the ops from `begin` to before `end`."""
        if begin < end:
            self._change[min(begin, self.end)] += more
            self._change[min(end, self.end)] -= more

    def holds_before(self, at: int, more: int) -> None:
        """Have `more` bytes in use right before an op, when there is no room for its result yet."""
        if 0 < at < self.end:
            live = self.was.live_bytes
            self.holds(at, at + 1, max(0, more - max(0, live[at] - live[at - 1])))

    def takes(self, at: int, more_us: float) -> None:
        """Have the op at a position take longer."""
        self.op_us[min(at, self.end - 1)] += more_us

    def problem(self, others: int) -> Problem:
        """Return the problem as changed, with `others` bytes more in use at all ops."""
        live = np.array(self.was.live_bytes) + np.cumsum(self._change[:-1]) + others
        return dataclasses.replace(
            self.was, op_us=tuple(self.op_us), live_bytes=tuple(live.tolist())
        )


def _reads(part: PricedGraph) -> Iterator[tuple[int, Iterable[fx.Node]]]:
    """Yield where nodes' memory is read; not by views, which may be there to be saved alone."""
    nodes = list(part.position)
    for at, read in reads(part.graph, part.position, part.fusion):
        if not is_view(nodes[at]):
            yield at, read
