"""Traces as torch.profiler writes them on a GPU, of steps that are imagined, with a fault if asked.

    events = record(Run(layers=8, fault="late launch"), seed=3)
    Path("trace.json").write_text(as_json(events))

A host launches kernels on streams, one after another; a kernel begins when it is launched, its
stream is free, and what it waits for has ended. So what a fault does to all else is not written
down anywhere: it follows. Times vary by some percent, as they do on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

HOST, DEVICE, MAIN = 4242, 0, 7  # processes, and the stream that computes
NAMES = {
    "all_gather": ("_allgather_base", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)"),
    "reduce_scatter": ("_reduce_scatter_base", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)"),
    "all_reduce": ("allreduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"),
}
KERNELS = (
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute",
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluFunctor>(int)",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>(Params)",
)
COPY_OUT = "void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)"
COPY_IN = "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(float**, long*)"
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 1, 64>(char*)"

Event = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Sharded training to imagine, with times in microseconds.

    library: "FSDP2", "FSDP1" (one stream for all collectives, and no copies) or "DDP".
    us_per_mb, start_us: of a gather or a reduce on the link. layer_us: forward of a layer.
    fault: a reason as `autoshard explain` names it, or "".
    form: the form of the fault, of those that it has: 0 or 1.
    strength: how bad it is; 1 is usual.
    is_annotated: whether annotations name what kernels are launched for.
    """

    library: str = "FSDP2"
    layers: int = 12
    kernels: int = 20
    layer_mb: float = 100.0
    layer_us: float = 1600.0
    us_per_mb: float = 8.0
    start_us: float = 30.0
    steps: int = 2
    fault: str = ""
    form: int = 0
    strength: float = 1.0
    is_annotated: bool = True

    def link_us(self, megabytes: float) -> float:
        """Return what a collective takes."""
        return self.start_us + self.us_per_mb * megabytes


@dataclass
class Machine:
    """Host and streams of one rank, and the events of its trace so far.

    launch_us: what the host takes from one launch to the next. arrivals: when each collective of
    another rank begins, of which none of this one ends without.
    """

    rng: random.Random
    launch_us: float = 6.0
    is_annotated: bool = True
    arrivals: Sequence[float] = ()
    now: float = 1000.0
    free: dict[int, float] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)

    def launch(self, name: str, stream: int, time: float, after: float = 0.0, **args: Any) -> float:
        """Launch a kernel on a stream, behind what has ended by `after`; return when it ends."""
        correlation = len(self.events)
        launched = self.now
        self.now += self.launch_us * self.rng.uniform(0.8, 1.3)
        runtime = {"cbid": 211, "correlation": correlation}
        took = min(4.0, self.launch_us)
        self._host("cudaLaunchKernel", "cuda_runtime", launched, took, runtime)
        begin = max(launched + 4.0, self.free.get(stream, 0.0) + 1.0, after + 2.0)
        if args:
            self.begins.append(begin)
            number = len(self.begins) - 1
            arrived = self.arrivals[number] if number < len(self.arrivals) else begin
            time += max(0.0, arrived - begin)
        about = {"stream": stream, "correlation": correlation, "device": DEVICE, **args}
        self._add(name, "kernel", DEVICE, stream, begin, time, about)
        self.free[stream] = begin + time
        return begin + time

    def collective(
        self, what: str, megabytes: float, time: float, stream: int, after: float = 0.0, **of: Any
    ) -> float:
        """Launch a collective, of that many megabytes on its larger side; return when it ends."""
        operation, kernel = NAMES[what]
        whole = round(megabytes * 1e6 / 2)
        args = {
            "Collective name": operation,
            "In msg nelems": whole // 8 if what == "all_gather" else whole,
            "Out msg nelems": whole // 8 if what == "reduce_scatter" else whole,
            "Group size": 8,
            "dtype": "BFloat16",
            "Process Group Name": of.get("group", "0"),
            "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        }
        with self.note(f"c10d::{operation}_", "cpu_op"), self.note(f"nccl:{operation}"):
            return self.launch(kernel, stream, time, after, **args)

    def compute(self, kernels: int, time: float, after: float = 0.0) -> float:
        """Launch kernels on the stream that computes; return when the last one ends."""
        end = after
        for _ in range(kernels):
            name = self.rng.choice(KERNELS)
            with self.note("aten::mm", "cpu_op"):
                end = self.launch(name, MAIN, time / kernels * self.rng.uniform(0.8, 1.2), end)
        return end

    @contextlib.contextmanager
    def note(self, name: str, category: str = "user_annotation") -> Iterator[None]:
        """Annotate what is launched inside."""
        begin = self.now
        self.now += 0.5
        yield
        self.now += 0.5
        if self.is_annotated or not name.startswith(("FSDP::", "FullySharded")):
            self._host(name, category, begin, self.now - begin, {})

    def sync(self) -> None:
        """Let the host wait for all streams, as `.item()` does."""
        until = max([self.now, *self.free.values()])
        self._host("cudaStreamSynchronize", "cuda_runtime", self.now, until - self.now, {})
        self.now = until

    def _host(self, name: str, category: str, begin: float, time: float, args: Any) -> None:
        self._add(name, category, HOST, HOST, begin, time, args)

    def _add(
        self, name: str, category: str, pid: int, tid: int, begin: float, time: float, args: Any
    ) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
        self.events.append({**event, "ts": round(begin, 3), "dur": round(time, 3), "args": args})


def record(run: Run, seed: int = 0) -> list[Event]:
    """Imagine steps of a run on one rank; return the trace's events."""
    return _machine(run, seed, ()).events


def record_ranks(run: Run, seed: int = 0) -> list[list[Event]]:
    """Imagine two ranks of a run, of which the second computes longer in some layers.

    Clocks of their traces differ. The first rank's collectives end no sooner than the second's.
    """
    slow = _machine(run, seed, ())
    fast = _machine(replace(run, fault=""), seed, slow.begins)
    shifted = [{**event, "ts": event["ts"] + 5e6} for event in slow.events]
    return [fast.events, shifted]


def as_json(events: Sequence[Event]) -> str:
    """Write a trace as torch.profiler does."""
    name = {"name": "process_name", "ph": "M", "pid": HOST, "tid": 0, "args": {"name": "python"}}
    return json.dumps({"schemaVersion": 1, "traceEvents": [name, *events], "traceName": "x"})


def _machine(run: Run, seed: int, arrivals: Sequence[float]) -> Machine:
    """Run all steps of a run on a machine; return it."""
    rng = random.Random(seed)
    is_slow = run.fault == "host-bound" and run.form == 0
    share = 2.0 * run.strength if is_slow else 0.0
    launch_us = max(6.0, share * run.layer_us / run.kernels)
    machine = Machine(rng, launch_us, run.is_annotated, arrivals)
    model = _Model(run, machine)
    for number in range(run.steps):
        with machine.note(f"ProfilerStep#{number}"):
            model.data_parallel() if run.library == "DDP" else model.fully_sharded()
    return machine


class _Model:
    """Steps of a model, layer by layer, on a machine."""

    def __init__(self, run: Run, machine: Machine) -> None:
        self.run, self.machine = run, machine
        one = run.library == "FSDP1"
        self.gathers, self.reduces = (20, 20) if one else (20, 24)
        self.fault, self.form, self.rng = run.fault, run.form, machine.rng
        self.updated = 0.0  # when the optimizer has ended

    def fully_sharded(self) -> None:
        """Launch a step of FSDP: forward, backward, and the optimizer."""
        run, machine = self.run, self.machine
        order = [*range(run.layers), *reversed(range(run.layers))]
        gathered = [self.gather(order[0], self.updated)]
        end = reduced = 0.0
        for place, layer in enumerate(order):
            is_backward = place >= run.layers
            time = run.layer_us * (2 if is_backward else 1) * self.rng.uniform(0.95, 1.05)
            out = self.copy_out(layer, gathered[-1])
            is_late = self.fault == "late launch" and (self.form == 0 or is_backward)
            is_stopped = self.fault == "host-bound" and self.form == 1 and place % 2 == 0
            following = order[place + 1] if place + 1 < len(order) else None
            if self.fault == "queue behind another collective":
                self.crowd(place, out)
            if following is not None and not (is_late or is_stopped):
                gathered.append(self.gather(following, out))
            end = self.layer(layer, time, out)
            if following is not None and is_late:
                gathered.append(self.gather(following, end))
            if following is not None and is_stopped:
                machine.sync()
                machine.now += 0.1 * run.layer_us * run.strength
                gathered.append(self.gather(following, 0.0))
            if is_backward:
                reduced = self.reduce(layer, end)
        after = max(end, reduced)
        self.updated = machine.compute(4 * run.layers, 0.5 * run.layer_us, after)

    def layer(self, layer: int, time: float, after: float) -> float:
        """Launch a layer's computation; one rank takes longer, if that is the fault."""
        if self.fault == "skewed rank" and self.form == 1 and layer % 3 == 0:
            time *= 1 + 1.5 * self.run.strength
        return self.machine.compute(self.run.kernels, time, after)

    def gather(self, layer: int, after: float) -> float:
        """Launch the gather of a layer, in pieces if that is the fault; return when it ends."""
        run, machine = self.run, self.machine
        with machine.note(self.annotation("all_gather", layer)):
            if run.library == "FSDP2":
                after = self.copy(CAT, 0.01, self.gathers, after)
            if self.fault != "bucket too small" or layer == 0:
                time = self.waiting(run.link_us(run.layer_mb))
                return machine.collective("all_gather", run.layer_mb, time, self.gathers, after)
            pieces = round(run.strength * (40 if self.form == 0 else 64))
            for _ in range(pieces):
                each = run.layer_mb / (20 if self.form == 0 else 2) / pieces
                time = run.link_us(each) + 2.5 * run.layer_us / pieces
                after = machine.collective("all_gather", each, time, self.gathers, after)
            return after

    def waiting(self, time: float) -> float:
        """Return what a collective takes: longer, if another rank comes late, in one trace."""
        time *= self.rng.uniform(0.97, 1.1)
        if self.fault == "skewed rank" and self.form == 0 and self.rng.random() < 0.3:
            time += self.run.layer_us * self.rng.uniform(1.0, 3.0) * self.run.strength
        return time

    def reduce(self, layer: int, after: float) -> float:
        """Launch the reduce of a layer; return when it ends."""
        run, machine = self.run, self.machine
        with machine.note(self.annotation("post_backward_reduce", layer)):
            if run.library == "FSDP2":
                share = 0.6 * run.strength if self.fault == "copy" and self.form == 1 else 0.015
                stream = MAIN if self.fault == "copy" else self.reduces
                after = self.copy(COPY_IN, share, stream, after)
            time = run.link_us(run.layer_mb) * self.rng.uniform(0.97, 1.1)
            return machine.collective("reduce_scatter", run.layer_mb, time, self.reduces, after)

    def copy_out(self, layer: int, after: float) -> float:
        """Launch the copy out of a gather's buffer; return when it ends."""
        if self.run.library != "FSDP2":
            return after
        share = 0.3 * self.run.strength if self.fault == "copy" and self.form == 0 else 0.015
        with self.machine.note(self.annotation("all_gather_copy_out", layer)):
            return self.copy(COPY_OUT, share, MAIN, after)

    def copy(self, name: str, share: float, stream: int, after: float) -> float:
        """Launch a copy that takes that share of a layer; return when it ends."""
        return self.machine.launch(name, stream, share * self.run.layer_us, after)

    def crowd(self, place: int, after: float) -> None:
        """Launch a large collective that nothing waits for, in front of a gather, now and then."""
        period = 6 if self.form == 0 else 4
        if place % period == 2:
            time = self.run.layer_us * self.run.strength * (3.0 if self.form == 0 else 2.0)
            size = time / self.run.us_per_mb
            self.machine.collective("all_reduce", size, time, self.gathers, after, group="7")

    def annotation(self, what: str, layer: int) -> str:
        """Name what is launched, as the library annotates it."""
        if self.run.library == "FSDP2":
            return f"FSDP::{what} (layers.{layer})"
        hook = "_post_backward_hook" if "reduce" in what else "_pre_forward"
        return f"FullyShardedDataParallel.{hook}"

    def data_parallel(self) -> None:
        """Launch a step of DDP: forward, backward with a bucket a layer, and the optimizer."""
        run, machine = self.run, self.machine
        is_late = self.fault == "late launch"
        with machine.note("DistributedDataParallel.forward"):
            end = machine.compute(run.layers * run.kernels, run.layers * run.layer_us)
        reduced, ends = 0.0, []
        for layer in reversed(range(run.layers)):
            end = self.layer(layer, 2 * run.layer_us, end)
            ends.append(end)
            if not is_late:
                reduced = self.all_reduce(layer, end)
        for layer in range(run.layers * is_late):
            reduced = self.all_reduce(layer, end)
        machine.compute(4 * run.layers, 0.5 * run.layer_us, max(end, reduced))

    def all_reduce(self, layer: int, after: float) -> float:
        """Launch the all-reduce of a bucket, or of many small ones; return when it ends."""
        run, machine = self.run, self.machine
        if self.fault == "bucket too small":
            for _ in range(40):
                each = run.layer_mb / 1000
                time = run.link_us(each) + 4 * run.layer_us / 40
                after = machine.collective("all_reduce", each, time, self.reduces, after)
            return after
        time = self.waiting(run.link_us(run.layer_mb))
        return machine.collective("all_reduce", run.layer_mb, time, self.reduces, after)
