"""docs/features.md from the tests: each behaviour, with the tests that say they prove it.

    python -m autoshard.tools.features          # write docs/features.md
    python -m autoshard.tools.features --check  # fail if it would change, or a row has no test

A test claims rows by their ids in its docstring ("A7, D-14 to D-16"), or in its name
(`test_a37_...`). Tests that take a `form` or `compile` parameter, or whose file is about
compiled code, count for both columns.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FEATURES: dict[str, str] = {
    "A1": "buffers cast for computation, and saved in their own dtypes, under the model's names",
    "A2": "which buffers there are, non-persistent ones too",
    "A3": "ranks and sizes are those of the mesh's group",
    "A4": "ignored modules: subtrees of any iterable; errors for anything else",
    "A5": "ignored parameters, with all their aliases",
    "A6": "ranks may ignore different modules",
    "A7": "an axis of size 1 changes no strategy; a world of 1 sends nothing",
    "A8": "no policy means no cast",
    "A9": "who is root is known at the first forward",
    "A10": "the host is kept from running ahead with gathers",
    "A11": "how far to gather ahead, forward and backward",
    "A12": "what was gathered ahead is not gathered again",
    "A13": "several outputs, one gather in backward",
    "A14": "communication hooks, default and the user's",
    "A15": "units without parameters",
    "A16": "moving the model to its device",
    "A17": "meta init unit by unit, children first",
    "A18": "shards on the host",
    "A19": "streams shared by all units",
    "A20": "parameters on several devices",
    "A21": "device_id",
    "A22": "meta init by reset_parameters",
    "A23": "meta init by param_init_fn",
    "A24": "torchdistX, if it is there",
    "A25": "synchronising ranks before sharding, in buckets",
    "A26": "parameters registered after sharding",
    "A27": "strategies mixed by unit",
    "A28": "units in post-order; a module with two parents",
    "A29": "policies never choose the root",
    "A30": "modules kept out of mixed precision, by class",
    "A31": "always_wrap_policy",
    "A32": "ModuleWrapPolicy",
    "A33": "CustomPolicy",
    "A34": "lambda_auto_wrap_policy",
    "A35": "transformer_auto_wrap_policy",
    "A36": "policies by class, and either of several",
    "A37": "size_based_auto_wrap_policy",
    "A38": "counting what is left to wrap",
    "A39": "enable_wrap and wrap",
    "A40": "units that mix frozen and trainable parameters",
    "A41": "models sharded in part",
    "A48": "tensor-parallel parameters, bound to their own unit",
    "A49": "ZeRO-2 with prefetch, in eval",
    "A50": "the mesh argument",
    "A51": "DTensor state dicts",
    "A52": "HSDP's all-reduce beside gathers and reduce-scatters",
    "A53": "HSDP's table of measurements",
    "A54": "after backward: hooks, strategies, several backwards",
    "A55": "buffers of ignored modules keep their dtype",
    "A56": "division before and after the sum",
    "A57": "HSDP divides once before and once after",
    "A58": "no communication hook under HSDP",
    "A59": "optimizer in backward",
    "A60": "streams keep their names and are shared",
    "A61": "sharding issues no collective",
    "A62": "explicit and automatic units are alike",
    "A63": "full precision in eval",
    "A64": "unfreezing after some steps",
    "A65": "frozen units are let go of in backward",
    "A66": "one mesh object for all units",
    "A67": "typed",
    "A68": "strategies by what they send",
    "A70": "replicate: meshes and placements",
    "A71": "replicate: device_id",
    "A72": "replicate and fully_shard in every order",
    "A73": "replicate: containers",
    "A74": "replicate: which modules it manages",
    "A75": "replicate: ignored parameters",
    "A76": "replicate: moves to the device",
    "A77": "replicate: keeps parameters after forward",
    "A78": "replicate: a child called before the root",
    "A79": "replicate: lists of modules",
    "A80": "replicate: the class of a module",
    "A81": "replicate: a child alone, then the root",
    "A82": "replicate: names stay",
}
TRAPS = {f"D-{number}": "" for number in range(1, 79)}


@dataclass(frozen=True)
class Claim:
    """A test, and the rows that it says it proves."""

    test: str
    rows: frozenset[str]
    is_compiled: bool


def claims(folder: Path) -> Iterator[Claim]:
    """Those of all tests below `folder`."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                rows = rows_in(ast.get_docstring(node) or "") | rows_in_name(node.name)
                arguments = {argument.arg for argument in node.args.args}
                compiled = bool(arguments & {"form", "compile", "route", "lowering"})
                yield Claim(f"{path.relative_to(folder)}::{node.name}", rows, compiled)


def rows_in(text: str) -> frozenset[str]:
    """Ids in a docstring, ranges ("A70 to A82") spelled out.

    >>> sorted(rows_in("A7, D-2 to D-4 and A.3.2"))
    ['A7', 'D-2', 'D-3', 'D-4']
    """
    found: set[str] = set()
    for match in re.finditer(r"\b(A|D-)(\d+)(?: to (?:A|D-)(\d+))?\b(?!\.\d)", text):
        first, last = int(match[2]), int(match[3] or match[2])
        found.update(f"{match[1]}{number}" for number in range(first, last + 1))
    return frozenset(found)


def rows_in_name(name: str) -> frozenset[str]:
    """Ids in a test's name.

    >>> sorted(rows_in_name("test_a37_and_d12_counts"))
    ['A37', 'D-12']
    """
    found = re.findall(r"_([ad])(\d+)(?=_)", name)
    return frozenset(f"A{number}" if kind == "a" else f"D-{number}" for kind, number in found)


def table(rows: dict[str, str], found: list[Claim]) -> tuple[str, list[str]]:
    """The rows as Markdown, and the ids of those that no test claims."""
    lines, missing = ["| id | behaviour | eager | compiled |", "|---|---|---|---|"], []
    for row, title in rows.items():
        tests = [claim for claim in found if row in claim.rows]
        if not tests:
            missing.append(row)
        eager = "<br>".join(claim.test for claim in tests)
        compiled = "<br>".join(claim.test for claim in tests if claim.is_compiled)
        lines.append(f"| {row} | {title} | {eager} | {compiled} |")
    return "\n".join(lines), missing


def main(argv: list[str] | None = None) -> int:
    """Write or check docs/features.md; 1 if a row has no test, or the file is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    found = list(claims(ROOT / "tests"))
    features, missing = table(FEATURES, found)
    traps, untested = table(TRAPS, found)
    text = f"# Features and traps, and the tests that prove them\n\n{features}\n\n{traps}\n"
    target = ROOT / "docs" / "features.md"
    stale = not target.exists() or target.read_text() != text
    if stale and not arguments.check:
        target.write_text(text)
    for row in (*missing, *untested):
        print(f"no test claims {row}", file=sys.stderr)
    return int(bool(missing or untested or (stale and arguments.check)))


if __name__ == "__main__":
    sys.exit(main())
