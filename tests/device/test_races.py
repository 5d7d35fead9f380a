"""Steps under the race detector of `support/races.py`: what a device's streams and memory do."""

from __future__ import annotations

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
from support.races import META, Detector, detecting
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.runtime.comm import collectives, copies
from autoshard.runtime.compiled import kernels
from autoshard.runtime.sharding import sharded_module
from autoshard.runtime.unit import param as unit_param
from autoshard.runtime.unit import reduce, unsharded

MESHES = {"shard 4": (4,), "replicate 2 x shard 2": (2, 2), "replicate 4": (4, 1)}
FORMS = ("eager", "compiled")


@dataclass(frozen=True)
class Case:
    """One way to train.

    micro:  what micro-batches before the last of a step do: None, there are none; "no_sync";
            "no all-reduce", of replicas; or "dropped", the same and their gradients are zeroed.
    extras: see `prepared` and `train`.
    """

    form: str
    mesh: str
    micro: str | None = None
    extras: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.form, self.mesh, self.micro, *self.extras)))


EXTRAS = (
    ("offload",),
    ("checkpointing",),
    ("prefetch",),
    ("kept after forward",),
    ("smaller mesh after forward",),
    ("mixed precision",),
    ("hook on a stream",),
    ("optimizer on a stream",),
    ("exception in forward",),
    ("exception in backward",),
    ("exception in an op",),
    ("auto buckets",),
)


def is_possible(case: Case) -> bool:
    has_replicas, is_cut = case.mesh != "shard 4", case.mesh != "replicate 4"
    if case.micro in ("no all-reduce", "dropped"):
        return has_replicas
    if "hook on a stream" in case.extras:
        return not has_replicas  # refused there
    return is_cut or "smaller mesh after forward" not in case.extras


def cases() -> list[Case]:
    plain = [
        Case(form, mesh, micro)
        for form, mesh, micro in itertools.product(
            FORMS, MESHES, (None, "no_sync", "no all-reduce", "dropped")
        )
    ]
    others = [
        Case(form, mesh, None, extras)
        for form, mesh, extras in itertools.product(FORMS, MESHES, EXTRAS)
    ]
    together = [
        Case(form, "replicate 2 x shard 2", micro, extras)
        for form, micro, extras in itertools.product(FORMS, ("no_sync", "no all-reduce"), EXTRAS)
        if extras != ("hook on a stream",)
    ]
    return list(filter(is_possible, [*plain, *others, *together]))


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
    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(checkpointing) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.may_fail = self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if layer.checkpointing else layer(x)
        if self.may_fail:
            stop(self)
        out: Tensor = self.head(x)
        return out


def prepared(case: Case) -> Any:
    """The model, in units, on the meta device; shards are on the host with offload."""
    arguments: dict[str, Any] = {"mesh": mesh_of(case)}
    if "offload" in case.extras:
        arguments["offload_policy"] = autoshard.CPUOffloadPolicy(pin_memory=False)
    if "mixed precision" in case.extras:
        arguments["mp_policy"] = autoshard.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    after_forward: dict[str, Any] = {}
    if "kept after forward" in case.extras:
        after_forward["reshard_after_forward"] = False
    if "smaller mesh after forward" in case.extras:
        after_forward["reshard_after_forward"] = 2
    with torch.device("meta"):
        model: Any = Net(checkpointing="checkpointing" in case.extras)
    with mock.patch.object(unit_param, "mesh_device", return_value=META):
        for layer in model.layers:
            autoshard.fully_shard(layer, **arguments, **after_forward)
        autoshard.fully_shard(model, **arguments)
    model.to_empty(device="cpu" if "offload" in case.extras else "meta")
    if "prefetch" in case.extras:
        first, second, third = model.layers
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
    model.may_fail = "exception in forward" in case.extras
    if case.form == "compiled":
        bucketing = "auto" if "auto buckets" in case.extras else "per_unit"
        options = {"lowering": "eager", "bucketing": bucketing, "strict": not model.may_fail}
        model.compile(backend="autoshard", options=options)
    return model


def mesh_of(case: Case) -> DeviceMesh:
    names = ("shard",) if case.mesh == "shard 4" else ("replicate", "shard")
    return init_device_mesh("cpu", MESHES[case.mesh], mesh_dim_names=names)


def fail(grad: Tensor) -> None:
    raise ValueError("no more")


def train(case: Case, model: Any, detector: Detector) -> None:
    """Two steps, before which one fails with the extras that say so."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "hook on a stream" in case.extras:
        for unit in (*model.layers, model):
            unit.set_all_reduce_hook(lambda grads: grads.mul_(0.5), stream=detector.stream("hook"))
    if model.may_fail:
        model.fails = True
        with pytest.raises(ValueError, match="no more"):
            model(torch.empty(3, 8, device="meta"))
        model.fails = False
    if "exception in an op" in case.extras:
        model(torch.empty(3, 8, device="meta")).sum().backward()  # the next knows what to prefetch
        for op in ("sigmoid", "sigmoid_backward"):
            detector.fails_at = op
            with pytest.raises(MemoryError, match=op):
                model(torch.empty(3, 8, device="meta")).sum().backward()
            model.zero_grad()
    if "exception in backward" in case.extras:
        x = torch.empty(3, 8, device="meta", requires_grad=True)
        loss = model(x).sum()
        x.register_hook(fail)
        with pytest.raises(ValueError, match="no more"):
            loss.backward()
        del loss
        model.zero_grad()
    for _ in range(2):
        for is_last in (False, True) if case.micro else (True,):
            if case.micro == "no_sync":
                model.set_requires_gradient_sync(is_last)
            elif case.micro:
                model.set_requires_all_reduce(is_last)
            model(torch.empty(3, 8, device="meta")).sum().backward()
            if case.micro == "dropped" and not is_last:
                model.zero_grad()
        if "optimizer on a stream" in case.extras:
            beside = detector.stream("optimizer")
            beside.wait_stream(detector.current)
            with beside:
                optimizer.step()
                model.set_post_optim_event(beside.record_event())
            model(torch.empty(3, 8, device="meta"))  # which waits, so that gradients may be freed
        else:
            optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    """Rank 0 of four in a group that moves no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def found_in(case: Case) -> list[str]:
    """Findings of the detector, each with how often."""
    with detecting() as detector:
        train(case, prepared(case), detector)
    assert detector.num_ops > 100
    assert any(name.startswith("group") for name in detector.streams)
    return [f"{number}x {finding}" for finding, number in detector.findings.items()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("case", cases(), ids=str)
def test_no_race(case: Case) -> None:
    found = found_in(case)
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class Mutation:
    """A wait, an event or a kept buffer that is taken out of the source of `name`, of `owner`."""

    owner: Any
    name: str
    old: str
    new: str
    case: Case

    def __str__(self) -> str:
        return f"{self.owner.__name__.removeprefix('autoshard.runtime.')}.{self.name}: {self.old}"

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


def case_of(text: str) -> Case:
    """The case that `text` is the name of."""
    return next(case for case in cases() if str(case) == text)


def mutations() -> list[Mutation]:
    hsdp, whole = "replicate 2 x shard 2", "replicate 4"
    found = [
        (
            collectives.InFlight,
            "wait",
            "wait_for([self.work], self.issued, self.number)",
            "pass",
            "eager, shard 4",
        ),
        (
            collectives.InFlight,
            "wait",
            "wait_for([self.work], self.issued, self.number)",
            "pass",
            "compiled, shard 4",
        ),
        (
            collectives.GroupedFlight,
            "wait",
            "wait_for(self.works, self.issued, self.number)",
            "pass",
            "compiled, shard 4, auto buckets",
        ),
        (collectives, "wait_gather", "flight.wait()", "pass", "compiled, shard 4"),
        (collectives, "wait_gather", "flight.wait()", "pass", "eager, shard 4, prefetch"),
        (
            reduce,
            "on_all_reduce_stream",
            "stream.wait_stream(torch.accelerator.current_stream(device))",
            "pass",
            f"eager, {whole}",
        ),
        (
            reduce.Reduction,
            "advance",
            "after_compute = not self._flight.work",
            "after_compute = False",
            f"eager, {whole}",
        ),
        (
            kernels,
            "_all_reduce",
            "after_compute=not flight.work",
            "after_compute=False",
            f"compiled, {whole}",
        ),
        (reduce.Reduction, "advance", "self._keep.append(self._flight)", "pass", f"eager, {hsdp}"),
        (
            reduce.Reduction,
            "advance",
            "self._flight = self._flight.wait()",
            "self._flight = collectives.replace(self._flight, work=None)",
            f"eager, {hsdp}",
        ),
        (
            reduce.Reduction,
            "advance",
            "self._left = stream.record_event()",
            "pass",
            f"eager, {hsdp}, no all-reduce",
        ),
        (
            reduce.Reduction,
            "_wait",
            "self._left.wait()",
            "pass",
            f"compiled, {hsdp}, no all-reduce",
        ),
        (reduce.Reduction, "_wait", "self._left.wait()", "pass", f"eager, {hsdp}, dropped"),
        (reduce.Reduction, "_wait", "self._flight.wait()", "self._flight", f"eager, {hsdp}"),
        (
            reduce.Reduction,
            "_add_partial",
            "self._keep.append(waiting)",
            "pass",
            f"eager, {hsdp}, no all-reduce",
        ),
        (
            reduce.Reduction,
            "abandon",
            "self._wait()",
            "pass",
            f"eager, {hsdp}, exception in backward",
        ),
        (
            reduce,
            "accumulate",
            ".to(sharded.shard.device)",
            ".to(sharded.shard.device, non_blocking=True)",
            "eager, shard 4, offload",
        ),
        (kernels, "_all_reduce", "keep=flight", "keep=None", f"compiled, {hsdp}"),
        (kernels, "_all_reduce", "flight.wait(), ", "flight, ", f"compiled, {hsdp}"),
        (kernels, "_wait_reduce", "flight = flight.wait()", "pass", "compiled, shard 4"),
        (kernels, "_drop", "entry.flight.wait()", "pass", "compiled, shard 4, exception in an op"),
        (
            copies,
            "_copy",
            "stream.wait_stream(torch.accelerator.current_stream(device))",
            "pass",
            "compiled, shard 4, offload",
        ),
        (
            copies,
            "_copy",
            "return Copies(results, sources, stream.record_event())",
            "return Copies(results, sources)",
            "compiled, shard 4, offload",
        ),
        (copies.Copies, "wait_on_device", "self.done.wait()", "pass", "compiled, shard 4, offload"),
        (
            copies.Copies,
            "wait_on_host",
            "self.done.synchronize()",
            "pass",
            "compiled, shard 4, offload",
        ),
        (
            unsharded.Unsharded,
            "drop",
            "flight.wait()",
            "pass",
            "eager, shard 4, exception in an op",
        ),
        (
            sharded_module,
            "_on_stream",
            "stream.wait_stream(current)",
            "pass",
            "eager, shard 4, hook on a stream",
        ),
        (
            sharded_module,
            "_on_stream",
            "current.wait_stream(stream)",
            "pass",
            "compiled, shard 4, hook on a stream",
        ),
    ]
    return [Mutation(*each[:4], case_of(each[4])) for each in found]


@pytest.mark.parametrize("mutation", mutations(), ids=str)
def test_a_mutation_is_found(mutation: Mutation) -> None:
    with mock.patch.object(mutation.owner, mutation.name, mutation.function()):
        assert found_in(mutation.case)
