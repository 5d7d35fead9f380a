"""Steps on a link that is emulated, beside what no step can beat: who overlaps, and how well.

    python benchmarks/overlap.py                    # a CPU, or the GPU if there is one
    python benchmarks/overlap.py --trace FOLDER     # a profile of each, and predicted timelines
    python benchmarks/overlap.py --regimes 1        # one link alone
    python benchmarks/overlap.py --check            # steps are an unsharded model's, bit for bit

One process: rank 0 of an imagined world (`emulated_link`), so that everybody's collectives take as
long as the link says, and computation has the device to itself. Ops are timed, and their sum is
made to be what the unsharded, compiled model takes. Then the link is set three times, so that the
collectives of a step alone take a half of its computation, as much, and twice as much. A step is
forward and backward; contestants take one in turn; times are medians over the rounds.

On a CPU there is one thread that computes, and FSDP2 has no streams there: it waits for each
reduction where it begins it. Only a GPU says something about it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emulated_link
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoshard
from autoshard import _torch
from autoshard.passes.ir.layout import first_row
from autoshard.passes.ir.plan import Plan
from autoshard.passes.planner.topology import KINDS, Topology
from autoshard.tools.bench.calibrate import calibrate
from autoshard.tools.bench.contestants import (
    CONTESTANTS,
    Contestant,
    Setting,
    autoshard_compiled,
    autoshard_eager,
)
from autoshard.tools.bench.step import reason
from autoshard.tools.bench.workloads import SIZES, Workload, read_workloads
from autoshard.tools.device import current_device, synchronize

ALONE, OURS = "unsharded, compiled", "autoshard, compiled"
RIVALS = ("FSDP2", "FSDP2, blocks compiled", "SimpleFSDP scheme")
REGIMES = (0.5, 1.0, 2.0)  # collectives alone, of computation alone
FREE_GB_PER_S = 1e6
CALIBRATED = (2**12, 2**18, 2**22)  # bytes of collectives: only what they take is wanted
WARM_UP = 3
_BEGAN = time.monotonic()


@dataclass(frozen=True)
class Link:
    """Link to emulate: a latency, and a bandwidth in 1e9 bytes a second.

    name: for people, and for files.
    """

    name: str
    latency_us: float
    gb_per_s: float

    def alpha_and_slope(self, kind: str, world: int) -> tuple[float, float]:
        """Microseconds that a collective takes to start, and more for each unsharded byte.

        kind: "gather", "reduce" or "all_reduce".
        """
        sent = (world - 1) / world * (2 if kind == "all_reduce" else 1)
        return self.latency_us, sent / (1e3 * self.gb_per_s)

    def plan_ms(self, plan: Plan, world: int) -> float:
        """Milliseconds of all collectives of a plan, one after another."""
        total = 0.0
        for bucket in plan.buckets:
            alpha_us, us_per_byte = self.alpha_and_slope(bucket.kind, world)
            total += alpha_us + us_per_byte * bucket.num_bytes
        return total / 1e3


@dataclass(frozen=True)
class Bench:
    """Conditions that all contestants share: a model, its batch, the ranks, and the rounds."""

    work: Workload
    setting: Setting
    world: int
    rounds: int

    @functools.cached_property
    def batch(self) -> dict[str, Tensor]:
        batch = self.work.batch(0)
        return {key: value.to(self.setting.device) for key, value in batch.items()}

    def build(self, contestant: Contestant, **options: Any) -> Any:
        """Build a model as `contestant` has it, and compile it by a first step; return it.

        options: of autoshard's backend, besides those of the setting.
        """
        torch.manual_seed(0)
        setting = dataclasses.replace(self.setting, options={**self.setting.options, **options})
        model = contestant(self.work.build().to(setting.device), setting)
        self.step(model)
        return model

    def step(self, model: Any) -> None:
        """Run forward and backward on the one batch, and empty the gradients."""
        model(**self.batch).loss.backward()
        model.zero_grad()

    def measure(self, models: Mapping[str, Any]) -> dict[str, list[float]]:
        """Return milliseconds of each model's steps, one a round, by name; models take turns.

        `WARM_UP` more rounds come before.
        """
        times: dict[str, list[float]] = {name: [] for name in models}
        for number in range(self.rounds + WARM_UP):
            for name, model in models.items():
                synchronize()
                started = time.perf_counter()
                self.step(model)
                synchronize()
                if number >= WARM_UP:
                    times[name].append(1e3 * (time.perf_counter() - started))
        return times


def unsharded(model: Any, setting: Setting) -> Any:
    """Compile the model, in the dtype of gathers and without sharding: computation alone."""
    return torch.compile(model.to(setting.dtype))


def on_link(topology: Topology, link: Link, world: int) -> Topology:
    """Return `topology`, calibrated on a link without any costs, with `link` in place of it.

    Its contention is that of as many bytes, over more time.
    """
    measured = {f"{kind} {world}": link.alpha_and_slope(kind, world) for kind in KINDS}
    # What collectives take from computation is by the byte: over a slower link, less at a time.
    taken = (1 - 1 / topology.contention) * topology.measured[f"gather {world}"][1]
    share = min(taken / measured[f"gather {world}"][1], 0.9)
    return dataclasses.replace(topology, measured=measured, contention=1 / (1 - share))


def scaled(topology: Topology, factor: float) -> Topology:
    """Return `topology` with all computation taking `factor` times as long."""
    return dataclasses.replace(
        topology,
        ops={key: factor * time_us for key, time_us in topology.ops.items()},
        op_us=factor * topology.op_us,
        efficiency=topology.efficiency / factor,
        memory_gb_per_s=topology.memory_gb_per_s / factor,
    )


def compute_ms(plans: Sequence[Plan]) -> float:
    """Milliseconds of the ops of plans that were made for a link without any costs."""
    return sum(plan.lower_bound_us for plan in plans) / 1e3


def report(bench: Bench, link: Link, times: Mapping[str, list[float]], model: Any) -> str:
    """Format a link's measurements: its figures, a line a contestant, and what was predicted.

    times: milliseconds by contestant, with `ALONE` and `OURS` among them.
    model: autoshard's, compiled for `link`.
    """
    plans = autoshard.plans(model)
    alone_ms = statistics.median(times[ALONE])
    link_ms = sum(link.plan_ms(plan, bench.world) for plan in plans)
    bound_ms = sum(plan.lower_bound_us for plan in plans) / 1e3
    parts = " + ".join(
        f"{plan.graph} {plan.lower_bound_us / 1e3:.1f} ({plan.binding})" for plan in plans
    )
    lines = [
        f"{link.name}: {link.latency_us:.0f} us, {link.gb_per_s:.3g} GB/s; our collectives alone "
        f"{link_ms:.1f} ms, {link_ms / alone_ms:.2f} of computation",
        f"  lower bound {bound_ms:.1f} ms: {parts}; "
        f"max(computation, collectives) {max(alone_ms, link_ms):.1f} ms",
    ]
    for name, each in times.items():
        median = statistics.median(each)
        lines.append(
            f"  {name:24} {median:8.1f} ms ({min(each):.1f} to {max(each):.1f}) "
            f"{median / bound_ms:6.3f} of the bound, {median / alone_ms:.3f} of computation"
        )
    predicted_ms = sum(plan.makespan_us for plan in plans) / 1e3
    ours_ms = statistics.median(times[OURS])
    lines.append(
        f"  predicted {predicted_ms:.1f} ms, {predicted_ms / ours_ms:.2f} of measured, "
        f"{predicted_ms / bound_ms:.3f} of the bound; "
        + "; ".join(f"{len(plan.buckets)} buckets in {plan.graph}" for plan in plans)
    )
    return "\n".join(lines)


def trace(bench: Bench, link: Link, models: Mapping[str, Any], folder: Path) -> None:
    """Profile a step of each contestant, and write it to `folder`, for Perfetto.

    For autoshard, each plan's timeline is written, too, beside a profile of its graph.
    """
    for name, model in models.items():
        stem = re.sub(r"\W+", "-", f"{link.name} {name}")
        with torch.profiler.profile() as profile:
            bench.step(model)
            synchronize()
        _export(profile, folder / f"{stem}.json")
        if name == OURS:
            _trace_plans(bench, model, folder / stem)


def _trace_plans(bench: Bench, model: Any, stem: Path) -> None:
    """Write each plan's predicted timeline beside a profile of its graph, a file a graph.

    stem: beginning of the files' paths. The model runs a step.
    """
    profiled = {}
    with torch.profiler.profile() as profiled["forward"]:
        loss = model(**bench.batch).loss
        synchronize()
    with torch.profiler.profile() as profiled["backward"]:
        loss.backward()
        synchronize()
    model.zero_grad()
    for number, plan in enumerate(autoshard.plans(model)):
        path = Path(f"{stem}-{number}-{plan.graph}.json")
        _export(profiled[plan.graph], path)
        plan.to_chrome_trace(path, profile=path)


def _export(profile: Any, path: Path) -> None:
    """Write a profile to `path` as a trace, in which the link has a lane of its own.

    On a GPU that is the link's stream. On a CPU, collectives are events of the thread that launches
    them, from then on: they are moved to a lane, and begin there when the link is free.
    """
    profile.export_chrome_trace(str(path))
    if torch.cuda.is_available():
        return
    data = json.loads(path.read_text())
    collectives = [e for e in data["traceEvents"] if e.get("name", "").startswith("link:")]
    free = -math.inf
    for event in sorted(collectives, key=lambda event: float(event["ts"])):
        begin, end = max(event["ts"], free), event["ts"] + event["dur"]
        event.update(tid="link", ts=begin, dur=end - begin)
        free = end
    path.write_text(json.dumps(data))


def check(bench: Bench, steps: int = 3) -> str:
    """Check that eager and compiled steps equal those of an unsharded model, bit for bit.

    The latter's parameters are what the imagined ranks make of one rank's shards: these, over and
    over. So this rank's rows of its gradients are those of the sharded model: compiled, with the
    plain lowering, if it is compiled by `aot_eager`, which orders a backward's sums as any graph
    does.
    Returns a line that says so. Raises AssertionError, with the parameter, where they differ.
    """
    parts = []
    for form, contestant, backend in _FORMS:
        torch._dynamo.reset()
        setting = dataclasses.replace(bench.setting, options={"lowering": "eager"})
        sharded = contestant(bench.work.build().to(setting.device), setting)
        whole = bench.work.build().to(setting.device)
        call = torch.compile(whole, backend=backend) if backend else whole
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
        for step in range(steps):
            _repeat_shards(sharded, whole)
            losses = [model(**bench.batch).loss for model in (sharded, call)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses), f"{form}, step {step}: losses differ"
            _compare_gradients(sharded, whole, f"{form}, step {step}")
            optimizer.step()
            sharded.zero_grad()
            whole.zero_grad()
        parts.append(f"{form} = unsharded")
    return f"{'; '.join(parts)}; bit for bit, {steps} steps"


_FORMS: tuple[tuple[str, Contestant, str | None], ...] = (
    ("eager", autoshard_eager, None),
    ("compiled", autoshard_compiled, "aot_eager"),
)


def _repeat_shards(sharded: Any, whole: Any) -> None:
    """Fill the parameters of `whole` with this rank's shards of `sharded`, over and over."""
    with torch.no_grad():
        for ours, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
            shard = ours.to_local()
            ranks = -(-len(theirs) // len(shard))
            theirs.copy_(torch.cat([shard] * ranks)[: len(theirs)])


def _compare_gradients(sharded: Any, whole: Any, where: str) -> None:
    """Raise AssertionError if a gradient of `sharded` is not the matching rows of `whole`'s.

    where: beginning of the message.
    """
    named = zip(whole.named_parameters(), sharded.parameters(), strict=True)
    for (name, theirs), ours in named:
        grad = ours.grad.to_local()
        first = first_row(len(theirs), dist.get_world_size(), dist.get_rank())
        rows = theirs.grad[first : first + len(grad)]
        assert torch.equal(grad, rows), f"{where}: {name} differs"


def _tell(what: str) -> None:
    """Print what is done now, and how long this process has run, to standard error."""
    print(f"{time.monotonic() - _BEGAN:5.0f} s: {what}", file=sys.stderr, flush=True)


def run(
    bench: Bench,
    rivals: Sequence[str],
    regimes: Sequence[float],
    latency_us: float,
    folder: Path,
    trace_folder: Path | None,
) -> None:
    """Calibrate, then measure all contestants on a free link and on others; print reports.

    rivals: some of `RIVALS`.
    regimes: for each link, what collectives alone take, of computation alone.
    latency_us: of the links; their bandwidths follow from what computation takes.
    folder: for topologies. trace_folder: for profiles; None for none.
    """
    contestants = {ALONE: unsharded, **{name: CONTESTANTS[name] for name in rivals}}
    models = {}
    for name, each in contestants.items():
        _tell(f"building {name}")
        try:
            models[name] = bench.build(each)
        except _torch.dynamo.BackendCompilerFailed as error:
            print(f"{name} is left out, as this torch can't compile it: {reason(error)}")
    _tell("timing ops and collectives")
    plain = bench.work.build().to(bench.setting.device, bench.setting.dtype)
    known = calibrate(
        folder / "calibrated.json", sizes=CALIBRATED, steps=[functools.partial(bench.step, plain)]
    )

    def measured(link: Link, topology: Topology) -> tuple[list[Plan], dict[str, list[float]]]:
        """Compile ours for `link`, measure all on it, and print; return our plans, and times in ms.

        The emulated link is then free again. topology: what is calibrated, without the link.
        """
        path = folder / f"{link.name}.json"
        path.write_text(on_link(topology, link, bench.world).to_json())
        _tell(f"building {OURS}, for {link.name}")
        model = bench.build(autoshard_compiled, topology=str(path))
        emulated_link.set_link(latency_us=link.latency_us, gb_per_s=link.gb_per_s)
        entries = {**models, OURS: model}
        times = bench.measure(entries)
        print(report(bench, link, times, model), flush=True)
        if trace_folder is not None:
            trace(bench, link, entries, trace_folder)
        emulated_link.set_link(latency_us=0, gb_per_s=FREE_GB_PER_S)
        return autoshard.plans(model), times

    plans, times = measured(Link("free", 0.0, FREE_GB_PER_S), known)
    alone_us = 1e3 * statistics.median(times[ALONE])
    factor = alone_us / 1e3 / compute_ms(plans)
    print(f"ops, timed one by one, add up to {1 / factor:.2f} of computation: made equal")
    num_bytes = sum(bucket.num_bytes for plan in plans for bucket in plan.buckets)
    sent = num_bytes * (bench.world - 1) / bench.world
    for regime in regimes:
        link = Link(f"link-{regime}", latency_us, sent / (regime * alone_us) / 1e3)
        measured(link, scaled(known, factor))


def main() -> None:
    """Print the reports of all links, or with `--check` whether steps are bit for bit equal."""
    device = current_device()
    is_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="small", help="one of autoshard bench step")
    parser.add_argument("--batch", type=int, help="samples; else as autoshard bench step has it")
    parser.add_argument("--layers", type=int, help="blocks; else as autoshard bench step has it")
    parser.add_argument("--rivals", nargs="*", default=RIVALS, choices=RIVALS)
    parser.add_argument(
        "--regimes",
        type=float,
        nargs="+",
        default=REGIMES,
        help="links: collectives alone, of computation alone",
    )
    parser.add_argument("--dtype", default="bfloat16" if is_gpu else "float32")
    parser.add_argument("--world", type=int, default=8, help="ranks, of whom one is there")
    parser.add_argument("--latency-us", type=float, default=20.0 if is_gpu else 200.0)
    parser.add_argument(
        "--memory-budget", type=int, help="bytes; else what one bucket a unit needs"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--link-priority", choices=["high", "normal"], default="high", help="of its stream on a GPU"
    )
    parser.add_argument("--trace", type=Path, metavar="FOLDER")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not is_gpu:
        torch.set_num_threads(1)
    sizes = SIZES[device.type]
    for key, value in (("batch", arguments.batch), ("layers", arguments.layers)):
        if value is not None:
            sizes[arguments.model] = dataclasses.replace(sizes[arguments.model], **{key: value})
    work = read_workloads([arguments.model], device.type)[arguments.model]
    dtype = getattr(torch, arguments.dtype)
    budget = {"memory_budget": arguments.memory_budget} if arguments.memory_budget else {}
    setting = Setting(device, work.blocks, dtype, budget)
    in_float32 = dataclasses.replace(setting, dtype=torch.float32)
    bench = Bench(work, setting, arguments.world, arguments.rounds)
    emulated_link.start(
        arguments.world,
        latency_us=0,
        gb_per_s=FREE_GB_PER_S,
        has_priority=arguments.link_priority == "high",
    )
    name = torch.cuda.get_device_name(device) if is_gpu else "one thread of a CPU"
    print(f"torch {torch.__version__}, {name}, {vars(arguments)}")
    with torch._dynamo.config.patch(recompile_limit=64), tempfile.TemporaryDirectory() as folder:
        if arguments.check:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
            emulated_link.set_link(latency_us=1e3, gb_per_s=1.0)
            with sdpa_kernel(SDPBackend.MATH):  # others' backwards add up in any order
                print(check(dataclasses.replace(bench, setting=in_float32)))
        else:
            if arguments.trace is not None:
                arguments.trace.mkdir(parents=True, exist_ok=True)
            run(
                bench,
                arguments.rivals,
                arguments.regimes,
                arguments.latency_us,
                Path(folder),
                arguments.trace,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
