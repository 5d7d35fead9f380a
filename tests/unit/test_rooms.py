"""Rooms of the package: each imports only rooms below it, under `TYPE_CHECKING`, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import autoshard
from autoshard import plan_cache
from autoshard.tools import sizes

PACKAGE = Path(autoshard.__file__).parent

# From the lowest to the highest. A module belongs to the longest name that it begins with.
ROOMS = (
    "autoshard.one_piece",
    "autoshard._torch",
    "autoshard.errors",
    "autoshard.passes.planner",
    "autoshard.passes.ir",
    "autoshard.passes.plans",
    "autoshard.passes.lowering",
    "autoshard.passes",
    "autoshard.runtime.comm",
    "autoshard.runtime.ranks",
    "autoshard.runtime.unit",
    "autoshard.runtime.eager",
    "autoshard.runtime.compiled",
    "autoshard.runtime.training",
    "autoshard.runtime.weights",
    "autoshard.runtime.sharding",
    "autoshard.runtime",
    "autoshard.options",
    "autoshard.plan_cache",
    "autoshard.progress",
    "autoshard.handed",
    "autoshard.search_handed",
    "autoshard.deciding",
    "autoshard.compilation",
    "autoshard.agreed_plan",
    "autoshard.artefacts",
    "autoshard.backend",
    "autoshard",  # the tools, and the names that users import
)


def modules() -> dict[str, Path]:
    """List the modules of the package by their full name, packages among them."""
    found = sizes.modules(PACKAGE).items()
    return {f"autoshard.{name}".removesuffix(".__init__"): path for name, path in found}


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in known else node.module
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"


def room_of(module: str) -> int:
    """Find the room of a module: its place in `ROOMS`."""
    inside = [each for each in ROOMS if f"{module}.".startswith(f"{each}.")]
    return ROOMS.index(max(inside, key=len))


def test_no_import_runs_up() -> None:
    known = modules()
    up = [
        f"{module} imports {other}"
        for module, path in sorted(known.items())
        for other in imports(path, known)
        if room_of(other) > room_of(module)
    ]
    assert not up, "\n".join(up)


def test_every_room_is_there() -> None:
    assert {room_of(module) for module in modules()} == set(range(len(ROOMS)))


def test_a_plan_is_stored_for_these_sources() -> None:
    """Whatever the room: the key covers all that a graph is compiled by.

    No tool is such, nor what hosts are given.
    """
    beside = ("autoshard.tools", "autoshard.integrations")
    wanted = {path for name, path in modules().items() if not name.startswith(beside)}
    assert {path.resolve() for path in plan_cache.sources()} == {path.resolve() for path in wanted}
