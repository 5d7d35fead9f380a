"""Sizes of the package's modules, classes and functions, in lines, and classes' fields.

A mirror and no gate: `python -m autoshard.tools.sizes` prints what stands out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import autoshard

LIMITS = {"module": 350, "class": 250, "function": 60, "fields": 15}
"""Sizes above which a reader asks whether something is one idea."""


class Size(NamedTuple):
    """Size of one thing: lines from its first to its last, or the number of a class's fields."""

    kind: str
    name: str
    size: int


def sizes(package: Path) -> list[Size]:
    """Measure all modules, classes and functions below `package`, the largest of each kind first.

    Kinds are in the order of `LIMITS`; a class has two sizes, "class" in lines and its "fields".
    package: the folder of a package.
    """
    found = [size for name, path in modules(package).items() for size in _of_module(path, name)]
    kinds = list(LIMITS)
    return sorted(found, key=lambda each: (kinds.index(each.kind), -each.size, each.name))


def modules(package: Path) -> dict[str, Path]:
    """Map the modules below the folder of a package to their files.

    A name is the path inside the folder, with dots; that of a package is `<name>.__init__`. Folders
    that are links are followed, as autoshard has them in a checkout.
    """
    found = {path.stem: path for path in sorted(package.glob("*.py"))}
    for folder in sorted(each for each in package.iterdir() if each.is_dir()):
        base = folder.resolve()  # rglob follows no links to folders
        for path in sorted(base.rglob("*.py")):
            inner = path.relative_to(base).with_suffix("").parts
            found[".".join((folder.name, *inner))] = path
    return found


def _of_module(path: Path, name: str) -> Iterator[Size]:
    text = path.read_text()
    yield Size("module", name, text.count("\n"))
    yield from _inside(ast.parse(text), name)


def _inside(outer: ast.AST, prefix: str) -> Iterator[Size]:
    """Yield the sizes of classes and functions in `outer`, nested ones too.

    prefix: name of `outer`, which theirs begin with.
    """
    for node in ast.iter_child_nodes(outer):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{node.name}"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.ClassDef):
                yield Size("class", name, lines)
                yield Size("fields", name, len(_fields(node)))
            else:
                yield Size("function", name, lines)
            yield from _inside(node, name)
        else:
            yield from _inside(node, prefix)


def _fields(node: ast.ClassDef) -> set[str]:
    """Names of a class's fields: annotated in its body, or assigned to `self` in a method."""
    declared = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assigned = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    return declared | assigned


def main() -> None:
    """Print the names that are larger than `LIMITS` say, and the number of each kind."""
    found = sizes(Path(autoshard.__file__).parent)
    for kind, limit in LIMITS.items():
        of_kind = [each for each in found if each.kind == kind]
        print(f"{kind}: {len(of_kind)}, of which larger than {limit}:")
        print("".join(f"  {each.size:5}  {each.name}\n" for each in of_kind if each.size > limit))


if __name__ == "__main__":
    main()
