"""AOTAutograd: its settings, its cache, and the node that it puts into autograd's graph.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from functorch.compile import min_cut_rematerialization_partition as _partition
from torch._dynamo.backends import common as _backends
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.schemas import OutputType

from autoshard._torch import ops
from autoshard.one_piece import FEW, in_one_piece

aot_autograd: Callable[..., Any] = _backends.aot_autograd


def mark_boxed(call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return `call`, marked as boxed: AOTAutograd then passes it all inputs in one list."""
    call._boxed_call = True  # type: ignore[attr-defined]  # torch looks for it there
    return call


def min_cut_rematerialization_partition(
    gm: torch.fx.GraphModule, joint_inputs: Any, **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Part a joint graph by torch's partitioner, with values on all nodes of the parts.

    torch leaves out those of random ops that backward computes again.
    """
    forward, backward = _partition(gm, joint_inputs, **kwargs)
    for part in (forward, backward):
        for node in part.graph.nodes:
            if "val" not in node.meta and ops.is_around_random(node):
                ops.give_value(node)
    return forward, backward


@contextlib.contextmanager
def settings(*, is_cached: bool = False) -> Iterator[None]:
    """Set up AOTAutograd for a compilation in this context.

    - Its cache is used only with `is_cached`: on a hit none of our passes run, so that the caller
      needs their results from elsewhere.
    - A backward is compiled with its forward. torch would put off one that can't be compiled to the
      first backward, when it is too late to fall back.
    - A backward writes to no tensor that is saved for it (`_donating_nothing`).
    """
    with (
        torch._functorch.config.patch(
            enable_autograd_cache=is_cached, force_non_lazy_backward_lowering=True
        ),
        _donating_nothing(),
    ):
        yield


def _donating_nothing() -> contextlib.AbstractContextManager[object]:
    """Have AOTAutograd let no backward that is compiled in this context write to saved tensors.

    Patched: `torch._functorch._aot_autograd.graph_compile.collect_bw_donated_buffer_idxs`, which
             then finds none.
    Why:     with `retain_graph=True` another backward may follow, which is known too late. By
             default torch compiles backward when it first runs, and fails if a later one retains
             the graph and the first did not. `donated_buffer=False`, set while a graph is
             compiled, is no way: backward asks for the setting again, and then refuses.
    Tests:   `test_torch_refuses_a_second_backward`, needed; in tests/parity/eager/test_repeated.py
             `test_two_losses_over_one_forward`, works.
    """
    return mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])


class Stopped(Exception):
    """Signal raised, and caught, where a compilation is to go no further."""


def partition_joint(
    gm: torch.fx.GraphModule, example_inputs: Any, partition: Callable[..., object]
) -> None:
    """Give the joint graph of `gm`, as AOTAutograd would partition it, to `partition`, and stop.

    partition: has the arguments of `min_cut_rematerialization_partition`. It is not called for a
        graph without a backward.
    """

    def stopping(*args: Any, **kwargs: Any) -> Any:
        partition(*args, **kwargs)
        raise Stopped

    def stop(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        raise Stopped

    backend = aot_autograd(fw_compiler=stop, partition_fn=stopping)
    with settings(), contextlib.suppress(Stopped):
        backend(gm, example_inputs)


def caches_frames() -> bool:
    """Tell whether AOTAutograd's cache can be used for frames of ours.

    It can't if it is switched off; if its entries contain their graphs, which then have no name; or
    if ranks are configured to wait for each other in passes that a hit skips.
    """
    functorch, dynamo = torch._functorch.config, torch._dynamo.config
    is_off = torch.compiler.config.force_disable_caches
    return bool(functorch.enable_autograd_cache) and not (
        is_off
        or functorch.bundled_autograd_cache
        or getattr(dynamo, "caching_precompile", False)
        or getattr(functorch, "_sync_decision_cross_ranks", False)
        or getattr(functorch, "_sync_cache_decision_cross_ranks", False)
    )


def partitioner_settings() -> list[str]:
    """Versions and settings of torch's that what its partitioner does depends on, as text."""
    found = torch._functorch.config.save_config_portable()
    return [torch.__version__, *(f"{name}={found[name]!r}" for name in sorted(found))]


def ambient_dtypes() -> list[tuple[object, ...]]:
    """List the settings, besides its inputs, that the dtypes of a graph depend on.

    They are the default dtype, and autocast's state on each device. The key of AOTAutograd's cache
    lacks them in torch 2.11.
    """
    devices = torch._C._autocast_supported_devices()
    return [
        (torch.get_default_dtype(),),
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices),
    ]


def outputs_of_forward() -> tuple[list[bool], list[str]]:
    """Tell, of the frame that is compiled now, which outputs require a gradient, and what is odd.

    Returns (a bool for each output, what its graphs alone do not do, in words): AOTAutograd would
    write to inputs, or make views of them, beside its graphs. To be called as graphs are lowered.
    """
    meta: Any = torch._guards.TracingContext.get().fw_metadata
    odd = [
        f"output {number} is {each.output_type.name.replace('_', ' ')}"
        for number, each in enumerate(meta.output_info)
        if each.output_type not in (OutputType.non_alias, OutputType.unsafe_view_alias)
    ]
    if meta.num_mutated_inp_runtime_indices:
        odd.append("an input that requires a gradient, or is a view, is written to")
    return [bool(each.requires_grad) for each in meta.output_info], odd


def compiled_node(outputs: Sequence[Any]) -> Any:
    """Find AOTAutograd's node, of a compiled backward, from the `outputs` of its forward.

    The node is an output's `grad_fn`, or one step behind it if the output is a view. Returns None
    if there is no such node.
    """
    for each in outputs:
        fn = each.grad_fn if isinstance(each, torch.Tensor) else None
        behind = [fn, *(node for node, _ in fn.next_functions)] if fn is not None else []
        for node in behind:
            if isinstance(getattr(getattr(type(node), "_forward_cls", None), "_aot_id", None), int):
                return node
    return None


def keep_in_one_piece(node: Any) -> None:
    """Have the frames of the compiled backward of `node` lie in one piece of memory.

    Patches `_backward_impl` of the class that AOTAutograd made for this forward, once: autograd
    calls it, and no function of ours lies in between. See `one_piece.py`.
    node: AOTAutograd's.
    """
    run = type(node)._forward_cls._backward_impl
    if run.__code__.co_stacksize < FEW:
        in_one_piece(run)


def tangent_positions(node: Any) -> list[int]:
    """List the positions of the joint graph's tangents among the gradients given to `node`.

    They are in the order of the tangents; found once for a compiled forward, and kept on its
    metadata.
    node: AOTAutograd's, of a compiled backward.
    """
    metadata = type(node)._forward_cls.metadata
    known: list[int] | None = getattr(metadata, _POSITIONS, None)
    if known is None:
        known = list(_tangent_positions(metadata))
        setattr(metadata, _POSITIONS, known)
    return known


_POSITIONS = "_autoshard_tangent_positions"


def _tangent_positions(metadata: Any) -> Iterator[int]:
    """Yield the positions, among a forward's results, of those for which backward takes a gradient.

    Results are, in this order, inputs that forward mutates, outputs, and intermediates of which
    outputs are views. Left out are mutated inputs and outputs that need no gradient, and outputs
    that alias others.

    metadata: AOTAutograd's, of the forward.
    """
    mutated, outputs = metadata.mutated_inp_runtime_indices, metadata.output_info
    for position, index in enumerate(mutated):
        info = metadata.input_info[index]
        if info.mutates_data and info.requires_grad:
            yield position
    kinds = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    for position, info in enumerate(outputs, len(mutated)):
        # 2.12 and later tell one that needs no gradient of a backward that is traced.
        needs = getattr(info, "requires_grad_for_backward", info.requires_grad)
        if info.output_type in kinds and issubclass(info.raw_type, torch.Tensor) and needs:
            yield position
    first_base = len(mutated) + len(outputs)
    yield from range(first_base, first_base + metadata.num_intermediate_bases)
