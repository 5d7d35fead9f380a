"""Sources of what was traced: each function's and class's own lines, by module and name.

A source is found in the file of its module, by a walk over its syntax, so that nothing has to be
run or traced to compare it. Comments and layout are no part of it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType

import torch

from autoshard import options
from autoshard.artefacts.guards import is_covered


class NoSource(ValueError):
    """Error for traced code that is in no module's file, so that no change of it can be told."""


def names_of(codes: Iterable[CodeType], classes: Iterable[type]) -> list[tuple[str, str]]:
    """List (module, qualified name) of traced code and of classes, sorted, each once.

    Those of torch, of this package and of Python's library are left out: versions stand for them.
    So is code that was generated for a class, such as a dataclass's `__init__`.
    Raises NoSource for code of a module that has no file, or is the script that runs.
    """
    files = {
        file: name
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None))
    }
    found = set()
    for code in codes:
        if code.co_filename.startswith("<"):
            continue
        name = files.get(code.co_filename)
        if name is None or name == "__main__":
            if Path(code.co_filename).is_relative_to(Path(inspect.__file__).parent):
                continue
            raise NoSource(
                f"{code.co_qualname} is traced, and is in no module: put it into one that ranks "
                "import, beside the model"
            )
        if not is_covered(name):
            found.add((name, _outside(code.co_qualname)))
    for cls in classes:
        cls = cls.__dict__.get("_autoshard_original", cls)
        has_file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if has_file and not is_covered(cls.__module__):
            found.add((cls.__module__, _outside(cls.__qualname__)))
    return sorted(found)


def variables_of(codes: Iterable[CodeType]) -> list[str]:
    """List, as paths of guards, variables of the environment that traced code may ask for.

    They are all texts in code of the user's that names `environ` or `getenv`: Dynamo does not tell
    which of them were there.
    """
    return sorted(
        {
            f"environ({text!r})"
            for code in codes
            if not is_generated(code) and {"environ", "getenv"} & {*code.co_names}
            for text in code.co_consts
            if isinstance(text, str)
        }
    )


def is_generated(code: CodeType) -> bool:
    """Tell whether `code` is of torch, of this package or Python's library, or in no file."""
    file = code.co_filename
    return file.startswith("<") or file.startswith(_FOLDERS)


_FOLDERS = tuple(
    str(Path(module.__file__).parent) + "/"
    for module in (inspect, torch, options)
    if module.__file__ is not None
)


def _outside(qualname: str) -> str:
    """Name of the outermost function that `qualname` is defined in, or itself."""
    return qualname.partition(".<locals>")[0].partition(".<lambda>")[0]


def digest(module: str, name: str) -> str:
    """Return the digest of the source of `name` in `module`; of all of its file for "<lambda>".

    Returns "not imported" or "not there" where it is not to be found.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return "not imported"
    definitions, whole = _definitions(Path(file).read_text())
    return whole if name.startswith("<") else definitions.get(name, "not there")


@functools.lru_cache(maxsize=64)
def _definitions(text: str) -> tuple[dict[str, str], str]:
    """Digests of the functions and classes in a file's text, by qualified name, and one of all.

    Several of one name, as under an `if`, have one digest.
    """
    found: dict[str, list[str]] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                found.setdefault(name, []).append(ast.dump(child))
                walk(child, f"{name}.")
            else:
                walk(child, prefix)

    tree = ast.parse(text)
    walk(tree, "")
    digests = {name: _digest("\n".join(parts)) for name, parts in found.items()}
    return digests, _digest(ast.dump(tree))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
