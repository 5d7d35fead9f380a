"""Invariants of a graph between passes, beyond `graph.lint()`."""

from __future__ import annotations

from torch import fx

from autoshard.passes.ir import groups
from autoshard.passes.ir.match import (
    begun_by,
    bucket_of,
    event_of,
    group_of,
    is_all_reduce,
    is_barrier,
    is_launch,
    is_pack,
    is_wait,
    kind_of,
    members_of,
    move_of,
)
from autoshard.passes.ir.meta import PLAN


def verify(gm: fx.GraphModule) -> None:
    """Raise ValueError, naming the node, unless the graph's launches and waits fit together.

    All of these have to hold:

    - every launch has exactly one wait, for the same kind, members, group and bucket, through an
      all-reduce if it is a reduce whose group has replicas, and only then;
    - every wait and all-reduce takes the ticket of a launch or an all-reduce;
    - a launch of a reduce takes a pack that nothing else takes, of the same members, group and
      bucket;
    - the ticket of a launch goes to its all-reduce or wait, and nowhere else;
    - bucket numbers are unique;
    - every launch of copies has exactly one wait, with the same tensors; every wait has a launch;
    - no collective is between its launch and its wait where a barrier stands: see `is_barrier`;
    - launches and waits stand in the order of the graph's plan, if it has one and collectives have
      been inserted.
    """
    events: list[tuple[str, int]] = []
    nodes: list[fx.Node] = []
    launched: set[int] = set()
    under_way: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        what = event_of(node)
        if (move := move_of(node)) is not None:
            _check_copied(node, is_begun=move in ("offload", "reload"))
        if what is None:
            if under_way and is_barrier(node):
                launch = next(iter(under_way.values()))
                raise ValueError(
                    f"%{node.name}, which no collective may cross, stands between %{launch.name} "
                    "and its wait"
                )
            continue
        if what == "launch":
            _check_launch(node, launched)
            launched.add(bucket_of(node))
            under_way[bucket_of(node)] = node
        elif what == "wait":
            _check_ticket(node)
            under_way.pop(bucket_of(node), None)
        elif what in ("load", "store", "loaded", "stored"):
            _check_copied(node, is_begun=what in ("load", "store"))
        else:
            _check_ticket(node)
        events.append((what, bucket_of(node)))
        nodes.append(node)
    plan = PLAN.get(gm)
    if plan is not None and events:
        planned = [(event.what, event.bucket) for event in plan.schedule]
        if events != planned:
            at = next(
                (n for n, e, p in zip(nodes, events, planned, strict=False) if e != p), nodes[-1]
            )
            raise ValueError(
                f"%{at.name} departs from the plan: launches and waits stand as {events}, "
                f"planned were {planned}"
            )


def _check_ticket(node: fx.Node) -> None:
    """Raise ValueError unless `node` takes the ticket of a launch or an all-reduce."""
    ticket = node.args[0]
    if not (isinstance(ticket, fx.Node) and (is_launch(ticket) or is_all_reduce(ticket))):
        raise ValueError(f"%{node.name} waits for {ticket!r}, which is no launch")


def _check_launch(node: fx.Node, launched: set[int]) -> None:
    """Raise ValueError unless `node`, the launch of a bucket, stands in its chain of ops.

    It must be its bucket's first. A reduce must take a pack that no other op takes. What a launch
    gives goes to one wait alone, with replicas through one all-reduce. All of these must have one
    kind, members, group and bucket.
    launched: buckets that were launched before; the caller adds this one.
    """
    if bucket_of(node) in launched:
        raise ValueError(f"%{node.name} launches bucket {bucket_of(node)} a second time")
    if kind_of(node) == "reduce":
        packed = node.args[0]
        if not (isinstance(packed, fx.Node) and is_pack(packed) and len(packed.users) == 1):
            raise ValueError(f"%{node.name} launches {packed!r}, which nothing packed for it alone")
        _check_same(packed, node)
    has_copies = kind_of(node) == "reduce" and bool(groups.replicate_part(group_of(node)))
    way = [is_all_reduce, is_wait] if has_copies else [is_wait]
    for is_next in way:
        users = list(node.users)
        if len(users) != 1 or not is_next(users[0]):
            names = ", ".join(f"%{user.name}" for user in users) or "nothing"
            target = "wait" if is_next is is_wait else "all-reduce"
            raise ValueError(f"%{node.name} must go to one {target} but goes to {names}")
        _check_same(node, users[0])
        node = users[0]


def _check_copied(node: fx.Node, *, is_begun: bool) -> None:
    """Raise ValueError unless one wait takes a launch of copies, and its arguments.

    node: the launch, if `is_begun`; else the wait, which has to take a launch.
    """
    if not is_begun:
        if begun_by(node) is None:
            raise ValueError(f"%{node.name} waits for {node.args[0]!r}, which starts no copy")
        return
    users = list(node.users)
    if len(users) != 1 or begun_by(users[0]) is not node or users[0].args[1:] != node.args:
        names = ", ".join(f"%{user.name}" for user in users) or "nothing"
        raise ValueError(f"%{node.name} must go to one wait of the same tensors, not to {names}")


def _check_same(node: fx.Node, following: fx.Node) -> None:
    """Raise ValueError unless both have the same kind, members, group and bucket."""
    for what, of in (
        ("kind", kind_of),
        ("members", members_of),
        ("group", group_of),
        ("bucket", bucket_of),
    ):
        if of(node) != of(following):  # type: ignore[operator]
            follower = str(event_of(following)).replace("_", "-")
            raise ValueError(
                f"%{node.name} and its {follower} %{following.name} differ in {what}: "
                f"{of(node)!r} and {of(following)!r}"  # type: ignore[operator]
            )
