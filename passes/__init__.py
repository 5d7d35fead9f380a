"""Graph passes, in the order in which they run. See README.md for the rules of a pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from autoshard.passes.copy_shards import copy_shards as copy_shards
from autoshard.passes.cut_smaller import cut_smaller as cut_smaller
from autoshard.passes.drop_dead_markers import drop_dead_markers as drop_dead_markers
from autoshard.passes.drop_local_markers import drop_local_markers as drop_local_markers
from autoshard.passes.give_table import give_table as give_table
from autoshard.passes.hoist_shards import hoist_shards as hoist_shards
from autoshard.passes.insert_collectives import insert_collectives as insert_collectives
from autoshard.passes.ir.meta import ParamInfo as ParamInfo
from autoshard.passes.ir.plan import Plan
from autoshard.passes.keep_gathered import keep_gathered as keep_gathered
from autoshard.passes.keep_overwritten import keep_overwritten as keep_overwritten
from autoshard.passes.merge_markers import merge_markers as merge_markers
from autoshard.passes.name_params import name_params as name_params
from autoshard.passes.note_outputs import note_outputs as note_outputs
from autoshard.passes.offload_saved import offload_saved as offload_saved
from autoshard.passes.part_markers import part_markers as part_markers
from autoshard.passes.pipeline import Pass as Pass
from autoshard.passes.pipeline import PassError as PassError
from autoshard.passes.pipeline import run as run
from autoshard.passes.pipeline import run_one as run_one
from autoshard.passes.plan_buckets import Bucketing as Bucketing
from autoshard.passes.plan_buckets import plan_buckets as plan_buckets
from autoshard.passes.plans.prices import Prices as Prices
from autoshard.passes.tag_recompute import tag_recompute as tag_recompute
from autoshard.passes.tag_saved import tag_saved as tag_saved
from autoshard.passes.use_kept import use_kept as use_kept


def joint(kept: Collection[int] = (), saved: Collection[str] | None = None) -> tuple[Pass, ...]:
    """List the passes over the joint graph, forward and backward in one, before it is partitioned.

    They merge markers, note what to keep for backward, and tag, last, what the partitioner is to
    save and to recompute.

    kept: numbers, in the table of parameters, of those to keep unsharded from forward to backward
        although their units reshard; `keep_gathered` says which of them can't be kept.
    saved: nodes whose values forward saves for backward; see `tag_saved`. None leaves it to the
        partitioner.
    """
    return (
        keep_overwritten,  # a tag of it says so to the partitioner
        use_kept,  # what is there already is not gathered, nor recomputed
        merge_markers,  # before the tags: one must hold for every use of a parameter
        partial(keep_gathered, params=kept),  # a tag below says so to the partitioner
        cut_smaller,  # a tag below keeps what it cuts
        give_table,  # backward is to have it among its inputs
        note_outputs,  # partitioned, a graph does not tell
        tag_recompute,  # what is computed from parameters alone, whatever is saved
        partial(tag_saved, saved=saved),  # last: what the partitioner, next in line, obeys
    )


def parted(moved: Collection[str], prices: Prices | None) -> tuple[Pass, ...]:
    """List the passes over each part of a joint graph, before AOTAutograd looks at it.

    moved, prices: see `offload_saved`.
    """
    return (partial(offload_saved, moved=moved, prices=prices),)


def pipeline(
    table: Sequence[ParamInfo],
    *,
    graph: str,
    bucketing: Bucketing,
    prices: Prices | None = None,
    known: Sequence[Plan] = (),
) -> tuple[Pass, ...]:
    """List the passes over one graph after partitioning, from markers to collectives.

    These are `preparation`, then `plan_buckets`, which decides, and `insert_collectives`, which
    acts.

    table: facts about the parameters, indexed by the numbers that markers carry.
    graph: "forward", "backward" or "inference".
    bucketing, prices, known: see `plan_buckets`.
    """
    decide = partial(plan_buckets, graph=graph, bucketing=bucketing, prices=prices, known=known)
    return (
        *preparation(table),
        decide,
        insert_collectives,  # act: last, nothing below may move a launch
    )


def preparation(table: Sequence[ParamInfo]) -> tuple[Pass, ...]:
    """List the passes of `pipeline` that run before buckets and their schedule are decided.

    They merge, drop and name markers, copy shards from the host and back, and move the ops that
    make shards to the top. Some of `joint` are here again, for inference graphs.

    table: see `pipeline`.
    """
    return (
        use_kept,  # an inference graph comes here without having been through joint()
        merge_markers,  # nor has it been through this
        give_table,  # nor through this
        drop_dead_markers,  # nothing below should plan for what nobody reads
        copy_shards,  # from the host and back: for groups of one rank too
        drop_local_markers,  # nothing below should plan for those
        part_markers,  # a plan stands on what is computed between markers
        partial(name_params, table=table),  # who is who, for all below and for people
        hoist_shards,  # a launch may then stand anywhere
    )
