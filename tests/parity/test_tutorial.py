"""FSDP2's tutorial, start to end, in its own words: only its import line is ours.

Build on meta, shard bottom-up, fill, train with clipping, save on two ranks, resume on
another number of them. FSDP2 and we must end with the same shards, bit for bit, and both
with those of a replicated model that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from support.models import Net, tokens
from support.ranks import on_ranks
from support.selection import part_of
from support.training import assert_same, average_gradients
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

import autoshard

BEFORE, AFTER = range(3), range(3, 6)  # steps that end with a checkpoint, and that begin with it
SAVED_ON = 2  # ranks


class Imports(NamedTuple):
    """What the tutorial imports: `from <where> import fully_shard, ...`."""

    fully_shard: Any
    MixedPrecisionPolicy: Any
    FSDPModule: Any


class Run(NamedTuple):
    imports: Imports
    compiles: bool


FSDP2 = Imports(
    torch.distributed.fsdp.fully_shard,
    torch.distributed.fsdp.MixedPrecisionPolicy,
    torch.distributed.fsdp.FSDPModule,
)
AUTOSHARD = Imports(
    autoshard.fully_shard,
    autoshard.MixedPrecisionPolicy,
    autoshard.ShardedModule,  # "... ShardedModule as FSDPModule"
)
RUNS = {
    "fsdp2": Run(FSDP2, False),
    "eager": Run(AUTOSHARD, False),
    "compiled": Run(AUTOSHARD, True),
}


class Case(NamedTuple):
    """norm_type: a largest value is the same in whatever order it is looked for, a sum is not:
    with inf, clipped gradients are those of the replicated model bit for bit. Four ranks leave
    empty shards, of which torch takes no norm of inf.
    """

    checkpointer: str
    then_on: int
    mixed_precision: bool = False
    explicit_prefetching: bool = False
    norm_type: float = math.inf


class Model(Net):
    def __init__(self) -> None:
        super().__init__(tied=False)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """(ids, targets) for this rank. Two sequences a step, on any number of ranks: one rank takes
    them in turn, two take one each, four a half.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = [(ids, ids.roll(-1)) for ids in (tokens(n, step, length=6) for n in range(SAVED_ON))]
    if world <= SAVED_ON:
        return whole[rank::world]
    parts = world // SAVED_ON
    ids, targets = (each.chunk(parts)[rank % parts] for each in whole[rank // parts])
    return [(ids, targets)]


def backward(model: Callable[[Tensor], Tensor], step: int) -> None:
    batches = micro_batches(step)
    for x, y in batches:
        loss = functional.cross_entropy(model(x).float(), y)
        (loss / len(batches)).backward()


# ---- the tutorial


def tutorial(run: Run, checkpointer: Checkpointer, case: Case, steps: range) -> Any:
    fully_shard, MixedPrecisionPolicy, FSDPModule = run.imports
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = Model()
    fsdp_kwargs = {}
    if case.mixed_precision:
        fsdp_kwargs["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for layer in model.layers:
        fully_shard(layer, **fsdp_kwargs)
    fully_shard(model, **fsdp_kwargs)

    if checkpointer.is_empty():
        model.to_empty(device="cpu")
        model.reset_parameters()
    else:
        checkpointer.load_model(model)

    assert isinstance(model, Model)
    assert isinstance(model, FSDPModule)
    for param in model.parameters():
        assert param.placements == (Shard(0),)
        assert param.dtype == torch.float32
    model.unshard()
    assert not isinstance(model.head.weight, DTensor)
    assert model.head.weight.dtype == (torch.bfloat16 if case.mixed_precision else torch.float32)
    model.reshard()
    assert isinstance(model.head.weight, DTensor)

    if case.explicit_prefetching:
        set_modules_to_prefetch(model, ahead=2)
    if run.compiles:
        model.compile(backend="autoshard", options={"lowering": "eager", "strict": True})

    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    if not checkpointer.is_empty():
        checkpointer.load_optim(model, optim)
    for step in steps:
        if case.explicit_prefetching:
            model.unshard(async_op=True)
        backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=case.norm_type)
        optim.step()
        optim.zero_grad()
    if steps == BEFORE:
        checkpointer.save(model, optim)
    return model


def set_modules_to_prefetch(model: Any, ahead: int) -> None:
    layers = list(model.layers)
    for number, layer in enumerate(layers):
        if number + ahead < len(layers):
            layer.set_modules_to_forward_prefetch(layers[number + 1 : number + ahead + 1])
        if number >= ahead:
            layer.set_modules_to_backward_prefetch(layers[number - ahead : number][::-1])


class Checkpointer:
    """What the tutorial calls its DCP route: whole state dicts, from rank 0 to a file and back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_empty(self) -> bool:
        return not self.folder.exists()

    def load_model(self, model: Any) -> None:
        """`model` is still on meta."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, self._read("model.pt"), options=options)

    def load_optim(self, model: Any, optim: torch.optim.Optimizer) -> None:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(model, optim, self._read("optim.pt"), options=options)

    def save(self, model: Any, optim: torch.optim.Optimizer) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        self._write(
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optim, options=options),
        )

    def _read(self, name: str) -> Any:
        return torch.load(self.folder / name, mmap=True, weights_only=True, map_location="cpu")

    def _write(self, model_state: Any, optim_state: Any) -> None:
        if dist.get_rank() == 0:
            self.folder.mkdir()
            torch.save(model_state, self.folder / "model.pt")
            torch.save(optim_state, self.folder / "optim.pt")
        dist.barrier()


class DTensors(Checkpointer):
    """The tutorial's other route: by `full_tensor()` and `distribute_tensor()`."""

    def load_model(self, model: Any) -> None:
        sharded = {name: like(param) for name, param in model.state_dict().items()}
        full = self._read("model.pt")
        state = {name: nn.Parameter(make(full[name])) for name, make in sharded.items()}
        model.load_state_dict(state, assign=True)  # nothing is copied to a meta tensor

    def load_optim(self, model: Any, optim: torch.optim.Optimizer) -> None:
        _init_optim_state(optim)
        state, full = optim.state_dict(), self._read("optim.pt")
        for index, values in state["state"].items():
            for key, value in values.items():
                values[key] = like(value)(full["state"][index][key])
        optim.load_state_dict(state)

    def save(self, model: Any, optim: torch.optim.Optimizer) -> None:
        state = optim.state_dict()
        for index, values in state["state"].items():
            state["state"][index] = {key: whole(value) for key, value in values.items()}
        self._write({name: whole(param) for name, param in model.state_dict().items()}, state)


class ShardedStateDicts(Checkpointer):
    """Each rank writes its own part, and reads what becomes its own."""

    def load_model(self, model: Any) -> None:
        model.to_empty(device="cpu")
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=self.folder)
        set_model_state_dict(model, state["model"])

    def load_optim(self, model: Any, optim: torch.optim.Optimizer) -> None:
        state = {"optim": get_optimizer_state_dict(model, optim)}
        dcp.load(state, checkpoint_id=self.folder)
        set_optimizer_state_dict(model, optim, state["optim"])

    def save(self, model: Any, optim: torch.optim.Optimizer) -> None:
        state = {
            "model": get_model_state_dict(model),
            "optim": get_optimizer_state_dict(model, optim),
        }
        dcp.save(state, checkpoint_id=self.folder)


class AppState(Stateful):
    """The recipe of torch.distributed.checkpoint: DCP calls both methods by itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class AppStates(Checkpointer):
    def load_model(self, model: Any) -> None:
        model.to_empty(device="cpu")  # and filled with the optimizer

    def load_optim(self, model: Any, optim: torch.optim.Optimizer) -> None:
        dcp.load({"app": AppState(model, optim)}, checkpoint_id=self.folder)

    def save(self, model: Any, optim: torch.optim.Optimizer) -> None:
        dcp.save({"app": AppState(model, optim)}, checkpoint_id=self.folder)


CHECKPOINTERS = {
    "dcp_api": Checkpointer,
    "dtensor_api": DTensors,
    "sharded": ShardedStateDicts,
    "app": AppStates,
}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor) -> Callable[[Tensor], Tensor]:
    """Cuts a whole tensor as `value` is."""
    if not isinstance(value, DTensor):
        return lambda full: full
    return lambda full: distribute_tensor(full, value.device_mesh, value.placements)


# ---- the truth


def replicated(initial: dict[str, Tensor], case: Case) -> Model:
    """All steps at once, on the whole model."""
    model = Model()
    model.load_state_dict(initial)

    def call(ids: Tensor) -> Tensor:
        dtype = torch.bfloat16 if case.mixed_precision else torch.float32
        cast = {name: p.to(dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, cast, (ids,))

    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in (*BEFORE, *AFTER):
        backward(call, step)
        average_gradients(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=case.norm_type)
        optim.step()
        optim.zero_grad()
    return model


def rtol_of(case: Case) -> float:
    """Of shards against the truth; none where sums are those of the truth in its order."""
    if case.then_on == 4:
        # Gradients of half a sequence, four of them: other sums, which round otherwise, and
        # Adam divides by what is small. In bfloat16 an activation's last bit is 2 ** -8.
        return 1e-2 if case.mixed_precision else 1e-4
    # A 2-norm is the root of a sum, over each rank's part first.
    return 0.0 if case.norm_type == math.inf else 1e-5


def begin(rank: int, folder: str, case: Case) -> None:
    for name, run in RUNS.items():
        checkpointer = CHECKPOINTERS[case.checkpointer](Path(folder) / name)
        if name == "fsdp2":
            state = tutorial(run, checkpointer, case, range(0)).state_dict()
            want = replicated({key: whole(value) for key, value in state.items()}, case)
            if rank == 0:
                torch.save(want.state_dict(), Path(folder) / "want.pt")
        tutorial(run, checkpointer, case, BEFORE)


def resume(rank: int, folder: str, case: Case) -> None:
    want = Model()
    want.load_state_dict(torch.load(Path(folder) / "want.pt"))
    got = {}
    for name, run in RUNS.items():
        checkpointer = CHECKPOINTERS[case.checkpointer](Path(folder) / name)
        assert not checkpointer.is_empty()
        got[name] = tutorial(run, checkpointer, case, AFTER)
    for name, model in got.items():
        assert_same(model, got["fsdp2"])
        assert_same(model, want, rtol=rtol_of(case))
        assert all(param.device_mesh.size() == case.then_on for param in model.parameters()), name


begin_on = on_ranks(SAVED_ON, timeout=240)(begin)
resume_on = {world: on_ranks(world, timeout=240)(resume) for world in (1, 2, 4)}

CASES = [
    Case("dcp_api", 4, mixed_precision=True, norm_type=2.0),
    Case("dtensor_api", 1, explicit_prefetching=True, norm_type=2.0),
    Case("sharded", 2, mixed_precision=True, explicit_prefetching=True, norm_type=2.0),
    Case("app", 1, norm_type=2.0),
    Case("app", 2, mixed_precision=True),
]


@pytest.mark.parametrize(
    "case", part_of(CASES, every=2), ids=lambda case: f"{case.checkpointer} on {case.then_on}"
)
def test_only_the_import_line_changes(tmp_path: Path, case: Case) -> None:
    """A51, D-3, D-7, D-40."""
    begin_on(folder=str(tmp_path), case=case)
    resume_on[case.then_on](folder=str(tmp_path), case=case)
