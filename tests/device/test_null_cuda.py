"""What the CUDA path does, counted on a device that does nothing (`make null-cuda`).

Rank 0 of several, of whom the others are imagined: no number means anything.
"""

from __future__ import annotations

import gc
import operator
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_time import Net
from support.null_cuda import device as null
from support.topologies import where_the_host_is_near
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.artefacts.make import make

pytestmark = pytest.mark.skipif(
    not null.is_there(), reason="there is no null CUDA device: make null-cuda"
)

BLOCKS, DIM = 4, 64
WARM_UP = 4  # steps, of which the first compile


Step = Callable[[], None]
MIXED = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # ranks, rows of the wide layers, arguments
    "even rows": (8, 256, {}),
    "rows that don't divide": (64, 253, {}),
    "bf16, reduced in f32": (8, 256, {"mp_policy": MIXED}),
    "offload": (8, 256, {"offload_policy": fsdp.CPUOffloadPolicy()}),
}


class Words(Net):
    """`Net` of a wider vocabulary, with the loss in float32: what Inductor never has in memory."""

    MANY = 16_384

    def __init__(self) -> None:
        super().__init__(BLOCKS, 1024, 4096)
        self.head = nn.Linear(1024, self.MANY)

    def forward(self, words: Tensor) -> Tensor:
        logits = super().forward(words)
        return F.cross_entropy(logits.float().flatten(0, 1), words.flatten())


def sharded(
    model: Any, form: str, ranks: int, *, options: dict[str, Any] | None = None, **arguments: Any
) -> Any:
    """`model` in `form`: "fsdp2", "eager", or a bucketing of compiled code, with `options`."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cuda", (ranks,))
    apply: Any = fsdp.fully_shard if form == "fsdp2" else autoshard.fully_shard
    for layer in model.blocks:
        apply(layer, mesh=mesh, **arguments)
    apply(model, mesh=mesh, **arguments)
    if form not in ("fsdp2", "eager"):
        options = {"bucketing": form, "strict": True, **(options or {})}
        model.compile(backend="autoshard", options=options)
    return model


def step_of(model: Any, rows: int = 1, length: int = 4) -> Step:
    words = torch.zeros((rows, length), dtype=torch.long, device="cuda")
    parameters = list(model.parameters())

    def step() -> None:
        model(words).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def memory_between_steps(model: Any) -> tuple[int, int]:
    """Bytes that the allocator has given out beside shards; and those of shards."""
    gc.collect()
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return torch.cuda.memory_allocated() - shards, shards


def counted(form: str, case: str) -> Counter[str]:
    """What is counted in a step."""
    ranks, hidden, arguments = CASES[case]
    with torch.device("cuda"):
        model = Net(BLOCKS, DIM, hidden)
    step = step_of(sharded(model, form, ranks, **arguments))
    with null.without_triton() as wrappers:
        for _ in range(WARM_UP):
            step()
    if form not in ("fsdp2", "eager"):
        assert any("torch.ops.autoshard.launch_gather" in text for text in wrappers)
    return null.counted(step)


def launches(found: Counter[str]) -> int:
    return found["kernels"] + found["copies_on_device"] + found["fills"]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("fake_world", "case"),
    [(ranks, case) for case, (ranks, _, _) in CASES.items() if case != "offload"],
    indirect=["fake_world"],
)
def test_kernel_launches(fake_world: None, case: str) -> None:
    """At most those of FSDP2, with the model's own among them."""
    theirs = counted("fsdp2", case)
    for form in ("eager", "per_unit", "auto"):
        ours = counted(form, case)
        # Copies of "auto" are those that the group of imagined ranks makes for grouped gathers.
        count = operator.itemgetter("kernels") if form == "auto" else launches
        assert count(ours) <= count(theirs), form
        assert ours["gemms"] == theirs["gemms"]


@pytest.mark.parametrize("form", ["eager", "per_unit", "auto"])
@pytest.mark.parametrize(
    ("fake_world", "case"), [(CASES[case][0], case) for case in CASES], indirect=["fake_world"]
)
def test_the_host_does_not_wait(fake_world: None, form: str, case: str) -> None:
    """But for gradients that go to the host, all of which have to be there at the end."""
    assert counted(form, case)["host_waits"] <= (2 if case == "offload" else 0)


@pytest.mark.parametrize("form", ["per_unit", "auto"])
@pytest.mark.parametrize("kind", ["wide", "words", "words in bf16"])
@pytest.mark.parametrize("fake_world", [8], indirect=True)
def test_the_peak_is_what_the_plan_says(fake_world: None, kind: str, form: str) -> None:
    """By torch's allocator, within 3 %; but for what libraries take beside, cuBLAS's workspace."""
    given: dict[str, Any] = {"mp_policy": MIXED} if kind == "words in bf16" else {}
    with torch.device("cuda"):
        whole = Net(BLOCKS, 1024, 4096) if kind == "wide" else Words()
        model: Any = sharded(whole, form, 8, **given)
    step = step_of(model, rows=4, length=512)
    with null.without_triton():
        for _ in range(WARM_UP):
            step()
    beside, _ = memory_between_steps(model)
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - beside
    planned = max(plan.peak_bytes for plan in autoshard.plans(model))
    assert peak == pytest.approx(planned, rel=0.03)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("fake_world", [8], indirect=True)
def test_a_part_lies_on_the_host(fake_world: None, lowering: str) -> None:
    """The host waits for none of it; the peak is what the plan says, and lower."""
    peaks, planned = [], []
    for share in (None, 0.75):
        with torch.device("cuda"):
            whole = Net(BLOCKS, 1024, 4096)
        options: dict[str, Any] = {"lowering": lowering}
        shards = sum(parameter.nbytes for parameter in whole.parameters()) // 8
        if share is not None:
            options["memory_budget"] = int(share * planned[0]) + 3 * shards
        with where_the_host_is_near() as topology:
            model: Any = sharded(whole, "auto", 8, options={**options, "topology": topology})
            step = step_of(model, rows=4, length=512)
            with null.without_triton():
                for _ in range(WARM_UP):
                    step()
        plans = autoshard.plans(model)
        gc.collect()
        beside = torch.cuda.memory_allocated() - shards
        torch.cuda.reset_peak_memory_stats()
        found = null.counted(step)
        peaks.append(torch.cuda.max_memory_allocated() - beside)
        planned.append(max(plan.peak_bytes for plan in plans))
        assert found["host_waits"] == 0
        assert (found["copies_to_host"] > 0) == (share is not None)
        assert found["copies_to_host"] <= found["copies_to_device"]
        assert peaks[-1] == pytest.approx(planned[-1], rel=0.03)
        assert any(block.host_bytes for block in plans[0].saved) == (share is not None)
    assert peaks[1] <= 0.75 * 1.02 * peaks[0]


@pytest.mark.parametrize("form", ["eager", "per_unit"])
@pytest.mark.parametrize("fake_world", [8], indirect=True)
def test_states_lie_on_the_host(fake_world: None, form: str) -> None:
    """Three buckets of them are on the device at most, in an update; the host waits for none."""
    bucket_bytes, found, least, peaks = 1 << 20, [], [], []
    for policy in (None, autoshard.OptimizerOffloadPolicy(bucket_bytes=bucket_bytes)):
        with torch.device("cuda"):
            model: Any = sharded(Net(BLOCKS, 512, 2048), form, 8, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        words = torch.zeros((1, 4), dtype=torch.long, device="cuda")

        def step(model: Any = model, optimizer: Any = optimizer, words: Tensor = words) -> None:
            model(words).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with null.without_triton():
            for _ in range(WARM_UP):
                step()
        beside, shards = memory_between_steps(model)
        model(words).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(null.counted(optimizer.step))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        least.append(beside)
        tensors = sum(len(list(state.values())) - 1 for state in optimizer.state.values())
        states = 2 * shards
        del model, optimizer, step
    assert least[0] - least[1] == pytest.approx(states, rel=0.01)
    assert 0 < peaks[1] <= 3 * bucket_bytes * 1.1 < states
    assert found[1]["host_waits"] == found[0]["host_waits"] == 0
    assert found[1]["copies_to_device"] == found[1]["copies_to_host"] == tensors


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("fake_world", [8], indirect=True)
def test_an_artefact_does_what_compiled_code_does(
    fake_world: None, tmp_path: Path, lowering: str
) -> None:
    """The same launches, the same memory, and nothing that waits."""
    options = {"lowering": lowering, "bucketing": "per_unit"}
    words = torch.zeros((1, 4), dtype=torch.long, device="cuda")
    found, peaks = [], []
    for is_loaded in (False, True):
        torch._dynamo.reset()
        with torch.device("cuda"):
            model: Any = Net(BLOCKS, DIM, 256)
        with null.without_triton():
            if is_loaded:
                with torch.device("cuda"):
                    make(tmp_path, Net(BLOCKS, DIM, 256), (words,), {}, options=options)
                autoshard.load_compiled(model, tmp_path)
            else:
                model.compile(backend="autoshard", options=options)
            model(words)  # which shards it
            step = step_of(model)
            for _ in range(WARM_UP):
                step()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found.append(null.counted(step))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert found[0] == found[1]
    assert found[1]["host_waits"] == 0
    assert peaks[0] == peaks[1]
