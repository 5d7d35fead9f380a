"""Times of kernels by their shapes, and kernels of nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from autoshard.passes.planner.kernels import (
    Attention,
    Chip,
    Kernel,
    in_float8,
    kernel_us,
    product_us,
)
from autoshard.passes.planner.topology import Topology
from autoshard.passes.plans.roofline import kernel_of

CHIP = Chip(processors=100, flops_per_us=1e8, tile_depth=64, memory_bytes_per_us=2e6)
H100 = Topology.load("h100")
sizes = st.integers(1, 1 << 14)


def test_large_products_reach_the_rate() -> None:
    side = 16384
    assert 1.0 <= product_us(1, side, side, side, CHIP) / (2 * side**3 / 1e8) < 1.05


@given(st.integers(1, 4), sizes, sizes, sizes)
def test_no_product_is_faster_than_the_rate(batch: int, m: int, n: int, k: int) -> None:
    assert product_us(batch, m, n, k, CHIP) >= 2.0 * batch * m * n * k / 1e8


def test_an_unfinished_round_costs_more_than_its_tiles() -> None:
    """400 tiles of 256 x 128 are four rounds of 100; one more is a fifth, or half with smaller."""
    full, more = (product_us(1, 256 * tiles, 128, 8192, CHIP) for tiles in (400, 401))
    assert 1.1 * full < more <= 1.25 * full


def test_narrow_products_are_split_along_their_depth() -> None:
    """The gradient of a weight: 32 tiles, for 100 processors, of a depth of all tokens."""
    whole = 2 * 256 * 128 * (65536 + 64) / (1e8 / 100)
    assert product_us(1, 1024, 1024, 65536, CHIP) < whole / 2


def test_without_processors_shapes_do_not_matter() -> None:
    plain = CHIP._replace(processors=0)
    assert product_us(1, 3, 5, 7, plain) == pytest.approx(2 * 3 * 5 * 7 / 1e8)


def test_attention_leaves_out_what_the_mask_does() -> None:
    whole = Attention(32, 4096, 4096, 128, is_causal=False, is_backward=False)
    assert whole.flops == 4 * 32 * 4096**2 * 128
    causal = dataclasses.replace(whole, is_causal=True)
    assert causal.flops == whole.flops / 2
    assert dataclasses.replace(causal, is_backward=True).flops == 2.5 * causal.flops


def test_attention_is_slower_with_short_sequences_and_small_heads() -> None:
    ramp = dataclasses.replace(H100, attention_ramp=512.0)

    def rate(length: int, width: int) -> float:
        """Operations a microsecond."""
        about = Attention(1024, length, length, width, is_causal=True, is_backward=False)
        return about.flops / kernel_us(Kernel("bf16", attention=about), ramp)

    assert rate(512, 128) == pytest.approx(rate(1 << 20, 128) / 2, rel=0.01)
    assert rate(512, 64) == pytest.approx(0.85 * rate(512, 128))


def test_a_measured_time_counts_first() -> None:
    timed = dataclasses.replace(H100, ops={"known": 7.0})
    assert kernel_us(Kernel("bf16", bytes=1 << 30, key="known"), timed) == 7.0


def nodes(function: object, *args: Tensor) -> dict[str, fx.Node]:
    """Trace `function`, and return its nodes by the names of their ops."""
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    return {str(node.target): node for node in graph.nodes if node.op == "call_function"}


def test_kernels_of_nodes() -> None:
    """Products by their sides, attention of any device by its lengths, forward and backward."""
    bf16 = {"dtype": torch.bfloat16, "requires_grad": True}

    def step(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        """Attention and two products, and their gradients."""
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss = torch.addmm(w[0], out.reshape(-1, 64), w).sum() + torch.bmm(out[0], w[None]).sum()
        return torch.autograd.grad(loss, (q, w))

    q, k, v = (torch.randn(1, 1, 128, 64, **bf16) for _ in range(3))
    found = nodes(step, q, k, v, torch.randn(64, 32, **bf16))
    kernels = {name: kernel_of(node, None) for name, node in found.items()}
    products = {name.split(".")[1]: each.product for name, each in kernels.items() if each}
    assert products["addmm"] == (1, 128, 32, 64)
    assert products["bmm"] is not None
    about = {
        (each.attention.heads, each.attention.queries, each.attention.width): each.attention
        for each in kernels.values()
        if each is not None and each.attention is not None
    }
    assert list(about) == [(1, 128, 64)]
    both = [each.attention for each in kernels.values() if each and each.attention]
    assert sorted(each.is_backward for each in both) == [False, True]
    assert all(each.is_causal for each in both)


def test_attention_whose_heads_share_keys() -> None:
    """It counts by its queries' heads; torch 2.11 has no count of such attention's operations."""
    graph = fx.Graph()
    query, key = (graph.placeholder(name) for name in ("query", "key"))
    query.meta["val"] = torch.empty(2, 32, 128, 64, device="meta", dtype=torch.bfloat16)
    key.meta["val"] = torch.empty(2, 8, 128, 64, device="meta", dtype=torch.bfloat16)
    attend = torch.ops.aten._scaled_dot_product_flash_attention.default
    node = graph.call_function(attend, (query, key, key, 0.0, True))
    node.meta["val"] = query.meta["val"]
    kernel = kernel_of(node, None)
    assert kernel is not None
    assert kernel.attention is not None
    assert (kernel.attention.heads, kernel.attention.is_causal) == (64, True)


def test_attention_that_is_computed_again() -> None:
    """AOT wraps it, to keep the state of the generator: it counts in forward and in backward."""
    found: dict[str, list[fx.Node]] = {"forward": [], "backward": []}

    def recorded(kind: str) -> Any:
        """Record the nodes of a graph, and return it."""

        def compiler(gm: fx.GraphModule, inputs: Any) -> Any:
            """Note its nodes."""
            found[kind] += gm.graph.nodes
            return make_boxed_func(gm.forward)

        return compiler

    def attend(q: Tensor) -> Tensor:
        """Attention of `q` with itself."""
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    def step(q: Tensor) -> Tensor:
        """The same, computed again in backward."""
        out: Tensor = checkpoint(attend, q, use_reentrant=False)
        return out.sum()

    backend = aot_autograd(fw_compiler=recorded("forward"), bw_compiler=recorded("backward"))
    q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(step, backend=backend, fullgraph=True)(q).backward()
    kernels = {
        kind: [each for each in (kernel_of(node, None) for node in nodes) if each]
        for kind, nodes in found.items()
    }
    about = {
        kind: [(each.attention.is_backward, each.dtype) for each in of_kind if each.attention]
        for kind, of_kind in kernels.items()
    }
    assert about == {
        "forward": [(False, "bf16")],
        "backward": [(False, "bf16"), (True, "bf16")],
    }


def test_products_in_float8() -> None:
    """Faster at large sizes, casts and all; the vocabulary's product stays as it was."""
    large = Kernel(dtype="bf16", product=(1, 8192, 8192, 8192))
    assert kernel_us(in_float8(large, 128256), H100) < 0.75 * kernel_us(large, H100)
    last = Kernel(dtype="bf16", product=(1, 8192, 128256, 8192))
    assert in_float8(last, 128256) is last
    small = Kernel(dtype="bf16", product=(1, 128, 8192, 2048))  # casts of a factor take longer
    assert kernel_us(in_float8(small, 128256), H100) > kernel_us(small, H100)
