"""What must hold between passes, beyond `graph.lint()`."""

from __future__ import annotations

from torch import fx

from autoshard.passes.match import bucket_of, group_of, is_launch, is_wait, kind_of, members_of
from autoshard.passes.meta import PLAN


def verify(gm: fx.GraphModule) -> None:
    """Raise ValueError, naming the node, unless

    - every launch has exactly one wait, for the same kind, members, group and bucket;
    - a ticket goes to its wait and nowhere else;
    - bucket numbers are unique;
    - launches and waits stand in the order of the graph's plan, if it has one and
      its buckets are in place.
    """
    events: list[tuple[str, int]] = []
    nodes: list[fx.Node] = []
    launched: set[int] = set()
    for node in gm.graph.nodes:
        if is_launch(node):
            _check_launch(node, launched)
            launched.add(bucket_of(node))
            events.append(("launch", bucket_of(node)))
            nodes.append(node)
        elif is_wait(node):
            ticket = node.args[0]
            if not (isinstance(ticket, fx.Node) and is_launch(ticket)):
                raise ValueError(f"%{node.name} waits for {ticket!r}, which is no launch")
            events.append(("wait", bucket_of(node)))
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


def _check_launch(node: fx.Node, launched: set[int]) -> None:
    if bucket_of(node) in launched:
        raise ValueError(f"%{node.name} launches bucket {bucket_of(node)} a second time")
    users = list(node.users)
    if len(users) != 1 or not is_wait(users[0]):
        names = ", ".join(f"%{user.name}" for user in users) or "nothing"
        raise ValueError(f"%{node.name} must go to one wait but goes to {names}")
    for what, of in (
        ("kind", kind_of),
        ("members", members_of),
        ("group", group_of),
        ("bucket", bucket_of),
    ):
        if of(node) != of(users[0]):  # type: ignore[operator]
            raise ValueError(
                f"%{node.name} and its wait %{users[0].name} differ in {what}: "
                f"{of(node)!r} and {of(users[0])!r}"  # type: ignore[operator]
            )
