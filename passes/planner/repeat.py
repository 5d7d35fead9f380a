"""Extend the problem of a model with few like blocks to many, by repeating a block in the middle.

    traced     head | 0 | 1 | 2 | 3 | tail        three copies more of block 2
    repeated   head | 0 | 1 | 2 | 2' 2'' 2''' | 3 | tail

Blocks 1 and 2 must be alike, op by op: then further blocks between them would be, too. Memory that
each block leaves behind, such as activations saved for backward, is added for each copy from that
copy on; memory that each block frees is added for each copy up to that copy. In backward, blocks
come in the other order, and nothing else is different.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from autoshard.passes.planner.problem import Item, Problem


def repeat(
    problem: Problem, units: Sequence[str], times: int, name: Callable[[str, int], str]
) -> Problem:
    """Return `problem` with `times` copies of the second of `units` inserted right after it.

    The unit's ops reach from its first to the third unit's first. If live memory grows from unit to
    unit, it grows on with each copy; if it shrinks, it begins higher. `problem` itself is returned,
    unchecked, if `times` is 0.

    problem: its live_bytes must be without memory that parameters take all the time.
    units: names of three units or more that follow each other in program order and are alike;
        neither the first nor the last such unit of the model should be among the first two.
    times: number of copies.
    name: function that maps the name of the second unit, or of a parameter in it, and the number of
        a copy, from 1, to the name in that copy.
    Raises ValueError if the first two units are not alike, if a unit is not in the graph, or if
    there are barriers.
    """
    if not times:
        return problem
    if any(item.segment for item in (*problem.gathers, *problem.reduces)):
        raise ValueError(f"the {problem.graph} graph has ops that no collective may cross")
    begin, middle, end = (begin_of(problem, unit) for unit in units[:3])
    change = _change(problem, begin, middle, end, units)
    gathers, reduces = (
        _repeated(problem, items, units[1], (middle, end), times, name)
        for items in (problem.gathers, problem.reduces)
    )
    op_us, live = problem.op_us, problem.live_bytes
    before, after = (0, times * change) if change > 0 else (-times * change, 0)
    return dataclasses.replace(
        problem,
        op_us=(*op_us[:end], *(op_us[middle:end] * times), *op_us[end:]),
        live_bytes=(
            *(each + before for each in live[:end]),
            *(
                each + before + (copy + 1) * change
                for copy in range(times)
                for each in live[middle:end]
            ),
            *(each + after for each in live[end:]),
        ),
        gathers=tuple(sorted(gathers, key=lambda item: item.used)),
        reduces=tuple(sorted(reduces, key=lambda item: item.ready)),
    )


def begin_of(problem: Problem, unit: str) -> int:
    """Number of the first op that uses a parameter of `unit` itself, or makes the gradient of one.

    Raises ValueError if the graph gathers and reduces nothing of `unit`.
    """
    used = [item.used for item in problem.gathers if item.unit == unit]
    made = [item.ready - 1 for item in problem.reduces if item.unit == unit]
    if not used and not made:
        raise ValueError(f"unit {unit} is not in the {problem.graph} graph")
    return min((*used, *made))


def _change(problem: Problem, begin: int, middle: int, end: int, units: Sequence[str]) -> int:
    """Bytes by which memory in use grows from one block to the next; negative if it shrinks.

    begin, middle, end: first op of the first block, of the second one, and of what follows.
    Raises ValueError for blocks that are not alike in their ops' times, or in this growth.
    """
    op_us, live = problem.op_us, problem.live_bytes
    changes = {b - a for a, b in zip(live[begin:middle], live[middle:end], strict=False)}
    is_alike = end - middle == middle - begin and all(
        math.isclose(a, b, rel_tol=1e-9)
        for a, b in zip(op_us[begin:middle], op_us[middle:end], strict=True)
    )
    if not is_alike or len(changes) != 1:
        raise ValueError(
            f"{units[0]} (ops {begin} to {middle}) and {units[1]} (to {end}) of the "
            f"{problem.graph} graph are not alike"
        )
    return changes.pop()


def _repeated(
    problem: Problem,
    items: Sequence[Item],
    unit: str,
    span: tuple[int, int],
    times: int,
    name: Callable[[str, int], str],
) -> list[Item]:
    """Return `items` as they are in the longer graph: moved, and each followed by its copies.

    They are not sorted again.

    unit: name of the unit that is repeated.
    span: its first op, and one after its last.
    times, name: see `repeat`.
    """
    end, length = span[1], span[1] - span[0]

    def of_copy(item: Item, copy: int) -> Item:
        """Make the item of copy number `copy` of an item of the unit; 0 is the item itself.

        Positions move with the copy, except a `ready` of 0, which stays, and those at the graph's
        end or behind it, which move with the end. Copies from 1 on are renamed, item and unit.
        """

        def moved(position: int) -> int:
            return position + (times if position >= problem.num_ops else copy) * length

        return dataclasses.replace(
            item,
            name=name(item.name, copy) if copy else item.name,
            unit=name(item.unit, copy) if copy else item.unit,
            ready=moved(item.ready) if item.ready else 0,
            used=moved(item.used),
            freed=moved(item.freed),
        )

    def of_another(item: Item) -> Item:
        """Move each position of an item of another unit that lies behind the copies."""
        return dataclasses.replace(
            item,
            ready=item.ready + (times * length if item.ready > end else 0),
            used=item.used + (times * length if item.used >= end else 0),
            freed=item.freed + (times * length if item.freed > end else 0),
        )

    found = []
    for item in items:
        if item.unit == unit:
            found += [of_copy(item, copy) for copy in range(times + 1)]
        else:
            found.append(of_another(item))
    return found
