"""Checkpoints that are complete or not there, and runs that go on from one as if nothing was."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.resumed import Loader, assert_equal, built, state, train
from support.training import adamw, in_both_forms, in_form, sgd
from torch import Tensor, nn

import autoshard
from autoshard.runtime.training.checkpoint import manifest as manifests
from autoshard.runtime.training.checkpoint.folder import ABANDONED_S, LEFT_S, _runs


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


@in_both_forms
@on_ranks(2)
def test_a_run_goes_on(rank: int, form: str, folder: str) -> None:
    """Bit for bit: parameters, optimizer, loader, and generators of each rank."""
    random.seed(rank)
    model, optimizer = built(form)
    torch.manual_seed(rank)
    loader = Loader(rank)
    train(model, optimizer, loader, 2)
    path = autoshard.save_checkpoint(folder, model, optimizer, step=2, states={"loader": loader})
    assert path == Path(folder) / "step_00000002"
    train(model, optimizer, loader, 2)
    want = state(model, optimizer)

    model, optimizer = built(form, seed=9)
    random.seed(5)
    loader = Loader(7)
    assert autoshard.load_checkpoint(folder, model, optimizer, states={"loader": loader}) == 2
    assert (loader.rank, loader.at) == (rank, 2)
    train(model, optimizer, loader, 2)
    assert_equal(state(model, optimizer), want)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_other_numbers_of_ranks(world: int, folder: str) -> None:
    """Saved by 2, loaded by others, saved by those, and loaded by 2: the same, bit for bit."""
    _saved_by_two(folder=folder)
    {1: _again_by_one, 3: _again_by_three, 4: _again_by_four}[world](folder=folder)
    _as_before(folder=folder)


@on_ranks(2)
def _saved_by_two(rank: int, folder: str) -> None:
    model, optimizer = built()
    train(model, optimizer, Loader(rank), 2)
    autoshard.save_checkpoint(folder, model, optimizer, step=2)
    whole = state(model, optimizer)
    if rank == 0:
        torch.save(whole, Path(folder) / "whole.pt")


def _again(rank: int, folder: str) -> None:
    model, optimizer = built(seed=3)
    with pytest.warns(RuntimeWarning, match="was saved by 2 ranks"):
        assert autoshard.load_checkpoint(folder, model, optimizer) == 2
    assert_equal(state(model, optimizer), torch.load(Path(folder) / "whole.pt"))
    autoshard.save_checkpoint(folder, model, optimizer, step=3, keep=1)
    assert not (Path(folder) / "step_00000002").exists()


@on_ranks(1)
def _again_by_one(rank: int, folder: str) -> None:
    _again(rank, folder)


@on_ranks(3)
def _again_by_three(rank: int, folder: str) -> None:
    _again(rank, folder)


@on_ranks(4)
def _again_by_four(rank: int, folder: str) -> None:
    _again(rank, folder)


@on_ranks(2)
def _as_before(rank: int, folder: str) -> None:
    model, optimizer = built(seed=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert autoshard.load_checkpoint(folder, model, optimizer) == 3
    assert_equal(state(model, optimizer), torch.load(Path(folder) / "whole.pt"))


class Spare(Net):
    """A layer is never used: AdamW has no state for it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 2)


@on_ranks(2)
def test_parameters_without_state(rank: int, folder: str) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = autoshard.shard(Spare())
        return model, adamw(model)

    model, optimizer = made()
    train(model, optimizer, Loader(rank), 2)
    autoshard.save_checkpoint(folder, model, optimizer, step=2)
    other, its_optimizer = made()
    assert autoshard.load_checkpoint(folder, other, its_optimizer) == 2
    assert other.spare.weight not in its_optimizer.state
    assert_equal(state(other, its_optimizer), state(model, optimizer))
    train(other, its_optimizer, Loader(rank), 1)  # goes back, to where some had none yet
    its_optimizer.state[other.spare.weight] = dict(its_optimizer.state[other.embed.weight])
    assert autoshard.load_checkpoint(folder, other, its_optimizer) == 2
    assert_equal(state(other, its_optimizer), state(model, optimizer))


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("make", [adamw, decayed])
@in_both_forms
@on_ranks(2)
def test_no_step_is_taken(rank: int, form: str, make: Any, folder: str) -> None:
    """Not by saving before the first step, with or without gradients, nor by loading in vain."""

    def made(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
        model, _ = built(form, seed=seed)
        return model, make(model)

    def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        torch.manual_seed(rank)
        random.seed(rank)
        train(model, optimizer, Loader(rank), 2)
        return state(model, optimizer)

    want = trained(*made())
    model, optimizer = made()
    path = autoshard.save_checkpoint(folder, model, optimizer, step=0)
    net_loss(model, rank, 0).backward()
    autoshard.save_checkpoint(folder, model, optimizer, step=0)
    optimizer.zero_grad()
    with pytest.raises(autoshard.CheckpointError, match="another model"):
        autoshard.load_checkpoint(folder, autoshard.shard(nn.Linear(3, 3)), None)
    other = decayed(model) if make is adamw else adamw(model)
    with pytest.raises(autoshard.CheckpointError, match="type that was saved"):
        autoshard.load_checkpoint(folder, model, other)
    assert not optimizer.state
    assert not other.state
    assert_equal(trained(model, optimizer), want)

    model, optimizer = made(seed=4)
    autoshard.load_checkpoint(path.parent, model, optimizer)
    assert not optimizer.state
    assert_equal(trained(model, optimizer), want)


@on_ranks(2)
def test_groups_in_another_order(rank: int, folder: str) -> None:
    """Each gets the values of that with its parameters."""

    def made(*names: str) -> tuple[Any, torch.optim.Optimizer]:
        model = autoshard.shard(Net(tied=False))
        groups = [{"params": list(getattr(model, name).parameters())} for name in names]
        return model, torch.optim.AdamW(groups)

    model, optimizer = made("layers", "head")
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, 0.25
    autoshard.save_checkpoint(folder, model, optimizer, step=0)
    model, optimizer = made("head", "layers")
    autoshard.load_checkpoint(folder, model, optimizer)
    assert [(g["lr"], len(g["params"])) for g in optimizer.param_groups] == [(0.25, 1), (0.5, 18)]


@on_ranks(2)
def test_numbers_of_numpy(rank: int, folder: str) -> None:
    """A schedule may calculate with them; a checkpoint that has one could not be loaded."""
    numpy = pytest.importorskip("numpy")

    def made() -> tuple[Any, ...]:
        model, optimizer = built()
        factor = lambda step: 0.5 + 0.5 * numpy.cos(step)  # noqa: E731
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    model, optimizer, schedule = made()
    train(model, optimizer, Loader(rank), 1)
    schedule.step()
    assert isinstance(optimizer.param_groups[0]["lr"], numpy.float64)
    states = {"schedule": schedule}
    autoshard.save_checkpoint(folder, model, optimizer, step=1, states=states)
    _, optimizer, _ = again = made()
    autoshard.load_checkpoint(folder, *again[:2], states={"schedule": again[2]})
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["lr"] == 1e-2 * (0.5 + 0.5 * numpy.cos(1))
    assert again[2].last_epoch == 1


@on_ranks(2)
def test_what_is_kept(rank: int, folder: str) -> None:
    model, _ = built()
    assert autoshard.load_checkpoint(folder, model) is None
    for step in (1, 2, 10, 10):
        autoshard.save_checkpoint(folder, model, step=step)
    assert _names(folder) == ["step_00000010", "step_00000010.1"]
    assert autoshard.load_checkpoint(folder, model) == 10
    autoshard.save_checkpoint(folder, model, step=3, keep=2)  # it went back to one before
    assert _names(folder) == ["step_00000003", "step_00000010.1"]
    assert autoshard.load_checkpoint(folder, model) == 3
    assert autoshard.load_checkpoint(folder, model, step=10) == 10


@on_ranks(2)
def test_checkpoints_of_another_run_stay(rank: int, folder: str) -> None:
    model, optimizer = built()
    for step in (10, 20):
        autoshard.save_checkpoint(folder, model, optimizer, step=step)
    _runs.clear()  # as in a new process
    with pytest.warns(RuntimeWarning, match="another run") if rank == 0 else nullcontext():
        autoshard.save_checkpoint(folder, model, optimizer, step=1)
    for step in (2, 3):
        autoshard.save_checkpoint(folder, model, optimizer, step=step)
    theirs = ["step_00000010", "step_00000020"]
    assert _names(folder) == ["step_00000002", "step_00000003", *theirs]
    _runs.clear()
    assert autoshard.load_checkpoint(folder, model, optimizer, step=20) == 20
    autoshard.save_checkpoint(folder, model, optimizer, step=21)  # goes on with theirs
    assert _names(folder) == ["step_00000002", "step_00000003", "step_00000020", "step_00000021"]


def test_shards_among_states(folder: str) -> None:
    """Of another optimizer: for as many ranks only."""
    _with_another_optimizer(folder=folder)
    _with_another_optimizer_on_three(folder=folder)


@on_ranks(2)
def _with_another_optimizer(rank: int, folder: str) -> None:
    model, optimizer = built()
    train(model, optimizer, Loader(rank), 2)
    want = state(model, optimizer)
    autoshard.save_checkpoint(folder, model, step=2, states={"AdamW": optimizer})
    model, optimizer = built(seed=5)
    autoshard.load_checkpoint(folder, model, states={"AdamW": optimizer})
    assert_equal(state(model, optimizer), want)


@on_ranks(3)
def _with_another_optimizer_on_three(rank: int, folder: str) -> None:
    model, optimizer = built(seed=5)
    want = state(model, optimizer)
    with pytest.raises(autoshard.CheckpointError, match=r"'AdamW' has shards .* as 2 ranks"):
        autoshard.load_checkpoint(folder, model, states={"AdamW": optimizer})
    assert_equal(state(model, optimizer), want)


@on_ranks(2)
def test_a_save_between_micro_batches(rank: int, folder: str) -> None:
    """Before the first step: gradients that wait go on to."""

    def trained(*, saves: bool) -> list[Tensor]:
        model, optimizer = built()
        with model.no_sync():
            net_loss(model, rank, 0).backward()
        if saves:
            autoshard.save_checkpoint(folder, model, optimizer, step=0)
            autoshard.load_checkpoint(folder, model, optimizer)
        net_loss(model, rank, 1).backward()
        optimizer.step()
        return state(model, optimizer)

    assert_equal(trained(saves=True), trained(saves=False))


@on_ranks(2)
def test_what_a_killed_run_leaves(rank: int, folder: str) -> None:
    """A part is never loaded, and makes room for the next."""
    model, _ = built()
    autoshard.save_checkpoint(folder, model, step=1)
    autoshard.save_checkpoint(folder, model, step=2)
    if rank == 0:
        for run in (_runs[Path(folder).resolve()], "another"):
            left = Path(folder) / f".writing_00000003.{run}.gone"
            shutil.copytree(Path(folder) / "step_00000002", left)
        (Path(folder) / "step_00000002" / "__1_0.distcp").write_bytes(b"")
    dist.barrier()
    other, _ = built(seed=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert autoshard.load_checkpoint(folder, other) == 1
    told = [str(each.message) for each in caught if "not complete" in str(each.message)]
    assert len(told) == (1 if rank == 0 else 0)
    dist.barrier()
    autoshard.save_checkpoint(folder, model, step=4)
    for age_s, num_left in ((LEFT_S, 1), (ABANDONED_S, 0)):  # another run may be there, still
        dist.barrier()
        if rank == 0:
            assert len(list(Path(folder).glob(".writing*"))) == num_left + 1
            for each in Path(folder).glob(".writing*"):
                for path in (each, *each.iterdir()):
                    os.utime(path, (0.0, time.time() - age_s - 60))
        autoshard.save_checkpoint(folder, model, step=5)
        assert len(list(Path(folder).glob(".writing*"))) == num_left


@on_ranks(2)
def test_a_disk_that_is_full(rank: int, folder: str) -> None:
    """On one rank: all raise, and the one before is still there."""
    model, optimizer = built()
    autoshard.save_checkpoint(folder, model, optimizer, step=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(autoshard.CheckpointError, match=r"on rank 1, .*File too large"):
            autoshard.save_checkpoint(folder, model, optimizer, step=2)
        says = r"File too large \(no space left on device: 100 bytes are free\)"
        full = mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=100))
        with full, pytest.raises(autoshard.CheckpointError, match=says):
            autoshard.save_checkpoint(folder, model, optimizer, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert _names(folder) == ["step_00000001"]
    assert autoshard.load_checkpoint(folder, model, optimizer) == 1


@on_ranks(2)
def test_a_folder_that_cannot_be_written(rank: int, tmp_path: Path) -> None:
    model, _ = built()
    place = tmp_path / "a file"
    if rank == 0:
        place.write_text("")
    dist.barrier()
    with pytest.raises(autoshard.CheckpointError, match=r"on rank 0, .*a file"):
        autoshard.save_checkpoint(place / "checkpoints", model, step=1)


@on_ranks(2)
def test_another_model(rank: int, folder: str) -> None:
    model, optimizer = built()
    autoshard.save_checkpoint(folder, model, step=1)
    before = state(model, optimizer)
    with pytest.raises(autoshard.CheckpointError, match="no optimizer's state: load"):
        autoshard.load_checkpoint(folder, model, optimizer)
    with pytest.raises(autoshard.CheckpointError, match=r"no state of \['loader'\]"):
        autoshard.load_checkpoint(folder, model, states={"loader": Loader(0)})
    with pytest.raises(autoshard.CheckpointError, match=r"no complete checkpoint of step 3"):
        autoshard.load_checkpoint(folder, model, step=3)
    assert_equal(state(model, optimizer)[: len(before)], before)
    other = autoshard.shard(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(autoshard.CheckpointError, match=r"no parameter or buffer '0.weight'"):
        autoshard.load_checkpoint(folder, other)


@on_ranks(2)
def test_a_parameter_of_another_size(rank: int, folder: str) -> None:
    autoshard.save_checkpoint(folder, autoshard.shard(nn.Linear(3, 4)), step=1)
    with pytest.raises(autoshard.CheckpointError, match=r"'weight' has size \[4, 3\] there, and"):
        autoshard.load_checkpoint(folder, autoshard.shard(nn.Linear(4, 4)))


@on_ranks(2)
def test_another_optimizer(rank: int, folder: str) -> None:
    """SGD's states are no AdamW's."""
    model, _ = built()
    optimizer = sgd(model)
    train(model, optimizer, Loader(rank), 1)
    autoshard.save_checkpoint(folder, model, optimizer, step=1)
    model, optimizer = built()
    with pytest.raises(autoshard.CheckpointError, match="of the type that was saved"):
        autoshard.load_checkpoint(folder, model, optimizer)


@on_ranks(2)
def test_lbfgs(rank: int, folder: str) -> None:
    """It goes on with the history that was saved, whether it has none yet or another one."""

    def train_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(12.0).view(2, 6) / 9).tanh().sum().square()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return [param.to_local().clone() for param in model.parameters()]

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = autoshard.shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)))
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, history_size=4)

    torch.manual_seed(0)
    model, optimizer = begun()
    train_on(model, optimizer, 2)
    autoshard.save_checkpoint(folder, model, optimizer, step=2)
    wanted = train_on(model, optimizer, 2)
    for steps in (0, 1):
        model, optimizer = begun()
        train_on(model, optimizer, steps)
        assert autoshard.load_checkpoint(folder, model, optimizer) == 2
        assert_equal(train_on(model, optimizer, 2), wanted)
    autoshard.save_checkpoint(folder, model, adamw(model), step=3)
    with pytest.raises(autoshard.CheckpointError, match="optimizer's groups: give an optimizer"):
        autoshard.load_checkpoint(folder, model, optimizer)


@on_ranks(2)
def test_wrong_arguments(rank: int, folder: str) -> None:
    model, _ = built()
    with pytest.raises(ValueError, match="got step=-1"):
        autoshard.save_checkpoint(folder, model, step=-1)
    with pytest.raises(ValueError, match="keep=0"):
        autoshard.save_checkpoint(folder, model, step=1, keep=0)


class OfAKind:
    """No tensor, no number."""


@on_ranks(2)
def test_a_state_that_is_no_data(rank: int, folder: str) -> None:
    """On one rank alone: all raise."""
    model, _ = built()
    loader = Loader(rank)
    if rank == 1:
        loader.at = OfAKind()  # type: ignore[assignment]  # no number: what is to be refused
    with pytest.raises(autoshard.CheckpointError, match=r"on rank 1, .*weights only .*OfAKind"):
        autoshard.save_checkpoint(folder, model, step=1, states={"loader": loader})
    assert _names(folder) == []


@on_ranks(2, timeout=60.0)
def test_an_optimizer_that_one_rank_cannot_load(rank: int, folder: str) -> None:
    """All raise, and none waits for it."""
    model, optimizer = built()
    train(model, optimizer, Loader(rank), 1)
    autoshard.save_checkpoint(folder, model, optimizer, step=1)
    refused = mock.patch.object(optimizer, "load_state_dict", side_effect=OSError("no room"))
    with (
        refused if rank == 1 else nullcontext(),
        pytest.raises(autoshard.CheckpointError, match="on rank 1, OSError: no room"),
    ):
        autoshard.load_checkpoint(folder, model, optimizer)
    dist.barrier()  # none is left in a collective


class Attack:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, (f"{tempfile.gettempdir()}/autoshard_attack", "w"))


@on_ranks(2)
def test_an_index_with_code_in_it(rank: int, folder: str) -> None:
    model, _ = built()
    path = autoshard.save_checkpoint(folder, model, step=1)
    if rank == 0:
        (path / ".metadata").write_bytes(pickle.dumps(Attack()))
    dist.barrier()
    with pytest.raises(autoshard.CheckpointError, match=r"\.metadata is of another size"):
        autoshard.load_checkpoint(folder, model)
    if rank == 0:
        was = manifests.read(path)
        files = {**was.files, ".metadata": manifests.describe(path / ".metadata")}
        dataclasses.replace(was, files=files).write(path)
    dist.barrier()
    with pytest.raises(autoshard.CheckpointError, match="open has no place in"):
        autoshard.load_checkpoint(folder, model)
    assert not (Path(tempfile.gettempdir()) / "autoshard_attack").exists()


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


@in_both_forms
@on_ranks(2)
def test_running_statistics(rank: int, form: str, folder: str) -> None:
    """They are each rank's own: 2 + 2 steps are 4, for them, too."""

    def built() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = in_form(autoshard.shard(WithStatistics()), form)
        return model, sgd(model)

    def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + rank)
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    wanted = built()
    for number in range(4):
        step(*wanted, number)
    first = built()
    for number in range(2):
        step(*first, number)
    autoshard.save_checkpoint(folder, *first, step=2)
    second = built()
    assert autoshard.load_checkpoint(folder, *second) == 2
    for number in range(2, 4):
        step(*second, number)
    for name, value in wanted[0].named_buffers():
        assert torch.equal(dict(second[0].named_buffers())[name], value), name
    both: list[Any] = [None, None]
    dist.all_gather_object(both, second[0].norm.running_mean)
    assert not torch.equal(*both)


@on_ranks(2)
def test_a_dtype_that_rounds(rank: int, folder: str) -> None:
    autoshard.save_checkpoint(folder, autoshard.shard(nn.Linear(3, 4)), step=1)
    rounding = autoshard.shard(nn.Linear(3, 4).bfloat16())
    says = r"'weight' in torch\.float32, and the model has it in torch\.bfloat16 \(2 such tensors\)"
    with pytest.warns(RuntimeWarning, match=says) if rank == 0 else nullcontext():
        autoshard.load_checkpoint(folder, rounding)
    autoshard.load_checkpoint(folder, autoshard.shard(nn.Linear(3, 4).double()))


def _names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("step_*"))
