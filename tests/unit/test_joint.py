"""The passes over a joint graph: markers that are merged, tags that the partitioner obeys."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from support.programs import STEP, group, named, small
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from autoshard import passes
from autoshard.passes.ir.match import is_reduce_grad, is_unshard
from autoshard.passes.ir.text import render
from autoshard.runtime.compiled import kernels as kernels  # markers run by them

pytestmark = pytest.mark.usefixtures("process_group")


def after(text: str, transform: Callable[[fx.GraphModule], fx.GraphModule]) -> str:
    return render(passes.run(small(text), (transform,)).graph, axes={group(): "GROUP"}).replace(
        "'GROUP'", "GROUP"
    )


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip()


TIED = """
    in %w: f32[4,2]
    in %x: f32[2]
    in %tangent: f32[7]
    %embed: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
    %a: f32[7] = aten.mv(%embed, %x)
    %head: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
    %b: f32[7] = aten.mv(%head, %x)
    %g: f32[7,2] = aten.outer(%tangent, %x)
    %r: f32[4,2] = autoshard.reduce_grad(%g, 'f32[7,2]', GROUP, 0)
    %h: f32[7,2] = aten.outer(%b, %x)
    %q: f32[4,2] = autoshard.reduce_grad(%h, 'f32[7,2]', GROUP, 0)
    %add: f32[4,2] = aten.add.Tensor(%r, %q)
    return [%a, %b, %add]
    """


def test_tied_parameter_is_merged() -> None:
    """D-2, D-66."""
    assert after(TIED, passes.merge_markers) == dedent(
        """
        in %w: f32[4,2]
        in %x: f32[2]
        in %tangent: f32[7]
        %embed: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
        %a: f32[7] = aten.mv(%embed, %x)
        %b: f32[7] = aten.mv(%embed, %x)
        %g: f32[7,2] = aten.outer(%tangent, %x)
        %h: f32[7,2] = aten.outer(%b, %x)
        %add_tensor: f32[7,2] = aten.add.Tensor(%g, %h)
        %reduce_grad_default: f32[4,2] = \
autoshard.reduce_grad(%add_tensor, 'f32[7,2]', GROUP, 0)
        return [%a, %b, %reduce_grad_default]
        """
    )


def test_three_uses_are_merged() -> None:
    text = """
        in %w: f32[4]
        in %x: f32[7]
        %u0: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 3)
        %u1: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 3)
        %u2: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 3)
        %a: f32[7] = aten.mul.Tensor(%u0, %x)
        %b: f32[7] = aten.mul.Tensor(%u1, %x)
        %c: f32[7] = aten.mul.Tensor(%u2, %x)
        %r0: f32[4] = autoshard.reduce_grad(%a, 'f32[7]', GROUP, 3)
        %r1: f32[4] = autoshard.reduce_grad(%b, 'f32[7]', GROUP, 3)
        %add: f32[4] = aten.add.Tensor(%r0, %r1)
        %r2: f32[4] = autoshard.reduce_grad(%c, 'f32[7]', GROUP, 3)
        %add_1: f32[4] = aten.add.Tensor(%add, %r2)
        return [%add_1]
        """
    gm = passes.run(small(text), (passes.merge_markers,))
    assert sum(map(is_unshard, gm.graph.nodes)) == 1
    (reduce,) = filter(is_reduce_grad, gm.graph.nodes)
    assert gm.graph.output_node().args[0] == [reduce]
    assert [str(node) for node in gm.graph.nodes if node.target is torch.ops.aten.add.Tensor] == [
        "add_tensor",
        "add_tensor_1",
    ]
    assert named(gm.graph, "add_tensor_1").args == (
        named(gm.graph, "add_tensor"),
        named(gm.graph, "c"),
    )


def test_gradient_added_to_itself_is_merged() -> None:
    text = """
        in %g: f32[7]
        %r: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r, %r)
        return [%add]
        """
    assert after(text, passes.merge_markers) == dedent(
        """
        in %g: f32[7]
        %add_tensor: f32[7] = aten.add.Tensor(%g, %g)
        %reduce_grad_default: f32[4] = autoshard.reduce_grad(%add_tensor, 'f32[7]', GROUP, 0)
        return [%reduce_grad_default]
        """
    )


NOTHING_TO_MERGE = {
    "no markers": """
        in %x: f32[4]
        %add: f32[4] = aten.add.Tensor(%x, %x)
        return [%add]
        """,
    "two parameters": """
        in %w: f32[4]
        in %v: f32[4]
        in %x: f32[7]
        %u0: f32[7] = autoshard.unshard(%w, 'f32[7]', GROUP, False, 0)
        %u1: f32[7] = autoshard.unshard(%v, 'f32[7]', GROUP, False, 1)
        %r0: f32[4] = autoshard.reduce_grad(%u0, 'f32[7]', GROUP, 0)
        %r1: f32[4] = autoshard.reduce_grad(%u1, 'f32[7]', GROUP, 1)
        %add: f32[4] = aten.add.Tensor(%r0, %r1)
        return [%add]
        """,
    "a summand that others read": """
        in %g: f32[7]
        in %h: f32[7]
        %r0: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %r1: f32[4] = autoshard.reduce_grad(%h, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r0, %r1)
        return [%add, %r0]
        """,
    "a weighted sum": """
        in %g: f32[7]
        in %h: f32[7]
        %r0: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %r1: f32[4] = autoshard.reduce_grad(%h, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r0, %r1, alpha=2)
        return [%add]
        """,
    "a sum with something else": """
        in %g: f32[7]
        in %x: f32[4]
        %r0: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        %add: f32[4] = aten.add.Tensor(%r0, %x)
        return [%add]
        """,
}


@pytest.mark.parametrize("name", NOTHING_TO_MERGE)
def test_nothing_to_merge(name: str) -> None:
    text = NOTHING_TO_MERGE[name]
    assert after(text, passes.merge_markers) == dedent(text)


def test_merging_again_changes_nothing() -> None:
    once = passes.run(small(TIED), (passes.merge_markers,))
    again = passes.run(once, (passes.merge_markers,))
    assert render(again.graph) == render(once.graph)


def test_merging_keeps_values(group_of_one: str) -> None:
    """Alone in its group a rank's markers are copies, which really run."""
    text = TIED.replace("GROUP", "ALONE").replace("f32[4,2]", "f32[7,2]")
    gm = small(text, ALONE=group_of_one)
    merged = passes.run(gm, (passes.merge_markers,))
    inputs = [torch.arange(14.0).view(7, 2), torch.tensor([2.0, 3.0]), torch.arange(7.0)]
    want = fx.Interpreter(gm).run(*inputs)
    got = fx.Interpreter(merged).run(*inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # small integers: exact in any order


def tags(text: str) -> dict[str, CheckpointPolicy | None]:
    gm = passes.run(small(text), (passes.tag_recompute,))
    assert render(gm.graph) == render(small(text).graph)
    return {
        node.name: node.meta.get("recompute")
        for node in gm.graph.nodes
        if node.op == "call_function"
    }


RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


def test_resharded_parameter_is_recomputed_and_all_it_determines() -> None:
    """D-67."""
    assert tags(
        """
        in %w: f32[4,2]
        in %b: f32[4]
        in %x: f32[3,2]
        %u0: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, False, 0)
        %t: f32[2,7] = aten.t(%u0)
        %cast: bf16[2,7] = aten._to_copy(%t, dtype=torch.bfloat16)
        %back: f32[2,7] = aten._to_copy(%cast, dtype=torch.float32)
        %u1: f32[7] = autoshard.unshard(%b, 'f32[7]', GROUP, False, 1)
        %both: f32[2,7] = aten.add.Tensor(%back, %u1)
        %halves: (f32[2,4], f32[2,3]) = aten.split.Tensor(%both, 4, 1)
        %half: f32[2,4] = getitem(%halves, 0)
        %y: f32[3,7] = aten.mm(%x, %both)
        %z: f32[3,7] = aten.add.Tensor(%y, %u1)
        %relu: f32[3,7] = aten.relu(%z)
        %noise: f32[7,2] = aten.rand_like(%u0)
        %drop: f32[7,2] = aten.mul.Tensor(%u0, %noise)
        return [%relu, %half, %drop]
        """
    ) == {
        "u0": RECOMPUTE,
        "t": RECOMPUTE,
        "cast": RECOMPUTE,
        "back": RECOMPUTE,
        "u1": RECOMPUTE,
        "both": RECOMPUTE,
        "halves": RECOMPUTE,
        "half": RECOMPUTE,
        "y": None,  # from here on an activation is in it
        "z": None,
        "relu": None,
        "noise": None,  # drawn again, it would be another
        "drop": None,
    }


def test_kept_parameter_is_saved() -> None:
    assert tags(
        """
        in %w: f32[4,2]
        in %b: f32[4]
        %kept: f32[7,2] = autoshard.unshard(%w, 'f32[7,2]', GROUP, True, 0)
        %t: f32[2,7] = aten.t(%kept)
        %freed: f32[7] = autoshard.unshard(%b, 'f32[7]', GROUP, False, 1)
        %twice: f32[7] = aten.mul.Tensor(%freed, 2)
        %both: f32[2,7] = aten.add.Tensor(%t, %twice)
        return [%both]
        """
    ) == {"kept": SAVE, "t": None, "freed": RECOMPUTE, "twice": RECOMPUTE, "both": None}


def test_views_between_input_and_marker_are_recomputed() -> None:
    assert tags(
        """
        in %w: f32[8]
        in %x: f32[3]
        %view: f32[4,2] = aten.view(%w, [4, 2])
        %alias: f32[4,2] = aten.alias(%view)
        %other: f32[3] = aten.alias(%x)
        %u0: f32[7,2] = autoshard.unshard(%alias, 'f32[7,2]', GROUP, False, 0)
        return [%u0, %other]
        """
    ) == {"view": RECOMPUTE, "alias": RECOMPUTE, "other": None, "u0": RECOMPUTE}


def test_nothing_to_tag() -> None:
    assert tags(
        """
        in %x: f32[3]
        in %g: f32[7]
        %relu: f32[3] = aten.relu(%x)
        %ones: f32[3] = aten.ones([3])
        %r: f32[4] = autoshard.reduce_grad(%g, 'f32[7]', GROUP, 0)
        return [%relu, %ones, %r]
        """
    ) == {"relu": None, "ones": None, "r": None}


def test_tags_have_one_region() -> None:
    """The partitioner saves what leaves its region for a higher one."""
    gm = passes.run(small(STEP), (passes.tag_recompute,))
    regions = {n.meta["ac_graph_id"] for n in gm.graph.nodes if "recompute" in n.meta}
    assert len(regions) == 1


class Scaling(nn.Module):
    """Layer that scales by a buffer, which it overwrites before."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.2)
        return x + self.down((hidden * self.scale).sin())


def gradient(backend: str | None) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Scaling(), Scaling())
    if backend is not None:
        model.compile(backend=backend)
    model(torch.ones(3, 4)).square().mean().backward()
    grad = model[0].up.weight.grad
    assert grad is not None
    return grad


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks every tensor
def test_inductor_forgets_that_inputs_are_overwritten() -> None:
    """What `keep_overwritten` is for; without sharding, and none of our passes."""
    want, got = gradient(None), gradient("inductor")
    assert not torch.allclose(got, want, rtol=1e-3)


def test_what_the_model_says_stays() -> None:
    """Tags of the user's checkpointing go before what a budget has decided."""
    gm = small(
        "in %primals_1: f32[4]\nin %tangents_1: f32[4]\n"
        "%a: f32[4] = aten.sin(%primals_1)\n%b: f32[4] = aten.exp(%a)\n"
        "%c: f32[4] = aten.mul.Tensor(%tangents_1, %b)\nreturn [%b, %c]\n"
    )
    a, b = (node for node in gm.graph.nodes if node.name in ("a", "b"))
    a.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    b.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    passes.tag_saved(gm, saved=["exp:0"])
    assert a.meta["recompute"] == CheckpointPolicy.MUST_SAVE
    assert b.meta["recompute"] == CheckpointPolicy.PREFER_RECOMPUTE
    assert "ac_graph_id" not in a.meta
