"""Time and memory of a step: what accumulation, replicas and ZeRO-1 add to its graphs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from support.models import Block
from torch import Tensor, nn

from autoshard.passes.planner.per_unit import by_bytes
from autoshard.passes.planner.topology import Topology
from autoshard.passes.planner.update import ON_DEVICE
from autoshard.tools.plan.estimate import Configuration, Estimate, StepGraphs, estimate
from autoshard.tools.plan.reading import read_network
from autoshard.tools.plan.steps import PlannedModel, traced_step

H100 = Topology.load("h100")
RANKS = 1024


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(256, 1024) for _ in range(6))

    def forward(self, ids: Tensor) -> Tensor:
        x = ids[..., None].expand(-1, -1, 256).to(next(self.parameters()).dtype)
        for layer in self.layers:
            x = layer(x)
        return x.float().sum()


@functools.cache
def traced(**changes: Any) -> StepGraphs:
    """Graphs of a step, without costs; each is traced once."""
    planned = PlannedModel("tower", Tower, None, 128, "bf16", "f32", "adamw", "eager")
    return traced_step(dataclasses.replace(planned, **changes), 2, "none")


@pytest.fixture
def step(fake_world: None) -> Any:
    """`traced`, in a group of ranks."""
    return traced


def found(step: StepGraphs, **changes: Any) -> Estimate:
    plain = Configuration(1, RANKS, reshards=True, micro_batch=2, checkpointing="none")
    return estimate(step, dataclasses.replace(plain, **changes), H100, searched=False)


pytestmark = pytest.mark.parametrize("fake_world", [RANKS], indirect=True)


def test_accumulation_repeats_graphs(step: Any) -> None:
    """Shards are reduced after each microbatch, and the sums stay in memory."""
    one, four = found(step()), found(step(), accumulate=4)
    graphs = sum(each.time_us for each in one.timelines.values())
    outside = one.outside
    assert one.step_time_us == pytest.approx(graphs + outside.optimizer_us)
    want = 4 * graphs + outside.optimizer_us + 3 * four.outside.between_us
    assert four.step_time_us == pytest.approx(
        want, rel=1e-12
    )  # shards are small: so is what is added
    assert four.outside.between_us > 0
    assert four.memory.peak_bytes >= one.memory.peak_bytes
    assert four.sample_us < one.sample_us


def test_copies_and_calls_are_those_of_the_cluster(step: Any) -> None:
    """Not of the one that graphs were priced with as they were traced."""
    plain = Configuration(1, RANKS, reshards=True, micro_batch=2, checkpointing="none")
    for change in ({"copy_gb_per_s": 1.0}, {"call_us": 10_000.0}):
        other = dataclasses.replace(H100, **change)
        slow = estimate(step(), plain, other, searched=False)
        assert slow.step_time_us > 1.05 * found(step()).step_time_us


def test_replicas_reduce_once(step: Any) -> None:
    replicas: dict[str, Any] = {"replicas": RANKS, "shards": 1}
    one, two = found(step(), **replicas), found(step(), **replicas, accumulate=2)
    compute = sum(sum(graph.op_us(H100)) for graph in step().graphs.values())
    more = two.step_time_us - one.step_time_us
    assert compute <= more <= 1.2 * compute + two.outside.between_us
    assert one.exposed_us > 0


def test_zero1_shards_states(step: Any) -> None:
    """It has a part of the states, steps sooner, and sends what it stepped."""
    replicas: dict[str, Any] = {"replicas": RANKS, "shards": 1}
    whole, zero1 = found(step(), **replicas), found(step(), **replicas, shards_states=True)
    assert zero1.configuration.strategy == "zero1"
    assert zero1.memory.optimizer < whole.memory.optimizer / 100
    assert zero1.outside.optimizer_us < whole.outside.optimizer_us / 100
    assert zero1.outside.spread_us > whole.outside.spread_us == 0


def test_states_on_the_host(step: Any) -> None:
    """Graphs are as fast, in less memory; the update takes as long as copies do, at least."""
    few: dict[str, Any] = {"shards": 2, "replicas": RANKS // 2}
    near, far = found(step(), **few), found(step(), **few, states_on_host=True)
    states = near.memory.optimizer
    assert far.host_state_bytes == states > 0 == near.host_state_bytes
    assert far.timelines["backward"].time_us == near.timelines["backward"].time_us
    assert far.memory.peak_bytes < near.memory.peak_bytes
    assert far.memory.optimizer <= ON_DEVICE * (64 << 20)
    host = H100.host_link
    assert host is not None
    assert far.outside.optimizer_us >= host.us_per_byte * states
    assert found(step(optimizer="sgd"), **few, states_on_host=True).host_state_bytes == 0


def test_states_in_float32(step: Any) -> None:
    """Weights, and two moments of each, whatever the parameters' dtype."""
    low = step(param_dtype="bf16", reduce_dtype="f32", optimizer="adamw-f32")
    memory = found(low, replicas=RANKS, shards=1).memory
    assert memory.optimizer == 3 * 2 * memory.parameters
    assert memory.gradients == 3 * memory.parameters  # sums in float32, and what is added


def test_autocast_gathers_shards_as_they_are(step: Any) -> None:
    cast, amp = (
        {each.name: each.num_bytes for each in step(is_amp=it).graphs["forward"].problem.gathers}
        for it in (False, True)
    )
    assert amp == {name: 2 * num_bytes for name, num_bytes in cast.items()}


def test_buckets_by_bytes(step: Any) -> None:
    """Each but the last has as much as was asked for, and no gradient more than it needs."""
    problem = step().graphs["backward"].problem
    runs = [run for run in by_bytes(problem, 1 << 20).runs if run.bucket.kind == "reduce"]
    assert [item for run in runs for item in run.bucket.items] == list(problem.reduces)
    for run in runs[:-1]:
        assert (
            run.bucket.num_bytes >= 1 << 20 > run.bucket.num_bytes - run.bucket.items[-1].num_bytes
        )


def test_dtype_of_reduces(step: Any) -> None:
    low = step(reduce_dtype="bf16").graphs["backward"].problem.reduces
    full = step().graphs["backward"].problem.reduces
    assert [2 * each.num_bytes for each in low] == [each.num_bytes for each in full]


@pytest.mark.usefixtures("fake_world")
def test_networks_are_read() -> None:
    assert read_network("800Gb/node", H100) == H100.with_network(800)
    assert read_network("100Gb/gpu", H100) == read_network("800Gb/node", H100)
    for text in ("fast", "0Gb/node", "800", "800Gb/rack"):
        with pytest.raises(ValueError, match="800Gb/node"):
            read_network(text, H100)


class Reading(Tower):
    """Tower with words, and with a head as wide as these."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(384, 256)
        self.head = nn.Linear(256, 384)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().sum()


def test_a_float8_step_has_its_head_as_it_was(step: Any) -> None:
    for graph in step(build=Reading, is_fp8=True).graphs.values():
        products = [each for each in graph.kernels if each is not None and each.product]
        assert {each.dtype for each in products if 384 in each.product} == {"bf16"}
        assert {each.dtype for each in products if 384 not in each.product} == {"f8e4m3"}


def test_a_chunk_of_the_logits_is_in_memory(step: Any) -> None:
    """An eighth of what has a row a token, and a column a word; times are as they were."""
    whole, chunked = (
        step(build=Reading, lowering="eager", is_loss_chunked=chunked).graphs
        for chunked in (False, True)
    )
    numel = 2 * 128 * 384
    for kind, size in (("forward", 2 + 4), ("backward", 2)):  # in bfloat16, and its float32 copy
        before, after = whole[kind].problem, chunked[kind].problem
        assert before.op_us == after.op_us
        given_up = [a - b for a, b in zip(before.live_bytes, after.live_bytes, strict=True)]
        assert min(given_up) == 0
        assert max(given_up) == numel * size * 7 // 8


def test_a_loss_in_chunks_needs_logits(step: Any) -> None:
    with pytest.raises(RuntimeError, match="a loss in chunks needs logits: this model makes no t"):
        step(is_loss_chunked=True)


def test_float8_is_for_all_but_the_vocabulary(step: Any) -> None:
    """Its products are faster where they are large; with their width as vocabulary, none is."""
    graph = step().graphs["forward"]
    assert graph.in_float8(1024).kernels == graph.kernels
    changed = [each for each in graph.in_float8(7).kernels if each and each.cast_bytes]
    assert changed
    assert all(each.dtype == "f8e4m3" for each in changed)
