"""Keep gathered parameters from forward to backward, as if their units did not reshard.

before:
    in %w: f32[4]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', False, 0)
    return [%whole]
after:
    in %w: f32[4]
    %whole: f32[7] = autoshard.unshard(%w, 'f32[7]', 'g', True, 0)
    return [%whole]

`planner/keep.py` finds the parameters for which this is worth its memory.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoshard.passes.ir.match import is_unshard, param_of
from autoshard.passes.ir.ops import Unshard


def keep_gathered(gm: fx.GraphModule, *, params: Collection[int]) -> fx.GraphModule:
    """Set the argument `keep` of the `unshard` markers of `params` to True.

    params: numbers in the table of parameters. Left alone are those that backward does not gather
        as forward does (see `Unshard.can_be_kept`): over a smaller group, from the host, or by an
        all-gather extension; and those that the runtime keeps unsharded.
    Numerics: unchanged, bit for bit.
    """
    for node in gm.graph.nodes:
        if is_unshard(node) and param_of(node) in params and Unshard.of(node).can_be_kept:
            node.update_arg(3, True)
    return gm
