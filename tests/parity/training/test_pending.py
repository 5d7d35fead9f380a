"""Saves that are written while training goes on: what they have, and what is told of failures."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import unfinished, warm
from support.ranks import free_port, in_processes, on_ranks
from support.resumed import Loader, assert_equal, built, state, train
from support.training import in_both_forms, in_form, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autoshard
from autoshard.runtime.training.checkpoint import manifest as manifests
from autoshard.runtime.training.checkpoint import pending, planning, saving
from autoshard.runtime.training.checkpoint.folder import verify
from autoshard.runtime.training.checkpoint.reports import Reports
from autoshard.runtime.training.checkpoint.writing import Task


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints")


@contextmanager
def held() -> Iterator[threading.Event]:
    """No file is written until the event is set, at the end of the context at the latest."""
    go, write = threading.Event(), Task.write

    def write_later(task: Task) -> Any:
        assert go.wait(60)
        return write(task)

    with mock.patch.object(Task, "write", write_later):
        yield go
        go.set()
        if pending._pending:
            pending._pending[0]._thread.join()


class Noisy(nn.Module):
    """Dropout, running statistics, and an extra state that changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(6, 5)
        self.seen = {"batches": [0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.norm(x)))

    def get_extra_state(self) -> dict[str, list[int]]:
        return self.seen

    def set_extra_state(self, state: dict[str, list[int]]) -> None:
        self.seen = state


@in_both_forms
@on_ranks(2)
def test_it_is_what_a_blocking_save_has(rank: int, form: str, folder: str) -> None:
    """Parameters, averages, buffers, generators, objects; all change before it is written."""

    def made() -> tuple[Any, ...]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = in_form(autoshard.shard(Noisy()), form)
        return model, sgd(model), Loader(rank)

    def step(model: Any, optimizer: torch.optim.Optimizer, loader: Loader) -> None:
        model(torch.randn(4, 6) + random.random()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen["batches"][0] += 1
        optimizer.param_groups[0]["lr"] *= 0.5
        loader.at += 1

    def loaded(place: str) -> list[Any]:
        model, optimizer, loader = made()
        assert autoshard.load_checkpoint(place, model, optimizer, states={"loader": loader}) == 2
        generators = [torch.rand(3), random.random()]
        return [
            state(model, optimizer),
            [buffer.tolist() for buffer in model.buffers()],
            *(generators[0].tolist(), generators[1], model.seen, loader.at),
            optimizer.param_groups[0]["lr"],
        ]

    model, optimizer, loader = made()
    torch.manual_seed(rank)
    random.seed(rank)
    for _ in range(2):
        step(model, optimizer, loader)
    saved = {"step": 2, "states": {"loader": loader}}
    autoshard.save_checkpoint(f"{folder}/blocking", model, optimizer, **saved)
    with held():
        later = autoshard.save_checkpoint(f"{folder}/later", model, optimizer, wait=False, **saved)
        assert not later.done()
        step(model, optimizer, loader)
        assert not list(Path(folder, "later").glob("step_*"))
    assert later.wait() == Path(folder, "later", "step_00000002")
    assert later.done()
    wanted, got = loaded(f"{folder}/blocking"), loaded(f"{folder}/later")
    assert_equal(got.pop(0), wanted.pop(0))
    assert got == wanted
    names = [
        sorted(path.name for path in Path(folder, each, "step_00000002").iterdir())
        for each in ("blocking", "later")
    ]
    assert names[0] == names[1]


class Held:
    """State of a tensor, which is given out as it is."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(2)

    def state_dict(self) -> Any:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: Any) -> None:
        self.tensor = state["tensor"]


@on_ranks(2)
def test_tensors_that_change_in_place(rank: int, folder: str) -> None:
    """Among `states`, and in an extra state; what is written has digests."""
    model, own = autoshard.shard(Noisy()), Held()
    model.seen = {"batches": (torch.zeros(2),)}
    with held():
        later = autoshard.save_checkpoint(folder, model, step=1, states={"own": own}, wait=False)
        own.tensor += 1
        model.seen["batches"][0].add_(1)
    path = later.wait()
    assert autoshard.load_checkpoint(folder, model, states={"own": own}) == 1
    assert [own.tensor.tolist(), model.seen["batches"][0].tolist()] == [[0.0, 0.0]] * 2
    file = path / f"__{rank}_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    dist.barrier()
    found = verify(path)[path.name]
    assert isinstance(found, str)
    assert "__0_0.distcp" in found


@on_ranks(2)
def test_another_run_between_two_saves(rank: int, folder: str) -> None:
    """The next save is of the run that was loaded; what was told of the first one is deleted."""
    model, _ = built()
    first = autoshard.save_checkpoint(folder, model, step=1, wait=False)
    manifest = manifests.read(first.wait())
    dist.barrier()
    if rank == 0:
        dataclasses.replace(manifest, run="another").write(Path(folder, "step_00000001"))
    assert autoshard.load_checkpoint(folder, model) == 1
    second = autoshard.save_checkpoint(folder, model, step=2, wait=False)
    assert manifests.read(second.wait()).run == "another"
    dist.barrier()
    assert first._reports is not None
    assert second._reports is not None
    assert [each._reports.is_answered() for each in (first, second)] == [False, True]
    with mock.patch.object(Reports, "linger") as linger:
        pending._end_last()
    assert linger.call_count == (rank == 0)


@on_ranks(2)
def test_what_a_plan_depends_on(rank: int) -> None:
    """Names, sizes, dtypes and layouts."""
    mesh = init_device_mesh("cpu", (2,))
    each = [
        {"a": torch.zeros(4)},
        {"b": torch.zeros(4)},
        {"a": torch.zeros(5)},
        {"a": torch.zeros(4, dtype=torch.float64)},
        {"a": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])},
        {"a": distribute_tensor(torch.zeros(4), mesh, [Replicate()])},
    ]
    signatures = [planning.signature_of(state) for state in each]
    assert all(a != b for a, b in itertools.combinations(signatures, 2))


@on_ranks(2)
def test_another_working_directory(rank: int, tmp_path: Path) -> None:
    """It is written where its folder was as it was saved."""
    model, _ = built()
    with chdir(tmp_path), held():
        later = autoshard.save_checkpoint("saved", model, step=1, wait=False)
        Path("elsewhere").mkdir(exist_ok=True)
        os.chdir("elsewhere")
    assert later.wait() == tmp_path / "saved" / "step_00000001"
    dist.barrier()
    assert names(str(tmp_path / "saved")) == ["step_00000001"]


@in_both_forms
@on_ranks(2)
def test_five_steps_and_five(rank: int, form: str, folder: str) -> None:
    """They are ten, though others were taken while the files were written."""

    def begun(seed: int) -> tuple[Any, ...]:
        model, optimizer = built(form, seed=seed)
        torch.manual_seed(rank)
        random.seed(rank)
        return model, optimizer, Loader(rank)

    model, optimizer, loader = begun(0)
    train(model, optimizer, loader, 10)
    wanted = state(model, optimizer)
    model, optimizer, loader = begun(0)
    train(model, optimizer, loader, 5)
    autoshard.save_checkpoint(
        folder, model, optimizer, step=5, states={"loader": loader}, wait=False
    )
    train(model, optimizer, loader, 2)
    model, optimizer, loader = begun(7)
    assert autoshard.load_checkpoint(folder, model, optimizer, states={"loader": loader}) == 5
    train(model, optimizer, loader, 5)
    assert_equal(state(model, optimizer), wanted)


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_a_model_that_is_not_sharded(rank: int, wait: bool, folder: str) -> None:
    """Each rank has its own buffers again; numbers of NumPy in an extra state become Python's."""
    model, other = Noisy(), Noisy()
    model.norm.running_mean.fill_(rank + 1.0)
    model.seen = {"batches": [np.int64(3)]}
    saved = autoshard.save_checkpoint(folder, model, step=1, wait=wait)
    assert (saved if isinstance(saved, Path) else saved.wait()).name == "step_00000001"
    assert autoshard.load_checkpoint(folder, other) == 1
    assert other.norm.running_mean.tolist() == [rank + 1.0] * 6
    assert [type(each) for each in other.seen["batches"]] == [int]


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_what_is_refused_leaves_nothing(rank: int, wait: bool, folder: str) -> None:
    """An object that is no data, on one rank, and a buffer that nothing can be read into."""
    model, loader = autoshard.shard(nn.Linear(4, 4)), Loader(rank)
    loader.at = object() if rank == 1 else 0  # type: ignore[assignment]  # what is to be refused
    with pytest.raises(autoshard.CheckpointError, match=r"on rank 1, .*weights only"):
        autoshard.save_checkpoint(folder, model, step=1, states={"loader": loader}, wait=wait)
    model.register_buffer("same", torch.ones(1).expand(3))
    with pytest.raises(autoshard.CheckpointError, match="'same' could not be loaded: elements"):
        autoshard.save_checkpoint(folder, model, step=1, wait=wait)
    dist.barrier()
    assert not list(Path(folder).glob(".writing*"))


@on_ranks(2)
def test_one_after_the_other(rank: int, folder: str) -> None:
    """The next waits for the one before; what is planned is planned once, until it changes."""
    model, optimizer = built()
    train(model, optimizer, Loader(rank), 1)
    with mock.patch.object(saving, "plan_together", wraps=planning.plan_together) as plans:
        for step in range(4):
            autoshard.save_checkpoint(folder, model, optimizer, step=step, wait=False)
            train(model, optimizer, Loader(rank), 1)
        assert plans.call_count == 1
        autoshard.save_checkpoint(folder, model, step=4)
        assert names(folder) == ["step_00000003", "step_00000004"]
        kept = planning.kept_of(model).copies
        places = {name: copy.data_ptr() for name, copy in kept.items()}
        other = built(seed=3)
        assert autoshard.load_checkpoint(folder, *other, step=3) == 3
        autoshard.save_checkpoint(folder, model, optimizer, step=5, wait=False)
        assert {name: copy.data_ptr() for name, copy in kept.items()} == places
        autoshard.save_checkpoint(folder, model, step=6, wait=False).wait()
        assert plans.call_count == 2  # without the optimizer it is another


@on_ranks(2)
def test_copies_are_made_while_others_come(rank: int, folder: str, tmp_path: Path) -> None:
    """Rank 1 finds its state once rank 0 has copied; later, it has kept no plan, and rank 0 has."""
    model, optimizer = built()
    train(model, optimizer, Loader(rank), 1)
    autoshard.save_checkpoint(folder, model, optimizer, step=0, wait=False)
    has_copied, own_state, copied = tmp_path / "has copied", saving.own_state, saving.copied

    def find_late(*args: Any) -> Any:
        """Find the state once rank 0 has copied its own."""
        deadline = time.monotonic() + 20
        while not has_copied.exists():
            assert time.monotonic() < deadline, "rank 0 has not copied"
            time.sleep(0.01)
        return own_state(*args)

    def copy(*args: Any) -> Any:
        """Copy, and say so."""
        found = copied(*args)
        has_copied.touch()
        return found

    late = ("own_state", find_late) if rank == 1 else ("copied", copy)
    with mock.patch.object(saving, *late):
        autoshard.save_checkpoint(folder, model, optimizer, step=1, wait=False)
    train(model, optimizer, Loader(rank), 1)
    if rank == 1:
        planning.kept_of(model).signature.clear()
    saved = autoshard.save_checkpoint(folder, model, optimizer, step=2, wait=False)
    wanted = state(model, optimizer)
    train(model, optimizer, Loader(rank), 1)
    assert saved.wait() == Path(folder) / "step_00000002"
    assert autoshard.load_checkpoint(folder, model, optimizer) == 2
    assert_equal(state(model, optimizer), wanted)


@pytest.mark.parametrize(
    ("told", "what"), [("save", "write"), ("load", "write"), ("wait", "write"), ("wait", "copy")]
)
@on_ranks(2)
def test_one_rank_cannot_write(rank: int, told: str, what: str, folder: str) -> None:
    """Or copy: all are told at the next call, once; what was there stays, and later saves work."""
    model, optimizer = built()
    train(model, optimizer, Loader(rank), 1)
    autoshard.save_checkpoint(folder, model, optimizer, step=1, wait=False)
    before = state(model, optimizer)
    where: Any = {"write": (Task, "write"), "copy": (saving, "copied")}[what]
    full = mock.patch.object(*where, side_effect=OSError("no room"))
    with ExitStack() as until_told:
        if rank == 1:
            until_told.enter_context(full)
        with nullcontext() if rank == 1 else held():
            later = autoshard.save_checkpoint(folder, model, optimizer, step=2, wait=False)
        check_is_told(rank, told, later, folder, model, optimizer)
    assert later.done()
    assert names(folder) == ["step_00000001"]
    dist.barrier()
    assert not list(Path(folder).glob(".writing*"))
    assert autoshard.load_checkpoint(folder, model, optimizer) == 1
    assert_equal(state(model, optimizer), before)
    autoshard.save_checkpoint(folder, model, optimizer, step=4, wait=False).wait()
    assert names(folder) == ["step_00000001", "step_00000004"]


def check_is_told(
    rank: int, told: str, later: Any, folder: str, model: Any, optimizer: torch.optim.Optimizer
) -> None:
    """After a step, the next call tells that rank 1 could not write."""
    train(model, optimizer, Loader(rank), 1)
    calls = {
        "save": lambda: autoshard.save_checkpoint(folder, model, optimizer, step=3),
        "load": lambda: autoshard.load_checkpoint(folder, model, optimizer),
        "wait": later.wait,
    }
    says = rf"rank {rank}: .* step 2 .* on rank 1, OSError: no room.*still there; make room"
    with pytest.raises(autoshard.CheckpointError, match=says):
        calls[told]()


@on_ranks(2)
def test_a_disk_that_is_full(rank: int, folder: str) -> None:
    model, _ = built()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        later = autoshard.save_checkpoint(folder, model, step=2, wait=False)
        with pytest.raises(autoshard.CheckpointError, match=r"on rank 1, OSError: .*too large"):
            later.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@on_ranks(2)
def test_a_folder_that_vanishes(rank: int, folder: str) -> None:
    model, _ = built()
    with held() as go:
        later = autoshard.save_checkpoint(folder, model, step=2, wait=False)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
        go.set()
        with pytest.raises(autoshard.CheckpointError, match=r"on rank 0, .* is not there"):
            later.wait()


@on_ranks(2)
def test_what_is_told_at_once(rank: int, folder: str, tmp_path: Path) -> None:
    """On all ranks: a state that is no data, a folder that can't be made, other arguments."""
    model, _ = built()
    loader = Loader(rank)
    loader.at = object() if rank == 1 else 0  # type: ignore[assignment]  # what is to be refused
    with pytest.raises(autoshard.CheckpointError, match=r"on rank 1, .*can't be pickled|weights"):
        autoshard.save_checkpoint(folder, model, step=1, states={"loader": loader}, wait=False)
    place = tmp_path / "a file"
    if rank == 0:
        place.write_text("")
    dist.barrier()
    with pytest.raises(autoshard.CheckpointError, match=r"on rank 0, .*a file"):
        autoshard.save_checkpoint(place / "checkpoints", model, step=1, wait=False)
    with pytest.raises(RuntimeError, match="wait=False"):
        autoshard.save_checkpoint(folder, model, step=1, wait=rank == 0)  # type: ignore[call-overload]
    assert names(folder) == []


@on_ranks(2)
def test_a_rank_that_does_not_report(rank: int, folder: str) -> None:
    """Others wait as long as they wait for each other, and name it."""
    model, _ = built()
    with held() as go:
        later = autoshard.save_checkpoint(folder, model, step=2, wait=False)
        assert later._reports is not None
        if rank == 0:
            go.set()
            later._reports.limit_s = 0.5
            with pytest.raises(autoshard.CheckpointError, match="on rank 1, nothing was heard"):
                later.wait()
        dist.barrier()
    with pytest.raises(autoshard.CheckpointError, match="on rank 1, nothing was heard"):
        later.wait()
    dist.barrier()
    assert names(folder) == []


@on_ranks(2)
def test_a_store_that_is_lost(rank: int, folder: str) -> None:
    """Rank 0 knows that it has published; the other one can't, and does not say that it failed."""
    model, _ = built()
    lost = mock.Mock(side_effect=dist.DistNetworkError("gone"))
    with mock.patch.multiple(Reports, answer=lost, heard=lost):
        later = autoshard.save_checkpoint(folder, model, step=2, wait=False)
        if rank == 0:
            assert later.wait() == Path(folder, "step_00000002")
        else:
            with pytest.raises(autoshard.CheckpointError, match=r"may be complete or not: .*gone"):
                later.wait()
    dist.barrier()
    with mock.patch.object(Reports, "add", lost):
        later = autoshard.save_checkpoint(folder, model, step=3, wait=False)
        says = "not be written" if rank == 0 else "or not: the store"
        with pytest.raises(autoshard.CheckpointError, match=says):
            later.wait()
    dist.barrier()
    assert names(folder) == ["step_00000002"]


@pytest.mark.timeout(300)
def test_killed_while_writing(tmp_path: Path) -> None:
    """The one before is loaded; what the killed have left is in nobody's way."""
    assert in_processes(unfinished.kill, str(tmp_path)) == [None, None]
    assert [path.name[:17] for path in tmp_path.glob(".writing*")] == [".writing_00000002"]
    found = in_processes(unfinished.go_on, str(tmp_path))
    assert found == [(1, 1.0, ["step_00000001", "step_00000003"])] * 2


AT_THE_END = {
    "nothing": "",
    "its own end": "dist.destroy_process_group()",
    "an exception": "raise RuntimeError('it is over')",
    "that of a forked process": unfinished.FORK,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", AT_THE_END.values(), ids=AT_THE_END.keys())
def test_at_exit(end: str, tmp_path: Path) -> None:
    """It is there without a further call."""
    code = unfinished.SCRIPT.format(folder=str(tmp_path), before="", end=end)
    ended = run_ranks(code)
    assert [number == 0 for number, _ in ended] == ["raise" not in end] * 2, ended
    assert names(str(tmp_path)) == ["step_00000005"]


@pytest.mark.timeout(300)
def test_a_failure_at_exit(tmp_path: Path) -> None:
    code = unfinished.SCRIPT.format(folder=str(tmp_path), before=unfinished.NO_ROOM, end="")
    for rank, (_, said) in enumerate(run_ranks(code)):
        assert f"CheckpointError: rank {rank}: the checkpoint of step 5" in said
        assert "on rank 1, OSError: no room" in said
    assert names(str(tmp_path)) == []


def run_ranks(code: str) -> list[tuple[int, str]]:
    """The exit status of two ranks that run `code`, and what they say."""
    of_all = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    of_all |= {"MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [warm.python(), "-c", code],
            env={**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [each.communicate(timeout=240)[1] for each in ranks]
    return [(each.returncode, text) for each, text in zip(ranks, said, strict=True)]


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("step_*"))


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield
