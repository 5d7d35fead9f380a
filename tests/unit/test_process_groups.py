"""Process groups that autoshard makes: what they ask of NCCL. No GPU is needed."""

from __future__ import annotations

import gc
import os
import weakref
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm import mesh


@pytest.mark.parametrize("given", [None, "0", "1"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_streams_of_high_priority(
    device: str, given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a group that autoshard makes on GPUs, unless the environment says otherwise."""
    monkeypatch.setattr(mesh, "at_exit", lambda work: None)
    monkeypatch.setattr(mesh, "device_type", lambda: device)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(mesh.HIGH_PRIORITY, "0")  # so that it is as before afterwards
    if given is None:
        del os.environ[mesh.HIGH_PRIORITY]
    else:
        os.environ[mesh.HIGH_PRIORITY] = given
    with mock.patch.object(dist, "init_process_group") as made:
        mesh.ensure_process_group()
    assert made.called
    want = given if given is not None or device == "cpu" else "1"
    assert os.environ.get(mesh.HIGH_PRIORITY) == want


class Group:
    """Group over ranks 0 and 1 whose NCCL backend was given these options."""

    group_name = "pair"

    def __init__(self, options: Any) -> None:
        self._device_types = [torch.device("cuda")]
        self.options = options

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self


class Options:
    """What a build of torch with NCCL has as `ProcessGroupNCCL.Options`."""

    _timeout = timedelta(seconds=5)

    def __init__(self, *, is_high_priority_stream: bool) -> None:
        self.is_high_priority_stream = is_high_priority_stream


@pytest.mark.parametrize("is_high", [False, True])
def test_a_second_group_has_the_priority_of_the_first(
    is_high: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options of this build of torch, or with a stand-in if it has no NCCL."""
    if not dist.is_nccl_available():
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), False)
    given = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_high)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    first: Any = Group(given)
    with mock.patch.object(dist, "new_group", return_value=mock.Mock(dist.ProcessGroup)) as made:
        _torch.dist.group_of_the_same_ranks(first, "reduces")
    options = made.call_args.kwargs["pg_options"]
    assert (options is not None) == is_high
    assert options is None or options.is_high_priority_stream


def test_groups_are_not_kept() -> None:
    """After the groups are destroyed nothing here holds one, whose threads would end with it."""
    _torch.dist.pretend_ranks(4)
    try:
        pairs = mesh.hybrid_mesh(2)
        axes = mesh.axes_of(mesh.default_mesh(), "shard")
        inner = mesh.smaller_axes(axes, 2)
        mesh.separate_group(axes)
        assert mesh.hybrid_mesh(2) is pairs
        assert mesh.smaller_axes(axes, 2).mesh is inner.mesh
        groups = [pairs.get_group("shard"), inner.mesh.get_group(), dist.group.WORLD]
        alive = [weakref.ref(group) for group in groups]
        del pairs, axes, inner, groups
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_restarts_over_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not mesh.restarts_over_one_store()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "again 3 times, over one store" in mesh.restarts_over_one_store()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in mesh.restarts_over_one_store()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert not mesh.restarts_over_one_store()
