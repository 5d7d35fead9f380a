"""Broken graphs are rejected, and the pass that breaks one is named."""

from __future__ import annotations

import pytest
import torch
from support.programs import STEP, STEP_TABLE, named, small, step
from torch import fx

from autoshard import passes
from autoshard.passes import PassError
from autoshard.passes.ir.verify import verify
from autoshard.passes.lowering.inductor import OrderError, check_order, planned_order

pytestmark = pytest.mark.usefixtures("process_group")


BROKEN = {
    "missing wait": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        return [%w]
        """,
        r"%ticket must go to one wait but goes to nothing",
    ),
    "wait used twice": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %one: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        %two: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        return [%one, %two]
        """,
        r"%ticket must go to one wait but goes to %one, %two",
    ),
    "ticket read": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        return [%ticket]
        """,
        r"%ticket must go to one wait but goes to %output",
    ),
    "wrong bucket": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 1)
        return [%got]
        """,
        r"%ticket and its wait %got differ in bucket: 0 and 1",
    ),
    "wrong members": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[7]) = autoshard.wait_gather(%ticket, 'f32[7]', GROUP, 0)
        return [%got]
        """,
        r"%ticket and its wait %got differ in members: 'f32\[8\]' and 'f32\[7\]'",
    ),
    "wrong group": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', 'another', 0)
        return [%got]
        """,
        r"%ticket and its wait %got differ in group",
    ),
    "wrong kind": (
        """
        in %w: f32[4]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[4]) = autoshard.wait_reduce(%ticket, 'f32[8]', GROUP, 0)
        return [%got]
        """,
        r"%ticket and its wait %got differ in kind: 'gather' and 'reduce'",
    ),
    "no launch": (
        """
        in %ticket: u8[1]
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        return [%got]
        """,
        r"%got waits for ticket, which is no launch",
    ),
    "launch of nothing packed": (
        """
        in %ticket: u8[1]
        %sent: u8[1] = autoshard.launch_reduce(%ticket, 'f32[8]', GROUP, 0)
        %got: (f32[4]) = autoshard.wait_reduce(%sent, 'f32[8]', GROUP, 0)
        return [%got]
        """,
        r"%sent launches ticket, which nothing packed for it alone",
    ),
    "packed otherwise": (
        """
        in %g: f32[8]
        %ticket: u8[1] = autoshard.pack_grads([%g], 'f32[8]', GROUP, 0)
        %sent: u8[1] = autoshard.launch_reduce(%ticket, 'f32[4,2]', GROUP, 0)
        %got: (f32[2,2]) = autoshard.wait_reduce(%sent, 'f32[4,2]', GROUP, 0)
        return [%got]
        """,
        r"%ticket and its launch %sent differ in members",
    ),
    "copy without a wait": (
        """
        in %w: f32[4]
        %copy: u8[1] = autoshard.launch_load([%w], 'cpu', 0)
        return [%w]
        """,
        r"%copy must go to one wait of the same tensors, not to nothing",
    ),
    "wait for a copy of something else": (
        """
        in %w: f32[4]
        in %v: f32[4]
        %copy: u8[1] = autoshard.launch_store([%w], 0)
        %got: (f32[4]) = autoshard.wait_store(%copy, [%v], 0)
        return [%got]
        """,
        r"%copy must go to one wait of the same tensors, not to %got",
    ),
    "wait for no copy": (
        """
        in %w: f32[4]
        in %ticket: u8[1]
        %got: (f32[4]) = autoshard.wait_load(%ticket, [%w], 'cpu', 0)
        return [%got]
        """,
        r"%got waits for ticket, which starts no copy",
    ),
    "saved value that never arrives": (
        """
        in %x: f32[4]
        %copy: u8[1] = autoshard.launch_offload(%x, 0)
        return [%x]
        """,
        r"%copy must go to one wait of the same tensors, not to nothing",
    ),
    "wait for another value's copy": (
        """
        in %x: f32[4]
        in %y: f32[4]
        %copy: u8[1] = autoshard.launch_offload(%x, 0)
        %got: f32[4] = autoshard.wait_offload(%copy, %y, 0)
        return [%got]
        """,
        r"%copy must go to one wait of the same tensors, not to %got",
    ),
    "wait for a copy the other way": (
        """
        in %x: f32[4]
        %copy: u8[1] = autoshard.launch_offload(%x, 0)
        %got: f32[4] = autoshard.wait_reload(%copy, %x, 'cpu', 0)
        return [%got]
        """,
        r"%copy must go to one wait of the same tensors, not to %got",
    ),
    "barrier before a wait": (
        """
        in %w: f32[4]
        in %x: f32[3]
        %ticket: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %y: f32[3] = autoshard_tests.exchange(%x, GROUP)
        %got: (f32[8]) = autoshard.wait_gather(%ticket, 'f32[8]', GROUP, 0)
        return [%got, %y]
        """,
        r"%y, which no collective may cross, stands between %ticket and its wait",
    ),
    "bucket launched twice": (
        """
        in %w: f32[4]
        %one: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %got: (f32[8]) = autoshard.wait_gather(%one, 'f32[8]', GROUP, 0)
        %two: u8[1] = autoshard.launch_gather([%w], 'f32[8]', GROUP, 0)
        %more: (f32[8]) = autoshard.wait_gather(%two, 'f32[8]', GROUP, 0)
        return [%got, %more]
        """,
        r"%two launches bucket 0 a second time",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_graph_is_rejected(name: str) -> None:
    """D-62."""
    text, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        verify(small(text))


def test_order_against_the_plan_is_rejected() -> None:
    gm = step()
    verify(gm)
    late = named(gm.graph, "launch_gather_second")
    named(gm.graph, "s0").prepend(late)  # valid but for the plan, which launches it before a wait
    gm.graph.lint()
    with pytest.raises(ValueError, match=r"%wait_gather_first departs.*plan"):
        verify(gm)


def test_copies_that_are_lowered_in_another_order_are_rejected() -> None:
    graph = small(
        """
        in %x: f32[4]
        %copy: u8[1] = autoshard.launch_offload(%x, 0)
        %got: f32[4] = autoshard.wait_offload(%copy, %x, 0)
        return [%got]
        """
    ).graph
    launch = "buf0 = torch.ops.autoshard.launch_offload.default(arg0_1, 0)"
    wait = "buf1 = torch.ops.autoshard.wait_offload.default(buf0, arg0_1, 0)"
    check_order("\n".join([launch, wait]), planned_order(graph))
    with pytest.raises(OrderError, match="planned offload copy 0, generated offloaded copy 0"):
        check_order("\n".join([wait, launch]), planned_order(graph))


def test_missing_bucket_of_the_plan_is_rejected() -> None:
    gm = step()
    results = named(gm.graph, "grad_second_w")
    results.replace_all_uses_with(named(gm.graph, "second_w"))
    for name in (
        "grad_second_w",
        "wait_reduce_second",
        "launch_reduce_second",
        "pack_grads_second",
    ):
        gm.graph.erase_node(named(gm.graph, name))
    gm.graph.lint()
    with pytest.raises(ValueError, match="plan"):
        verify(gm)


def test_pass_that_breaks_the_graph_is_named() -> None:
    def forget_a_wait(gm: fx.GraphModule) -> fx.GraphModule:
        wait = named(gm.graph, "wait_reduce_second")
        named(gm.graph, "grad_second_w").replace_all_uses_with(named(gm.graph, "second_w"))
        gm.graph.erase_node(named(gm.graph, "grad_second_w"))
        gm.graph.erase_node(wait)
        return gm

    with pytest.raises(PassError, match=r"forget_a_wait .*%launch_reduce_second"):
        passes.run(step(), (forget_a_wait,))


def test_pass_that_changes_a_shape_is_named() -> None:
    def take_another(gm: fx.GraphModule) -> fx.GraphModule:
        gm.graph.find_nodes(op="output")[0].replace_input_with(
            named(gm.graph, "grad_second_w"), named(gm.graph, "whole_second_w")
        )
        return gm

    def reduce_another(gm: fx.GraphModule) -> fx.GraphModule:
        named(gm.graph, "g").args = (named(gm.graph, "s2"), [3, 3])
        return gm

    def cast(gm: fx.GraphModule) -> fx.GraphModule:
        old = named(gm.graph, "c")
        with gm.graph.inserting_after(old):
            new = gm.graph.call_function(torch.ops.aten.relu.default, (old,))
        new.meta["val"] = old.meta["val"].to(torch.bfloat16)
        return gm

    for broken, message in (
        (
            take_another,
            r"%output takes %whole_second_w, f32\[2,3\], where %grad_second_w was f32\[1,3\]",
        ),
        (reduce_another, r"%g gives f32\[3,3\], and its meta says f32\[2,3\]"),
        (cast, r"%relu\w* gives f32\[3\], and its meta says bf16\[3\]"),
    ):
        with pytest.raises(PassError, match=rf"{broken.__name__} .*{message}"):
            passes.run(step(), (broken,))


def test_observer_sees_every_pass() -> None:
    seen: list[str] = []
    transforms = passes.pipeline(STEP_TABLE, graph="forward", bucketing="none")
    passes.run(small(STEP), transforms, after_each=lambda name, gm: seen.append(name))
    assert seen[-2:] == ["plan_buckets", "insert_collectives"]
    assert len(seen) == len(transforms)
