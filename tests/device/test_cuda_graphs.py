"""A whole step in one CUDA graph: forward, backward and optimizer, replayed on other batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import emulated_link
import pytest
import torch
import torch.distributed as dist
from support.link import ON_GPU, RANK, WORLD, bench_of
from torch import Tensor

from autoshard import _torch
from autoshard.tools.bench.contestants import autoshard_compiled, autoshard_eager

FORMS = {
    "eager": (autoshard_eager, {}),
    "compiled": (autoshard_compiled, {}),
    "compiled, not lowered": (autoshard_compiled, {"lowering": "eager"}),
}
WARM_UP = 3  # steps, as capturing wants all memory and all code to be there
STEPS = 4


@pytest.fixture
def ends() -> Iterator[None]:
    """Without what was compiled before; the process group of the test ends with it."""
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


def _over_nccl() -> None:
    """Begin a group of one rank of NCCL's."""
    dist.init_process_group("nccl", rank=0, world_size=1, store=_torch.dist.HashStore())


def _over_link() -> None:
    """Begin a group of the emulated link, whose results come late."""
    if (missing := emulated_link.missing()) is not None:
        pytest.skip(f"no {missing}")
    emulated_link.start(WORLD, rank=RANK, latency_us=1e3, gb_per_s=1)


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("begin", [_over_nccl, _over_link])
def test_a_captured_step(begin: Callable[[], None], form: str, device: str, ends: None) -> None:
    """It has the losses and the parameters of steps that are not captured, bit for bit."""
    begin()
    assert _train(form, device, is_captured=True) == _train(form, device, is_captured=False)


def _train(form: str, device: str, *, is_captured: bool) -> list[list[float]]:
    contestant, options = FORMS[form]
    bench = bench_of(device, dim=64, hidden=256)
    model = bench.build(contestant, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    x = bench.batch["x"].clone()

    def step() -> Tensor:
        loss: Tensor = model(x=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    _beside(step)
    call: Callable[[], Any] = step
    if is_captured:
        graph, loss = torch.cuda.CUDAGraph(), torch.empty(0)
        with torch.cuda.graph(graph):
            loss = step()

        def replay() -> Tensor:
            graph.replay()
            return loss

        call = replay
    found = []
    for number in range(STEPS):
        x.copy_(bench.work.batch(number)["x"])
        found.append([call().item()])
    shards = [parameter.to_local() for parameter in model.parameters()]
    return [*found, *(shard.detach().flatten().tolist() for shard in shards)]


def _beside(step: Callable[[], Tensor]) -> None:
    """Warm up on a stream of its own, as `torch.cuda.graph` asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(stream)
