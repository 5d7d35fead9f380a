"""Write docs/features.md from the tests: each behaviour, with the tests that say they prove it.

    python -m autoshard.tools.features          # write docs/features.md
    python -m autoshard.tools.features --check  # fail if it would change, or a row has no test

A test claims rows by their ids in its docstring ("A7, D-14 to D-16"), or in its name
(`test_a37_...`). Whether it runs eagerly, compiled or both is read from its code: see `forms_of`.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from autoshard.tools import fsdp2

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
    "A10": "the host is kept from running ahead with gathers, where memory depends on it",
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
    "A53": "HSDP's table of measurements, on 32 GPUs of others: predicted",
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
TRAPS: dict[str, str] = {
    "D-1": "shard groups of one rank: replicas are summed all the same",
    "D-2": "tied parameters have one owner",
    "D-3": "rows that ranks can't share evenly; empty shards",
    "D-4": "optimizers built before sharding",
    "D-5": "writes to gathered parameters are not lost in silence",
    "D-6": "what a parameter is, whenever it is read outside of forward",
    "D-7": "casts, moves and assigned state dicts after sharding",
    "D-8": "a state dict that is kept shares memory with the shards",
    "D-9": "state dicts saved while parameters are gathered",
    "D-10": "copies of a sharded module are refused",
    "D-11": "a module of two parents is wrapped once",
    "D-12": "wrap contexts end with their block",
    "D-13": "units share no dict of overrides",
    "D-14": "several outputs, several calls: one gather in backward",
    "D-15": "backward ends where no input or output needs a gradient",
    "D-16": "units used several times in one forward",
    "D-17": "several backwards before one step",
    "D-18": "buffers live until their collective is waited for",
    "D-19": "checkpoints repeat forward, and none of its bookkeeping",
    "D-20": "reentrant checkpoints, inside units and around them",
    "D-21": "nested units, checkpointed, called twice",
    "D-22": "casts are repeated where forward is",
    "D-23": "gradients of gradients are refused",
    "D-24": "version counters: ours stay quiet, the user's writes are found",
    "D-25": "writes to views that units return",
    "D-26": "outputs in containers of any kind",
    "D-27": "inputs are handed on, not rebuilt",
    "D-28": "parameters read outside of their unit's forward",
    "D-29": "exceptions in the middle of a step",
    "D-30": "a child called before the root",
    "D-31": "sums of half precision: divided before and after",
    "D-32": "means over groups of one rank",
    "D-33": "divide factors that the backend has no operation for",
    "D-34": "zero_grad() while gradients wait",
    "D-35": "the dtype in which gradients add up",
    "D-36": "gradients that wait: what they weigh, and offload beside them",
    "D-37": "ranks that use different parameters",
    "D-38": "units frozen in part, in whole, or for a while",
    "D-39": "an optimizer in backward finds its gradient complete",
    "D-40": "norms over shards count each parameter once",
    "D-41": "an inf on one rank skips the step on all",
    "D-42": "no gradient is not a gradient of zero",
    "D-43": "prefetch, ZeRO-2 and eval in turns",
    "D-44": "what was gathered ahead in vain",
    "D-45": "ranks that differ in order",
    "D-46": "gathers see the optimizer's whole update",
    "D-47": "backward ends when its reduces have",
    "D-48": "what a root keeps does not outlive a load",
    "D-49": "two models on two meshes in one process",
    "D-50": "buffers go by the model's names",
    "D-51": "buffers of ignored modules are not cast",
    "D-52": "buffers fresh from meta are synchronised over both axes",
    "D-53": "BatchNorm beside low precision",
    "D-54": "running statistics are each rank's own",
    "D-55": "meta parameters are all filled, ties kept",
    "D-56": "the switch for full precision in eval",
    "D-57": "which inputs are cast, and where",
    "D-58": "several dtypes in one unit",
    "D-59": "graph breaks between blocks",
    "D-60": "collectives of compiled code, counted without dispatch modes",
    "D-61": "only like collectives share a bucket",
    "D-62": "passes leave no cycles",
    "D-63": "buckets are made before order is fixed",
    "D-64": "gathers of parameters are marked, not guessed",
    "D-65": "a bucket stands where it is first used",
    "D-66": "one gather a parameter and graph",
    "D-67": "nothing gathered is saved for backward",
    "D-68": "hooks on what a checkpoint returns",
    "D-69": "ranks agree on their plans",
    "D-70": "graphs write to no parameter",
    "D-71": "a launch and its wait are in one graph",
    "D-72": "passes under another's fake mode",
    "D-73": "collectives are counted where they are launched",
    "D-74": "dropout in checkpoints, compiled",
    "D-75": "one wait a launch",
    "D-76": "limits of none, of zero, and beyond what there is",
    "D-77": "freezing and unfreezing after compilation",
    "D-78": "no rank drops a collective by itself",
}

HEAD = """\
# Features and traps, and the tests that prove them

Written by `python -m autoshard.tools.features` from what tests say that they prove. A: what FSDP1,
its wrap policies and `replicate` do. D: what has gone wrong in their history.

{features}

{traps}

# FSDP2, and what we do

Its behaviours in torch 2.11 to 2.15, ours beside them, and a test of ours that shows it. "same" is
said of what a user sees.

{fsdp2}
"""

BOTH = {"form", "compile", "kind"}
"""Parameters of tests that run eagerly and compiled in turn."""
COMPILED = {"lowering", "route"}
"""Parameters of tests that run compiled only."""
SAMPLER = "autoshard.tools.parity.matrix"


@dataclass(frozen=True)
class Claim:
    """Test with the rows that it says it proves, and the forms it runs: "eager", "compiled"."""

    test: str
    rows: frozenset[str]
    forms: frozenset[str]


def claims(folder: Path) -> Iterator[Claim]:
    """Yield a claim for each test function of the modules `test_*.py` below `folder`, by path.

    Methods of classes are left out. A test that names no row has a claim without rows. The name in
    a claim is "unit/test_wrap.py::test_two_stacks".
    """
    for path in sorted(folder.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                rows = rows_in(ast.get_docstring(node) or "") | rows_in_name(node.name)
                name = f"{path.relative_to(folder).as_posix()}::{node.name}"
                yield Claim(name, rows, forms_of(node, module))


def forms_of(test: ast.FunctionDef, module: ast.Module) -> frozenset[str]:
    """Tell which of "eager" and "compiled" a test of `module` runs, from the source alone.

    The first of these that holds decides:

    - `module` imports passes, and is about graphs: compiled.
    - `module` imports the sampler, which trains in both forms: both.
    - The test has a parameter of `BOTH`, or a decorator of it the value "compiled": both.
    - It has a parameter of `COMPILED`, or "compile" or "compiled" is among the words in it and in
      what it uses of `module`: compiled, and eager too if "sharded" or "shard" is.
    - Else: eager.
    """
    if any(map(_imports_passes, module.body)):
        return frozenset({"compiled"})
    if any(isinstance(n, ast.ImportFrom) and n.module == SAMPLER for n in module.body):
        return frozenset({"eager", "compiled"})
    parameters = _parameters(test)
    values = {
        node.value
        for decorator in test.decorator_list
        for node in ast.walk(decorator)
        if isinstance(node, ast.Constant)
    }
    if parameters & BOTH or "compiled" in values:
        return frozenset({"eager", "compiled"})
    words = _words(test, module)
    if not (parameters & COMPILED or words & {"compile", "compiled"}):
        return frozenset({"eager"})
    is_both = words & {"sharded", "shard"}
    return frozenset({"eager", "compiled"} if is_both else {"compiled"})


def _imports_passes(node: ast.stmt) -> bool:
    """Tell whether `node` is a `from` import of passes, and not only of `layout`."""
    if not isinstance(node, ast.ImportFrom):
        return False
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return any(
        name.startswith("autoshard.passes") and not name.startswith("autoshard.passes.ir.layout")
        for name in names
    )


def _is_told_the_form(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Tell whether `node` runs the form that its caller passes, rather than one of its own."""
    return isinstance(node, ast.FunctionDef) and bool(_parameters(node) & BOTH)


def _parameters(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def _words(test: ast.FunctionDef, module: ast.Module) -> set[str]:
    """Identifiers, and words in strings, in `test` and, transitively, in what it uses of `module`.

    Docstrings don't count, nor do functions that run the form that their caller passes: those with
    a parameter of `BOTH`.
    """
    known = {
        node.name: node
        for node in module.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not _is_told_the_form(node)
    }
    words: set[str] = set()
    waiting: list[ast.FunctionDef | ast.ClassDef] = [test]
    while waiting:
        body = waiting.pop()
        documented = {id(each.value) for each in ast.walk(body) if isinstance(each, ast.Expr)}
        for node in ast.walk(body):
            if isinstance(node, ast.Name):
                found = {node.id}
            elif isinstance(node, ast.Attribute):
                found = {node.attr}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found = set() if id(node) in documented else set(re.findall(r"\w+", node.value))
            else:
                continue
            waiting.extend(known.pop(word) for word in found & known.keys())
            words |= found
    return words


def rows_in(text: str) -> frozenset[str]:
    """Ids of rows in a docstring, ranges ("A70 to A82") spelled out.

    >>> sorted(rows_in("A7, D-2 to D-4 and A.3.2"))
    ['A7', 'D-2', 'D-3', 'D-4']
    """
    found: set[str] = set()
    for match in re.finditer(r"\b(A|D-)(\d+)(?: to (?:A|D-)(\d+))?\b(?!\.\d)", text):
        first, last = int(match[2]), int(match[3] or match[2])
        found.update(f"{match[1]}{number}" for number in range(first, last + 1))
    return frozenset(found)


_BEFORE = (
    "A3 to A6, A15 to A17, A20 to A26, A29, A41, A50, A58, A61, A62, A66, A67, A71 to A76, A79, "
    "A80, A82, D-4, D-10 to D-13, D-52, D-55"
)
_PLANNED = "A9 to A12, A19, A60, D-44"
_TORCH = "eager only: AOTAutograd, beneath every backend of torch.compile, "


NOT_COMPILED: dict[str, str] = {
    **dict.fromkeys(rows_in(_BEFORE), "done before the first forward, the same for both"),
    **dict.fromkeys(rows_in(_PLANNED), "eager only: in a graph the plan says what runs when"),
    "A53": "a prediction: no step is run",
    "D-8": "no step is involved",
    "D-23": _TORCH + "refuses create_graph=True with an error of its own",
    "D-24": _TORCH + "copies what forward writes to",
    "D-28": "eager only: what is read outside of forward is in no graph",
    "D-29": "eager only: a graph runs to its end, or not at all",
}
"""Why no test shows a row compiled."""


def rows_in_name(name: str) -> frozenset[str]:
    """Ids of rows in a test's name.

    >>> sorted(rows_in_name("test_a37_and_d12_counts"))
    ['A37', 'D-12']
    """
    found = re.findall(r"_([ad])(\d+)(?=_)", name)
    return frozenset(f"A{number}" if kind == "a" else f"D-{number}" for kind, number in found)


def table(rows: dict[str, str], found: list[Claim]) -> str:
    """Format a Markdown table of rows, and of the tests that claim each, by form.

    A row without a compiled test has the reason of `NOT_COMPILED` there, if it has one.
    rows: titles by id.
    found: claims of all tests.
    """
    lines = ["| id | behaviour | eager | compiled |", "|---|---|---|---|"]
    for row, title in rows.items():
        eager, compiled = (
            "<br>".join(each.test for each in found if row in each.rows and form in each.forms)
            for form in ("eager", "compiled")
        )
        compiled = compiled or NOT_COMPILED.get(row, "")
        lines.append(f"| {row} | {title} | {eager} | {compiled} |")
    return "\n".join(lines)


def fsdp2_table() -> str:
    """Format the rows of `fsdp2.py` as a Markdown table, below the names of their sections."""
    lines = ["| FSDP2 | ours | shown by |", "|---|---|---|"]
    for section, rows in fsdp2.SECTIONS.items():
        lines.append(f"| **{section}** | | |")
        for theirs, ours, tests in rows:
            shown = "<br>".join(map(_full_name, tests.split()))
            lines.append(f"| {theirs} | {ours} | {shown} |")
    return "\n".join(lines)


def fsdp2_problems(known: Collection[str]) -> list[str]:
    """List what is wrong in the rows of `fsdp2.py`, a message each; empty if nothing is.

    That is a test's name which no test has, and a row that is offered but names no test.
    known: the names of all tests.
    """
    rows = [row for rows in fsdp2.SECTIONS.values() for row in rows]
    named = [(theirs, _full_name(test)) for theirs, _, tests in rows for test in tests.split()]
    return [
        *(
            f"{theirs!r} names {test}, which is no test"
            for theirs, test in named
            if test not in known
        ),
        *(
            f"no test shows {theirs!r}"
            for theirs, ours, tests in rows
            if not tests and not ours.startswith("not offered")
        ),
    ]


def _full_name(test: str) -> str:
    """Complete a test's name to the one that `claims` gives it.

    >>> _full_name("unit/test_wrap::test_two_stacks")
    'unit/test_wrap.py::test_two_stacks'
    """
    path, name = test.split("::")
    return f"{path}.py::{name}"


def problems(rows: Collection[str], found: list[Claim]) -> list[str]:
    """List what is wrong in `found`, a message each; empty if nothing is.

    That is a row that no test claims; a row claimed by tests of which none is compiled, if
    `NOT_COMPILED` has no reason; and a claim of a row that there is not.
    rows: ids of all rows.
    """
    claimed = {row: claim.test for claim in found for row in claim.rows}
    compiled = {row for claim in found if "compiled" in claim.forms for row in claim.rows}
    unknown = sorted({*claimed} - {*rows})
    return [
        *(f"no test claims {row}" for row in rows if row not in claimed),
        *(
            f"no test shows {row} compiled, and NOT_COMPILED has no reason"
            for row in rows
            if row in claimed and row not in compiled and row not in NOT_COMPILED
        ),
        *(f"{claimed[row]} claims {row}, which is no row" for row in unknown),
    ]


def main(argv: list[str] | None = None) -> int:
    """Write or check docs/features.md; return the exit status, 1 if there are problems.

    The file is written if it would change. Problems are printed to standard error: those of
    `problems` and `fsdp2_problems`, with which the file is written all the same; and, with
    `--check`, which writes nothing, a stale file.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args(argv)
    found = list(claims(ROOT / "tests"))
    text = HEAD.format(
        features=table(FEATURES, found), traps=table(TRAPS, found), fsdp2=fsdp2_table()
    )
    target = ROOT / "docs" / "features.md"
    wrong = problems((*FEATURES, *TRAPS), found)
    wrong += fsdp2_problems({claim.test for claim in found})
    if not target.exists() or target.read_text() != text:
        if arguments.check:
            wrong.append("docs/features.md is stale: run python -m autoshard.tools.features")
        else:
            target.write_text(text)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
