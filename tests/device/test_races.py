"""Steps under the race detector of `support/races.py`: what a device's streams and memory do."""

from __future__ import annotations

import functools
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compilations import reused
from support.races import META, Detector, detecting
from support.topologies import where_the_host_is_near
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.runtime.comm import collectives, copies, flights, transport
from autoshard.runtime.compiled import kernels
from autoshard.runtime.sharding import sharded_module
from autoshard.runtime.training import host_states, optimizers
from autoshard.runtime.unit import param as unit_param
from autoshard.runtime.unit import reduce, unsharded

MESHES = {"shard 4": (4,), "replicate 2 x shard 2": (2, 2), "replicate 4": (4, 1)}
FORMS = ("eager", "compiled")


@dataclass(frozen=True)
class Case:
    """One way to train.

    micro:  what micro-batches before the last of a step do: None, there are none; "no_sync";
            "no all-reduce", of replicas; or "dropped", the same and their gradients are zeroed.
    extra:  see `prepared` and `train`.
    """

    form: str
    mesh: str
    micro: str | None = None
    extra: str | None = None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.form, self.mesh, self.micro, self.extra)))


EXTRAS = (
    "offload",
    "checkpointing",
    "prefetch",
    "kept after forward",
    "smaller mesh after forward",
    "mixed precision",
    "custom reduces",
    "hook on a stream",
    "optimizer on a stream",
    "exception in forward",
    "exception in backward",
    "exception in an op",
    "auto buckets",
    "saved on the host",
    "states on the host",
)


def is_possible(case: Case) -> bool:
    if case.extra == "saved on the host" and case.form == "eager":
        return False
    has_replicas, is_cut = case.mesh != "shard 4", case.mesh != "replicate 4"
    if case.extra == "hook on a stream":
        return not has_replicas  # refused there
    if case.micro in ("no all-reduce", "dropped"):
        return has_replicas
    return is_cut or case.extra != "smaller mesh after forward"


def cases() -> list[Case]:
    micros = (None, "no_sync", "no all-reduce", "dropped")
    plain = itertools.product(FORMS, MESHES, micros)
    others = itertools.product(FORMS, MESHES, (None,), EXTRAS)
    together = itertools.product(
        FORMS, ("replicate 2 x shard 2",), ("no_sync", "no all-reduce"), EXTRAS
    )
    found = itertools.chain(plain, others, together)
    return [case for case in itertools.starmap(Case, found) if is_possible(case)]


class Block(nn.Module):
    """Linear layers of sizes that four ranks can't share evenly."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.sigmoid(self.up(x)))


@torch._dynamo.disable  # a graph ends here
def stop(model: Net) -> None:
    if model.fails:
        raise ValueError("no more")


class Net(nn.Module):
    def __init__(self, layers: int = 2, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(checkpointing) for _ in range(layers))
        self.head = nn.Linear(8, 4)
        self.may_fail = self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if layer.checkpointing else layer(x)
        if self.may_fail:
            stop(self)
        out: Tensor = self.head(x)
        return out


class CustomReduce:
    """Reduce-scatter of the user's own, in ordinary memory."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any
    ) -> transport.Work:
        return transport.reduce(output_tensor, input_tensor, group)


def prepared(case: Case, topology: str) -> Any:
    """The model, in units, on the meta device; shards are on the host with offload.

    topology: file of one with a host, for values that are saved there.
    """
    arguments: dict[str, Any] = {"mesh": mesh_of(case.mesh)}
    if case.extra == "offload":
        arguments["offload_policy"] = autoshard.CPUOffloadPolicy()
    if case.extra == "states on the host":  # of a parameter or two at a time
        arguments["offload_policy"] = autoshard.OptimizerOffloadPolicy(bucket_bytes=50)
    if case.extra == "mixed precision":
        arguments["mp_policy"] = autoshard.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    after_forward: dict[str, Any] = {}
    if case.extra == "kept after forward":
        after_forward["reshard_after_forward"] = False
    if case.extra == "smaller mesh after forward":
        after_forward["reshard_after_forward"] = 2
    with torch.device("meta"):
        layers = 3 if case.extra in ("prefetch", "saved on the host") else 2
        model: Any = Net(layers, checkpointing=case.extra == "checkpointing")
    with mock.patch.object(unit_param, "mesh_device", return_value=META):
        for layer in model.layers:
            autoshard.fully_shard(layer, **arguments, **after_forward)
        autoshard.fully_shard(model, **arguments)
    model.to_empty(device="cpu" if case.extra == "offload" else "meta")
    if case.extra == "prefetch":
        first, second, third = model.layers
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
    if case.extra == "custom reduces":
        for unit in (*model.layers, model):
            unit.set_custom_reduce_scatter(CustomReduce())
    model.may_fail = case.extra == "exception in forward"
    if case.form == "compiled":
        bucketing = "auto" if case.extra == "auto buckets" else "per_unit"
        options = {"lowering": "eager", "bucketing": bucketing, "strict": not model.may_fail}
        if case.extra == "saved on the host":
            options |= {"topology": topology, "memory_budget": BUDGET, "bucketing": "auto"}
        model.compile(backend="autoshard", options=options)
    return model


BUDGET = 45_000
"""Bytes within which a step saves a part on the host, of `MANY` rows that it trains on."""
MANY = 256


@functools.cache
def mesh_of(mesh: str) -> DeviceMesh:
    names = ("shard",) if mesh == "shard 4" else ("replicate", "shard")
    return init_device_mesh("cpu", MESHES[mesh], mesh_dim_names=names)


def fail(grad: Tensor) -> None:
    raise ValueError("no more")


def train(case: Case, model: Any, detector: Detector) -> None:
    """Two steps, before which one fails with the extras that say so."""
    has_states = case.extra == "states on the host"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if has_states else 0.0)
    if case.extra == "hook on a stream":
        for unit in (*model.layers, model):
            unit.set_all_reduce_hook(lambda grads: grads.mul_(0.5), stream=detector.stream("hook"))
    if model.may_fail:
        model.fails = True
        with pytest.raises(ValueError, match="no more"):
            model(torch.empty(3, 8, device="meta"))
        model.fails = False
    rows = MANY if case.extra == "saved on the host" else 3
    if case.extra in ("exception in an op", "saved on the host"):
        # the next knows what to prefetch
        model(torch.empty(rows, 8, device="meta")).sum().backward()
        for op in ("sigmoid", "sigmoid_backward"):
            detector.fails_at = op
            with pytest.raises(MemoryError, match=op):
                model(torch.empty(rows, 8, device="meta")).sum().backward()
            model.zero_grad()
    if case.extra == "exception in backward":
        x = torch.empty(3, 8, device="meta", requires_grad=True)
        loss = model(x).sum()
        x.register_hook(fail)
        with pytest.raises(ValueError, match="no more"):
            loss.backward()
        del loss
        model.zero_grad()
    if case.extra == "saved on the host":  # which hooks of the user's read
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied):
            loss = model(torch.empty(rows, 8, device="meta")).sum()
        loss.backward()
        model.zero_grad()
    for _ in range(2):
        for is_last in (False, True) if case.micro else (True,):
            if case.micro == "no_sync":
                model.set_requires_gradient_sync(is_last)
            elif case.micro:
                model.set_requires_all_reduce(is_last)
            model(torch.empty(rows, 8, device="meta")).sum().backward()
            if case.micro == "dropped" and not is_last:
                model.zero_grad()
        if case.extra == "optimizer on a stream":
            beside = detector.stream("optimizer")
            beside.wait_stream(detector.current)
            with beside:
                optimizer.step()
                model.set_post_optim_event(beside.record_event())
            model(torch.empty(3, 8, device="meta"))  # which waits, so that gradients may be freed
        else:
            optimizer.step()
        if has_states:
            step_again(optimizer, detector)
        optimizer.zero_grad()


def step_again(optimizer: torch.optim.Optimizer, detector: Detector) -> None:
    """A step that fails in its middle, and one whose states the user reads."""
    detector.fails_at = "mul_"
    with pytest.raises(MemoryError, match="mul_"):
        optimizer.step()
    optimizer.step()
    for state in optimizer.state.values():
        assert state["momentum_buffer"].to_local().mul(2).device.type == "cpu"


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    """Rank 0 of four in a group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh_of.cache_clear()
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def found_in(case: Case) -> list[str]:
    """Findings of the detector, each with how often."""
    with detecting() as detector, where_the_host_is_near() as topology:
        model = prepared(case, topology)
        train(case, model, detector)
    if case.extra == "saved on the host":
        blocks = [block for plan in autoshard.plans(model) for block in plan.saved]
        assert any(block.host_bytes for block in blocks)
    assert detector.num_ops > 100
    assert any(name.startswith("group") for name in detector.streams)
    return [f"{number}x {finding}" for finding, number in detector.findings.items()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*memory_budget")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_race(case: Case) -> None:
    with reused():
        found = found_in(case)
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class Mutation:
    """Source of `name`, of `owner`, with `new` for `old`: what `case` needs is taken out."""

    owner: Any
    name: str
    old: str
    case: str
    new: str = "pass"

    def __str__(self) -> str:
        owner = self.owner.__name__.removeprefix("autoshard.runtime.")
        return f"{owner}.{self.name}: {self.old} -> {self.new}; {self.case}"

    def function(self) -> Any:
        """The changed function."""
        source = textwrap.dedent(inspect.getsource(inspect.getattr_static(self.owner, self.name)))
        assert source.count(self.old) == 1
        lines = source.replace(self.old, self.new).splitlines()
        kept = [line for line in lines if not line.startswith("@_implements")]
        module = inspect.getmodule(inspect.unwrap(getattr(self.owner, self.name)))
        made: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + "\n".join(kept), vars(module), made)
        return made[self.name]


InFlight, Grouped, Reduction = flights.InFlight, flights.GroupedFlight, reduce.Reduction
WAIT = "wait_for([self.work], self.issued, self.number)"
AFTER_COMPUTE = "stream.wait_stream(torch.accelerator.current_stream(device))"
EAGER, COMPILED = "eager, shard 4", "compiled, shard 4"
ON_HOST = f"{COMPILED}, saved on the host"
STATES = f"{EAGER}, states on the host"
HSDP, HSDP_COMPILED = "eager, replicate 2 x shard 2", "compiled, replicate 2 x shard 2"
MUTATIONS = (
    # waits for collectives
    Mutation(InFlight, "wait", WAIT, EAGER),
    Mutation(InFlight, "wait", WAIT, COMPILED),
    Mutation(
        Grouped, "wait", WAIT.replace("[self.work]", "self.works"), f"{COMPILED}, auto buckets"
    ),
    Mutation(collectives, "wait_gather", "flight.wait()", f"{EAGER}, prefetch"),
    Mutation(collectives, "wait_gather", "flight.wait()", COMPILED),
    Mutation(kernels, "_wait_reduce", "flight = flight.wait()", COMPILED),
    Mutation(Reduction, "_wait", "self._flight.wait()", HSDP, "self._flight"),
    # the stream of all-reduces: what it waits for, and what must outlive it
    Mutation(reduce, "on_all_reduce_stream", AFTER_COMPUTE, "eager, replicate 4"),
    Mutation(Reduction, "advance", "= not self._flight.work", "eager, replicate 4", "= False"),
    Mutation(kernels, "_all_reduce", "=not flight.work", "compiled, replicate 4", "=False"),
    Mutation(Reduction, "advance", "self._flight = self._flight.wait()", HSDP),
    Mutation(kernels, "_all_reduce", "flight.wait(), ", HSDP_COMPILED, "flight, "),
    Mutation(Reduction, "advance", "self._keep.append(self._flight)", HSDP),
    Mutation(kernels, "_all_reduce", "keep=flight", HSDP_COMPILED, "keep=None"),
    Mutation(Reduction, "_add_partial", "self._keep.append(waiting)", f"{HSDP}, no all-reduce"),
    Mutation(Reduction, "advance", "self._left = stream.record_event()", f"{HSDP}, no all-reduce"),
    Mutation(Reduction, "_wait", "self._left.wait()", f"{HSDP}, dropped"),
    Mutation(Reduction, "_wait", "self._left.wait()", f"{HSDP_COMPILED}, no all-reduce"),
    # what an exception drops
    Mutation(Reduction, "__del__", "self._wait()", f"{HSDP}, exception in backward"),
    Mutation(kernels, "_drop", "entry.flight.wait()", f"{COMPILED}, exception in an op"),
    Mutation(unsharded.Unsharded, "drop", "flight.wait()", f"{EAGER}, exception in an op"),
    # copies
    Mutation(copies, "_copy", AFTER_COMPUTE, f"{COMPILED}, offload"),
    Mutation(copies, "_copy", "stream.record_event()", f"{COMPILED}, offload", "torch.Event()"),
    Mutation(copies.Copies, "wait_on_device", "self.done.wait()", f"{COMPILED}, offload"),
    Mutation(
        copies.Copies, "wait_on_host", "self.lane.newest.synchronize()", f"{COMPILED}, offload"
    ),
    Mutation(kernels, "_wait_offload", "flight.wait_on_device()", ON_HOST, "flight.results"),
    Mutation(kernels, "_wait_offload", "flight.wait_on_host()", ON_HOST),
    Mutation(kernels, "_wait_reload", ".wait_on_device()", ON_HOST, ".results"),
    Mutation(copies.Copies, "release", "self.wait_on_device()", f"{EAGER}, offload"),
    # optimizer states on the host
    Mutation(host_states._Loaded, "wait_on_device", "self.copies.wait_on_device()", STATES),
    Mutation(host_states.HostState, "wait", "self.stores.wait_on_host()", STATES),
    Mutation(
        optimizers, "step_from_host", "loaded.wait_on_device()\n            try", STATES, "try"
    ),
    Mutation(optimizers, "step_from_host", "copies.release()", STATES),
    Mutation(
        optimizers, "step_from_host", "stores.popleft().release()", STATES, "stores.popleft()"
    ),
    # streams of the user's
    Mutation(
        sharded_module, "_on_stream", "stream.wait_stream(current)", f"{EAGER}, hook on a stream"
    ),
    Mutation(
        sharded_module, "_on_stream", "current.wait_stream(stream)", f"{COMPILED}, hook on a stream"
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_is_found(mutation: Mutation) -> None:
    (case,) = (each for each in cases() if str(each) == mutation.case)
    with mock.patch.object(mutation.owner, mutation.name, mutation.function()):
        assert found_in(case)
