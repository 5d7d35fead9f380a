"""Updates whose states live on the host take place as plans say."""

from __future__ import annotations

import doctest
import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import on_ranks
from torch import Tensor, optim

import autoshard
from autoshard.passes.planner import update
from autoshard.passes.planner.costs import HostLink
from autoshard.passes.planner.update import ON_DEVICE, buckets_of, update_from_host
from autoshard.runtime.training import host_states

LINK = HostLink(alpha_us=3.0, us_per_byte=0.5, call_us=0.0)
buckets = st.lists(st.tuples(st.integers(1, 100), st.floats(0.1, 100.0)), max_size=8)


def test_doctests() -> None:
    assert doctest.testmod(update).failed == 0


@given(buckets)
def test_bounds(given: list[tuple[int, float]]) -> None:
    """No faster than a direction of the link, nor than the device; no slower than one by one."""
    sizes, compute_us = [each for each, _ in given], [each for _, each in given]
    found = update_from_host(sizes, compute_us, LINK)
    copies_us = sum(map(LINK.time_us, sizes))
    assert found.time_us >= max(copies_us, sum(compute_us))
    assert found.time_us <= 2 * copies_us + sum(compute_us) + 1e-6
    together = [sum(sizes[at : at + ON_DEVICE]) for at in range(len(sizes))]
    assert found.peak_bytes == max(together, default=0)


@given(st.lists(st.integers(0, 100)), st.integers(1, 300))
def test_buckets(sizes: list[int], bucket_bytes: int) -> None:
    found = buckets_of(sizes, bucket_bytes)
    assert sum(found) == sum(sizes)
    assert all(each >= bucket_bytes for each in found[:-1])


class Clock:
    """Streams of a device on which time passes by copies and updates alone."""

    def __init__(self, compute_us: float) -> None:
        self.now = {"load": 0.0, "compute": 0.0, "store": 0.0}
        self.compute_us = compute_us
        self.sizes: list[int] = []

    def run(self, stream: str, took: float) -> float:
        begin = max(self.now[stream], self.now["compute"])
        self.now[stream] = begin + took
        return self.now[stream]

    def load(self, tensors: list[Tensor], device: torch.device) -> Any:
        self.sizes.append(sum(each.nbytes for each in tensors))
        end = self.run("load", LINK.time_us(self.sizes[-1]))
        return mock.Mock(results=tensors, wait_on_device=lambda: self.wait(end))

    def store(self, sources: list[Tensor], targets: list[Tensor]) -> Any:
        end = self.run("store", LINK.time_us(sum(each.nbytes for each in sources)))
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return mock.Mock(release=lambda: self.wait(end))

    def wait(self, until: float) -> None:
        self.now["compute"] = max(self.now["compute"], until)

    def step(self, *args: Any) -> None:
        self.run("compute", self.compute_us)


@pytest.mark.parametrize("compute_us", [1.0, 20.0, 100.0])
@pytest.mark.parametrize(("layers", "seed"), [(1, 0), (3, 0), *((9, seed) for seed in range(6))])
@on_ranks(1)
def test_an_update_takes_what_the_plan_says(
    rank: int, layers: int, seed: int, compute_us: float
) -> None:
    drawn = random.Random(seed)
    sizes = [drawn.randint(1, 60) for _ in range(layers)]
    model = torch.nn.Sequential(*[torch.nn.Linear(size, 1, bias=False) for size in sizes])
    policy = autoshard.OptimizerOffloadPolicy(bucket_bytes=1)
    autoshard.shard(model, offload_policy=policy)
    optimizer = optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    clock = Clock(compute_us)
    with (
        mock.patch.object(host_states, "launch_load", clock.load),
        mock.patch.object(host_states, "launch_store", clock.store),
        mock.patch.object(host_states, "replace", lambda copies, **_: copies),
        mock.patch.object(autoshard._torch.nn, "unhooked_step", return_value=clock.step),
    ):
        optimizer.step()
    assert clock.sizes == [8 * size for size in sizes]
    found = update_from_host(clock.sizes, [compute_us] * layers, LINK)
    assert clock.now["compute"] == pytest.approx(found.time_us)
