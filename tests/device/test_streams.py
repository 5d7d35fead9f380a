"""Steps over the emulated link, on its own stream or thread: results are late, and waited for."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_link
import overlap
import pytest
import torch
import torch.distributed as dist
from support.link import COLLECTIVES, ON_GPU, RANK, WORLD, bench_of, on_each_device

from autoshard.runtime.comm import flights
from autoshard.tools.bench.contestants import autoshard_compiled, autoshard_eager

pytestmark = [
    pytest.mark.skipif(emulated_link.missing() is not None, reason=f"no {emulated_link.missing()}")
]


@pytest.fixture(scope="module", autouse=True)
def link() -> Iterator[None]:
    emulated_link.start(WORLD, rank=RANK, latency_us=0, gb_per_s=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def late() -> None:
    torch._dynamo.reset()
    emulated_link.set_link(latency_us=3e3, gb_per_s=1)


@on_each_device
@pytest.mark.parametrize("name", COLLECTIVES)
def test_values(name: str, device: str) -> None:
    run, expected = COLLECTIVES[name]
    found = run(torch.device(device)).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_each_device
def test_parity(device: str) -> None:
    """Eager and compiled steps are those of an unsharded model, bit for bit."""
    said = overlap.check(bench_of(device))
    assert said == "eager = unsharded; compiled = unsharded; bit for bit, 3 steps"


@on_each_device
def test_a_wait_that_is_missing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen: `test_parity` would fail."""
    monkeypatch.setattr(flights, "wait_for", lambda works, *about: None)
    with pytest.raises(AssertionError, match="differ"):
        overlap.check(bench_of(device), steps=1)


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("form", ["eager", "compiled"])
def test_memory_stays(device: str, form: str) -> None:
    """A step leaves behind what the one before it did, and the allocator waits for no stream
    before it hands out what was freed."""
    bench = bench_of(device, dim=64, hidden=256)
    contestant = autoshard_compiled if form == "compiled" else autoshard_eager
    model = bench.build(contestant, lowering="eager")
    left = []
    for _ in range(4):
        bench.step(model)
        found = torch.cuda.memory_stats()
        assert found["active_bytes.all.current"] == found["allocated_bytes.all.current"]
        torch.cuda.synchronize()
        left.append(torch.cuda.memory_allocated())
    assert len(set(left[1:])) == 1
