"""Tags of nodes for AOTAutograd's partitioner: what is saved, and what is computed again."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

REGION = 100_000
"""The `ac_graph_id` of our tags, higher than that of any checkpointed region. The partitioner saves
a value that a region with a higher id reads, and none has a higher id than ours."""


def must_save(node: fx.Node) -> None:
    """Tag `node`: forward hands it to backward."""
    _tag(node, CheckpointPolicy.MUST_SAVE)


def must_recompute(node: fx.Node) -> None:
    """Tag `node`: backward computes it again, if it reads it."""
    _tag(node, CheckpointPolicy.MUST_RECOMPUTE)


def is_tagged(node: fx.Node) -> bool:
    """Tell whether `node` has a tag, of ours or of the user's checkpointing."""
    return node.meta.get("recompute") is not None


def is_recomputed(node: fx.Node) -> bool:
    """Tell whether a tag has backward compute `node` again, if it reads it."""
    policies = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.meta.get("recompute") in policies


def _tag(node: fx.Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = REGION
