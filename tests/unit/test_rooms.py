"""Rooms of the package: each imports only rooms below it, under `TYPE_CHECKING`, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import autoshard

PACKAGE = Path(autoshard.__file__).parent

# From the lowest to the highest. A module belongs to the longest name that it begins with.
ROOMS = (
    "autoshard._torch",
    "autoshard.passes.planner",
    "autoshard.passes.ir",
    "autoshard.passes.plans",
    "autoshard.passes.lowering",
    "autoshard.passes",
    "autoshard.runtime",
    "autoshard",  # the backend, tools, and the names that users import
)


def modules() -> dict[str, Path]:
    """List the modules of the package by their full name, packages among them."""
    found = {}
    for folder in (PACKAGE, *(PACKAGE / each for each in ("passes", "runtime", "tools"))):
        base = folder.resolve()  # in a checkout, a link, which rglob does not follow
        prefix = ".".join(("autoshard", *folder.relative_to(PACKAGE).parts))
        for path in base.rglob("*.py"):
            inner = ".".join(path.relative_to(base).with_suffix("").parts)
            found[f"{prefix}.{inner}".removesuffix(".__init__")] = path
    return found


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
