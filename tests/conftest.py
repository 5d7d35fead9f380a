"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from support import extras, warm

settings.register_profile("short", max_examples=75, deadline=None)
# pytest --hypothesis-profile=long --hypothesis-seed=1 tests/property
settings.register_profile("long", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("short")

extras.leave_out()

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def pytest_configure(config: pytest.Config) -> None:
    """Have all workers, and their ranks, start copies of one process that has imported torch."""
    if not hasattr(config, "workerinput"):
        warm.start()


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare text with golden/<name>; EXPECTTEST_ACCEPT=1 writes the file instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("EXPECTTEST_ACCEPT"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden/{name}: run with EXPECTTEST_ACCEPT=1 and read the diff"
        assert text == path.read_text(), (
            f"golden/{name} has changed: if that is meant, run with EXPECTTEST_ACCEPT=1"
        )

    return check


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rank 0 of 2, or of as many as the fixture's parameter says, in a group that moves no data:
    for tracing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch._dynamo.reset()
    world_size = getattr(request, "param", 2)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Rank 0 of two that never talk: enough for shapes."""
    from support.programs import WORLD
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def group_of_one(process_group: None) -> str:
    return str(dist.new_group([0]).group_name)
