"""Command `autoshard opt`: passes run over a graph's text, and the text that comes out.

A file is comments, the graph below them, and, in a golden file, an arrow and what came out, which
is not read:

    # params: layers.0.weight layers.0.bias
    in %primals_1: f32[4,8]
    ...
    return [%y]
    # -> name_params
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.tools.arguments import add_command

if TYPE_CHECKING:
    from torch import fx

    from autoshard.passes import ParamInfo, Pass

EXAMPLE = """\
examples, on a file of golden/, and on a graph that another command prints:

  autoshard opt hoist_shards golden/hoist_shards/packed.txt
  autoshard opt name_params,plan_buckets,insert_collectives - < graph.txt
  autoshard opt pipeline graph.txt --ranks shard=8,replicate=2

Passes run in the order given. `joint` stands for all those over the joint graph, and `pipeline` for
all those after it is partitioned.
"""
OTHERWISE = 2  # ranks of a group of which nothing is said


def add_parser(commands: Any) -> None:
    """Add the command `autoshard opt`, with its options, to `commands`.

    What is parsed has two attributes more: `run`, which runs the command, and `parser`.
    """
    parser = add_command(
        commands,
        "opt",
        EXAMPLE,
        help="run passes on a graph's text",
        description="Read a graph as text, run passes over it, each of which is verified, and "
        "print what comes out.",
    )
    parser.add_argument("passes", metavar="PASS[,PASS...]", help="names of passes, in order")
    parser.add_argument("file", metavar="FILE", help="the graph's file, or - for standard input")
    parser.add_argument(
        "--ranks", default="", metavar="GROUP=N,...", help="ranks in the groups named (2 in each)"
    )
    parser.add_argument(
        "--keep", default="", metavar="N,...", help="numbers of the parameters of keep_gathered"
    )
    parser.add_argument("--bucketing", default="per_unit", choices=["per_unit", "none"])
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run `autoshard opt`: print the graph after the passes, then tags and its plan as comments.

    There is a plan only if a pass has made one. Process groups need not exist: they have the ranks
    that `--ranks` says, or 2.
    Returns the exit status: 1 if a pass leaves the graph broken or raises ValueError, with the
    error on standard error; other errors of a pass are passed on. An unknown pass, or what can't be
    read, ends the process with status 2.
    arguments: the command line; not used.
    """
    from autoshard import passes
    from autoshard.passes.ir import groups
    from autoshard.passes.ir.meta import PLAN
    from autoshard.passes.ir.text import render

    try:
        text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text()
        head, gm = read(text)
        known = every_pass(
            table_of(head, gm),
            graph=graph_kind(gm),
            bucketing=options.bucketing,
            kept=_numbers(options.keep),
            saved=saved_of(head),
            moved=saved_of(head, "moved") or (),
        )
        chosen = choose(options.passes.split(","), known)
        sizes = _sizes(options.ranks)
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    try:
        with groups.pretended(sizes, OTHERWISE):
            after = passes.run(gm, chosen)
    except (passes.PassError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    plan = PLAN.get(after)
    print(render(after.graph) + show_tags(after), end="")
    if plan is not None:
        print("".join(f"# {line}\n" for line in plan.text().splitlines()), end="")
    return 0


def read(text: str) -> tuple[str, fx.GraphModule]:
    """Split a text into the comments on top, and the graph below them, which is parsed.

    An arrow, "# -> ", ends the graph: what follows is not read.
    Raises ValueError for what is no graph.
    """
    from torch import fx, nn

    from autoshard.passes.ir.text import parse

    before = text.partition("# -> ")[0]
    body = re.sub(r"\A(#.*\n)*", "", before)
    return before.removesuffix(body), fx.GraphModule(nn.Module(), parse(body))


def table_of(head: str, gm: fx.GraphModule) -> list[ParamInfo]:
    """List a `ParamInfo` for each of the graph's parameters, in the order of their numbers.

    Parameters count as sharded, each in a unit named after its module, or "root". Their names are
    those of a line `# params: <name> ...` in `head`, the comments on top of the graph, whether or
    not the graph has as many; without that line, those that stand as comments beside the graph's
    markers, or "".
    """
    from autoshard.passes.ir.match import is_gradient, is_marker, param_of
    from autoshard.passes.ir.meta import SOURCE

    listed = re.search(r"^# params: (.*)$", head, re.MULTILINE)
    if listed:
        return [_info(name) for name in listed[1].split()]
    markers = [node for node in gm.graph.nodes if is_marker(node) or is_gradient(node)]
    names = {param_of(marker): SOURCE.get(marker) for marker in markers}
    return [_info(names[number] or "") for number in sorted(names)]


def saved_of(head: str, key: str = "saved") -> list[str] | None:
    """List the nodes in a line `# saved: mm:0 ...` on top of a graph; None without that line.

    key: word that the line begins with: "saved", or "moved", for those saved on the host.
    """
    listed = re.search(rf"^# {key}: (.*)$", head, re.MULTILINE)
    return listed[1].split() if listed else None


def _info(name: str) -> ParamInfo:
    """Describe parameter `name` as sharded, in a unit named after its module, or "root"."""
    from autoshard.passes import ParamInfo

    return ParamInfo(name, name.rpartition(".")[0] or "root", "shard", "shard")


def graph_kind(gm: fx.GraphModule) -> str:
    """Return "backward" for a graph that has gradients to reduce, else "forward"."""
    from autoshard.passes.ir.match import is_reduce_grad

    return "backward" if any(map(is_reduce_grad, gm.graph.nodes)) else "forward"


def every_pass(
    table: Sequence[ParamInfo],
    *,
    graph: str,
    bucketing: str = "per_unit",
    kept: Collection[int] = (),
    saved: Collection[str] | None = None,
    moved: Collection[str] = (),
) -> dict[str, tuple[Pass, ...]]:
    """Map names to passes: each pass by its own name; "joint" and "pipeline" to all of theirs.

    A pass that both have is the one of "pipeline". No prices are known there: buckets are not
    searched for. Copies to the host are placed as on H100s.

    table, graph, bucketing: arguments of `passes.pipeline`.
    kept: numbers of the parameters that `keep_gathered` keeps.
    saved: the nodes that `tag_saved` has saved, or None.
    moved: those that `offload_saved` copies.
    """
    from autoshard import passes
    from autoshard.passes.pipeline import pass_name
    from autoshard.passes.planner.topology import Topology

    joint = passes.joint(kept, saved)
    parted = passes.parted(moved, passes.Prices(Topology.load("h100"), is_fused=False))
    pipeline = passes.pipeline(table, graph=graph, bucketing=bucketing)
    single = {pass_name(each): (each,) for each in (*joint, *parted, *pipeline)}
    return {**single, "joint": joint, "pipeline": pipeline}


def choose(names: Sequence[str], known: Mapping[str, tuple[Pass, ...]]) -> list[Pass]:
    """Look up passes by name, in order; a name may stand for several.

    Raises ValueError, with all names, for an unknown one.
    """
    for name in names:
        if name not in known:
            raise ValueError(f"no pass {name!r}; there are {', '.join(known)}")
    return [each for name in names for each in known[name]]


def show_tags(gm: fx.GraphModule) -> str:
    """Format what the graph tells the partitioner: a line of comment for each node with a tag."""
    tagged = [node for node in gm.graph.nodes if "recompute" in node.meta]
    return "".join(f"# recompute: {each.name} {each.meta['recompute'].name}\n" for each in tagged)


def _numbers(text: str) -> set[int]:
    """Read the numbers of `--keep`, "0,2"; raise ValueError for anything else."""
    try:
        return {int(each) for each in text.split(",") if each}
    except ValueError:
        raise ValueError(f"--keep {text!r}: expected numbers of parameters, as 0,2") from None


def _sizes(text: str) -> dict[str, int]:
    """Read ranks by group from `--ranks`, "shard=8,replicate=2"; none from "".

    Raises ValueError for anything else, and for a group of 0 ranks.
    """
    found = {}
    for each in filter(None, text.split(",")):
        name, _, size = each.partition("=")
        if not name or not size.isdecimal() or not int(size):
            raise ValueError(f"--ranks {text!r}: expected groups and their ranks, as shard=8")
        found[name] = int(size)
    return found
