"""What sharding adds to a step besides communication: nodes, ops, and bytes that are copied.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py [--ranks 8] [--layers 8] [--hidden 256]

One process, and a group of which no other rank exists, so nothing is timed. Every contestant's
forward and backward of a small Llama, less those of the unsharded model, which is compiled where
the contestant is. Nodes are those of the graphs that Inductor generates code from, without inputs
and views. Calls are of torch's operators, as a profile has them, one inside another counted too: by
that code, by kernels of collectives, and eagerly. Copied are bytes written by what only moves data,
casts it or divides it, in graphs where it is no part of a larger kernel: into buffers that are
sent, out of those that are received. What a backend copies inside of a collective is not seen.

FSDP2 with compiled blocks is left out: its blocks share one graph, which is run for each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch.profiler import ProfilerActivity, profile

from autoshard import _torch
from autoshard.passes.planner.costs import GROUPED, LAYOUTS, PACKED
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.fusion import is_pointwise
from autoshard.passes.plans.values import is_view, num_bytes_of, tensors_of
from autoshard.tools.bench.contestants import CONTESTANTS, Contestant, Setting, autoshard_compiled
from autoshard.tools.bench.workloads import Sizes, Workload, llama
from autoshard.tools.device import current_device

aten = torch.ops.aten
MOVES = {
    *(aten.clone, aten.copy, aten.copy_, aten.cat, aten.constant_pad_nd, aten.reshape),
    *(aten._to_copy, aten.slice_scatter, aten.split_with_sizes_copy),
    *(aten.div, torch.ops.prims.convert_element_type),
}
"""Ops of a graph that move data, or divide it. A reshape moves it where it can't be a view."""

MOVING_EVENTS = {
    *("aten::copy_", "aten::_foreach_copy_", "aten::cat", "aten::_chunk_cat"),
    *("aten::split_with_sizes_copy", "aten::div", "aten::_foreach_div", "aten::div_"),
}
"""Their names in a profile, and those of divisions. One inside another is not counted."""

ITEM_SIZES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "bool": 1}


@dataclass(frozen=True)
class Cost:
    """Costs of a step, as the module says; `copied`, and `gathers` as a part of it, are bytes.

    gathers: what is copied by gathers of autoshard.
    """

    nodes: int = 0
    calls: int = 0
    collectives: int = 0
    copied: int = 0
    gathers: int = 0

    def __sub__(self, other: Cost) -> Cost:
        mine, theirs = vars(self), vars(other)
        return Cost(**{name: mine[name] - theirs[name] for name in mine})


def measure(contestant: Contestant, work: Workload, setting: Setting) -> Cost:
    """Count nodes, calls, collectives and copied bytes of a contestant's forward and backward.

    The first of three steps compiles, and the last is profiled. Dynamo is reset before.
    Raises AssertionError if the dtype is not float32, or the number of compiled graphs neither 0
    nor 2.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = {key: value.to(setting.device) for key, value in work.batch(0).items()}
    assert setting.dtype == torch.float32  # profiles don't have the dtypes of lists
    with _lowered_graphs() as graphs, _torch.inductor.fresh_cache():
        model = contestant(work.build().to(setting.device), setting)
        model(**batch).loss.backward()
    assert len(graphs) in (0, 2), "each graph is run once a step: forward and backward"
    with _torch.inductor.fresh_cache():
        model(**batch).loss.backward()
        model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        model(**batch).loss.backward()
    nodes = [node for gm in graphs for node in gm.graph.nodes if _does_something(node)]
    run = _Run(_events(profiled))
    return Cost(
        nodes=len(nodes),
        calls=len(run.ops),
        collectives=run.count("c10d::"),
        copied=sum(map(_copied_in_graph, nodes)) + sum(run.copied(each) for each in run.ops),
        gathers=sum(run.copied(each) for each in run.ops if run.is_inside(each, "gather")),
    )


@contextmanager
def _lowered_graphs() -> Iterator[list[fx.GraphModule]]:
    """Yield a list that gets each graph that Inductor generates code from, after all passes."""
    found: list[fx.GraphModule] = []
    init = GraphLowering.__init__

    def noted(self: GraphLowering, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
        found.append(gm)
        init(self, gm, *args, **kwargs)

    with mock.patch.object(GraphLowering, "__init__", noted):
        yield found


def _does_something(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_view(node)


def _is_written(node: fx.Node) -> bool:
    """Tell whether an op that is not pointwise reads the result of `node`, or a view of it.

    The graph's output is such a node.
    """
    return any(
        _is_written(user) if is_view(user) else not is_pointwise(user) for user in node.users
    )


def _copied_in_graph(node: fx.Node) -> int:
    """Count bytes that `node`, if it only moves, casts or divides data, has to write to memory.

    It is 0 for other nodes, for one that becomes a part of a larger kernel, and for a reshape that
    is a view.
    """
    if getattr(node.target, "overloadpacket", None) not in MOVES or not _is_written(node):
        return 0
    given = tensors_of(node)
    read = {_storage(each) for source in node.all_input_nodes for each in tensors_of(source)}
    is_alias = node.target is aten.reshape.default and _storage(given[0]) in read
    return 0 if is_alias else sum(map(num_bytes_of, given))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


Event = Mapping[str, Any]
"""Of a trace in Chrome's format."""


def _events(profiled: profile) -> list[Event]:
    """Read ops and annotations from a profile, as events of a trace in Chrome's format."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("cpu_op", "user_annotation")
    return [each for each in events if each.get("ph") == "X" and each.get("cat") in kinds]


class _Run:
    """Events of a step, and which is inside which.

    ops: those of torch and of extensions, but for what is inside a collective, or inside an op that
        moves data.
    """

    def __init__(self, events: list[Event]) -> None:
        """Nest `events`, thread by thread, by when they begin and end, and list the `ops`."""
        self._around: dict[int, tuple[str, ...]] = {}
        self.ops: list[Event] = []
        open_ones: dict[object, list[Event]] = {}
        for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
            around = open_ones.setdefault(event["tid"], [])
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            names = tuple(str(each["name"]) for each in around)
            self._around[id(event)] = names
            around.append(event)
            if event["cat"] == "cpu_op" and not any(map(_is_whole, names)):
                self.ops.append(event)

    def is_inside(self, event: Event, name: str) -> bool:
        """Tell whether `event` is inside something of autoshard's with `name` in its name."""
        return any(
            each.startswith("autoshard::") and name in each for each in self._around[id(event)]
        )

    def count(self, prefix: str) -> int:
        return sum(str(each["name"]).startswith(prefix) for each in self.ops)

    def copied(self, event: Event) -> int:
        """Count bytes that `event` writes if it only moves, casts or divides data; else 0.

        Elements of a list count as float32. Raises KeyError for a dtype that is not in
        `ITEM_SIZES`.
        """
        name, args = event["name"], event["args"]
        if name not in MOVING_EVENTS:
            return 0
        sizes, types = args["Input Dims"], args["Input type"]
        if name in ("aten::copy_", "aten::div", "aten::div_", "aten::split_with_sizes_copy"):
            return _num_bytes(sizes[0], types[0])
        return sum(_num_bytes(size, "float") for size in sizes[0])  # a list has no types


def _is_whole(name: str) -> bool:
    return name in MOVING_EVENTS or name.startswith("c10d::")


def _num_bytes(size: list[int], kind: str) -> int:
    """Bytes of a tensor of these sizes; raises KeyError for a dtype not in `ITEM_SIZES`."""
    numel = 1
    for each in size:
        numel *= each
    return numel * ITEM_SIZES[kind]


class Case(NamedTuple):
    """Contestant, the name of what it is compared with, and layouts that gathers may have."""

    contestant: Contestant
    base: str
    layouts: tuple[str, ...] = LAYOUTS["gather"]


EAGER, COMPILED = "unsharded, eager", "unsharded, compiled"


def cases(folder: Path) -> dict[str, Case]:
    """List the contestants by name; those of autoshard are planned for H100s.

    folder: for a topology on which copies take so long that gathers are always grouped.
    """
    h100 = Topology.load("h100")
    slow = replace(h100, residuals=None, member_us=0.0, copy_gb_per_s=1)
    path = folder / "slow_copies.json"
    path.write_text(slow.to_json())
    return {
        EAGER: Case(lambda model, setting: model, EAGER),
        COMPILED: Case(CONTESTANTS[COMPILED], COMPILED),
        **{name: Case(CONTESTANTS[name], EAGER) for name in ("FSDP2", "autoshard, eager")},
        "SimpleFSDP scheme": Case(CONTESTANTS["SimpleFSDP scheme"], COMPILED),
        "autoshard, packed": Case(planned("h100"), COMPILED, (PACKED,)),
        "autoshard, grouped": Case(planned(str(path)), COMPILED, (GROUPED,)),
        "autoshard, auto": Case(planned("h100"), COMPILED),
    }


def planned(topology: str) -> Contestant:
    """Return a contestant: autoshard, compiled, planned for `topology`, a name or a file.

    Options of its setting are not used.
    """

    def compiled(model: Any, setting: Setting) -> Any:
        options = {"topology": topology, "bucketing": "auto"}
        return autoshard_compiled(model, replace(setting, options=options))

    return compiled


def main() -> None:
    """Print a line for each contestant: what its step costs beyond that of the unsharded model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    _torch.dist.pretend_ranks(options.ranks)
    work = llama(Sizes(options.hidden, options.layers, batch=4, length=128))
    setting = Setting(current_device(), work.blocks, torch.float32, {})
    whole = sum(param.numel() * param.itemsize for param in work.build().parameters()) / 1e6
    print(f"torch {torch.__version__}, {options}; {whole:.1f} MB of parameters")
    print(f"{'':26}{'nodes':>8}{'calls':>8}{'collectives':>14}{'copied MB':>12}{'by gathers':>12}")
    with tempfile.TemporaryDirectory() as folder:
        compare(cases(Path(folder)), work, setting)


def compare(contestants: Mapping[str, Case], work: Workload, setting: Setting) -> None:
    """Measure all contestants, and print a line each: what a step costs beyond that of its base."""
    found: dict[str, Cost] = {}
    for name, (contestant, base, layouts) in contestants.items():
        # Until the end of a step, as the backward is compiled where it is first run.
        with mock.patch.dict(LAYOUTS, {"gather": layouts}):
            found[name] = cost = measure(contestant, work, setting)
        if base != name:
            cost -= found[base]
        gathers = f"{cost.gathers / 1e6:.1f}" if name.startswith("autoshard") else "-"
        print(
            f"{name:26}{cost.nodes:8}{cost.calls:8}{cost.collectives:14}"
            f"{cost.copied / 1e6:12.1f}{gathers:>12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
